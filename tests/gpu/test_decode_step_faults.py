"""A step that cannot go on ends itself within its deadline, says why, and leaves the GPU free."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decode_step_cases import Runner, gate
from decode_step_gpu import CUT, gpu_runner, weights_of

from sgl_lowlatency.reference.inputs import random_step


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("lost_words", r"waited 0\.5\d s for word (0|4|512|516|1024|1028) of edge 'out_proj' of layer 0 \(residual stream after attention\)"),
        ("token", r"row 1 has input id 2048, outside 0\.\.2047 "),
        ("slot", r"row 1 has KV slot -3, outside 0\.\."),
    ],
)
def test_a_fault_is_named_and_traps(kind, message):
    script = Path(__file__).parent / "faulty_step.py"
    result = subprocess.run([sys.executable, script, kind], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(message, result.stdout), result.stdout
    trapped = re.search(r"trapped after (\d+\.\d+) s", result.stdout)
    assert trapped, result.stdout
    assert float(trapped[1]) < 2.0
    # The device serves other processes, and this one, as before.
    runner = gpu_runner("qwen3-0.6b", 52, (2,))
    inputs = random_step(CUT["qwen3-0.6b"], [65, 17], 52, "cuda")
    assert gate(CUT["qwen3-0.6b"], runner.weights, [inputs], [runner.run(inputs)]).passed


def test_a_grid_that_is_not_resident_is_refused():
    geometry = CUT["qwen3-0.6b"]
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    runner = Runner(geometry, weights_of("qwen3-0.6b", 52), (1,), num_sms + 1)
    with pytest.raises(RuntimeError, match=f"needs {num_sms + 1} blocks resident at once"):
        runner.attach(random_step(geometry, [5], 52, "cuda"))
