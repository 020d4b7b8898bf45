"""Host emulation stands in for a GPU in the probes it names, once, and never on a machine that has one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

PROBE = """
import json, sys
import torch
from sgl_lowlatency.runtime import emulated_device
gpu = sys.argv[1] == "gpu"
if gpu:
    torch.cuda.is_available = lambda: True
before = torch.cuda.get_device_properties
emulated_device.install()
emulated_device.install()
facts = {"replaced": torch.cuda.get_device_properties is not before}
if not gpu:
    from sglang.srt.kernel_plugins.amd import binding as amd
    from sglang.srt.kernel_plugins.nvidia import binding
    from vllm._custom_ops import rotary_embedding
    import importlib.util
    facts |= {
        "isa": [binding.device_isa(), amd.device_isa()],
        "sms": torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count,
        "free": torch.cuda.mem_get_info()[0],
        "capturing": torch.cuda.is_current_stream_capturing(),
        "vllm": importlib.util.find_spec("vllm") is not None,
        "available": torch.cuda.is_available(),
    }
    try:
        rotary_embedding(1, 2, 3)
    except NotImplementedError as error:
        facts["rope"] = str(error)
print(json.dumps(facts))
"""


def probe(what):
    environment = {**os.environ, "SGL_LOWLATENCY_EMULATE": "1"}
    result = subprocess.run([sys.executable, "-c", PROBE, what], env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: emulation is not installed on it")
def test_the_probes_are_replaced_and_nothing_pretends_that_cuda_works():
    facts, log = probe("no gpu")
    assert facts["replaced"] and facts["isa"] == ["sm_90", "gfx950"] and facts["sms"] == 256 and facts["free"] > 1 << 30
    assert facts["capturing"] is False and facts["available"] is False and facts["vllm"]
    assert "native rotary embedding was expected" in facts["rope"]
    assert log.count("Host emulation is on") == 1, "the second install does nothing"


def test_a_machine_with_a_gpu_is_left_alone():
    facts, log = probe("gpu")
    assert facts == {"replaced": False}
    assert "SGL_LOWLATENCY_EMULATE=1 is ignored: this machine has a GPU" in log
