"""SGLang's own draft workers serve, plugin off and on: verify_ab.py as it runs on a GPU, with the kernel in emulation and cpu_speculation.py in
place of what SGLang has for CUDA only.

Oracle: the forced text, which either server must generate in equally many verify steps (benchmark/forced_text.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cpu_speculation
import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has gpu_checks.sh")
CASES = ["--model", "qwen3-tiny", "--layers", "8", "--context", "90", "--period", "16"]
CASES += ["--short", "4", "--long", "20", "--batches", "1,2", "--repeats", "1"]
# the layers whose inputs the plugin hands over
ALGORITHMS = {"eagle3": [2, 4, 5], "dflash": [2, 4, 5], "dspark": [2, 4, 5], "standalone": []}


def verify_ab(folder: Path, algorithm: str, register: str = "register", **variables: str) -> tuple[subprocess.CompletedProcess, dict]:
    """(the process, what it wrote) of one run. register: of cpu_speculation's entry points."""
    path = [*cpu_speculation.install(folder / "stand-in", register), str(ROOT / "src"), str(ROOT)]
    environment = {**os.environ, "SGL_LOWLATENCY_EMULATE": "1", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **variables}
    environment["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmark.serve.verify_ab", "--device", "cpu", "--algorithm", algorithm, *CASES]
    command += ["--out", str(folder), "--commit", "test", "--deadline", "280"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done, json.loads((folder / f"served-{algorithm}-qwen3-tiny.json").read_text())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_draft_is_accepted_and_every_verify_step_is_ours(tmp_path, algorithm, request):
    if algorithm != "dflash" and not request.config.getoption("--all-drafts"):
        pytest.skip("takes more than a minute: --all-drafts serves it")
    done, content = verify_ab(tmp_path, algorithm)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert content["problems"] == [] and [row["rows"] for row in content["rows"]] == [4, 8]
    for row in content["rows"]:
        assert row["equal_work"] and row["served"], row
        assert row["off_accept_length"] == row["on_accept_length"] == [pytest.approx(4.0)]
        # the prefill makes the first token, every step up to four more: 3 in 1, 19 in 5
        assert row["verify_steps_by_request"] == [[1, 5]] * row["batch"]
        assert row["on_steps"] == {str(row["rows"]): 6.0}
    assert content["captured_layers"] == ALGORITHMS[algorithm]
    assert [line.split(" rows")[0].split()[-1] for line in content["self_checks"]][:1] == ["4"]
    others = set(content["coverage"]["fallbacks"]) - {"prefill"}
    assert others == ({"a draft model's step"} if algorithm == "standalone" else set())


def test_states_of_other_rows_lose_drafts(tmp_path):
    """What the self-check would refuse, served without it: the drafts that read the states are refused by the target, and the run decides nothing."""
    done, content = verify_ab(tmp_path, "dflash", "register_with_late_states", SGL_LOWLATENCY_SELF_CHECK="0")
    assert done.returncode == 1 and content["problems"][0] == "the plugin's server passed no self-check"
    for row in content["rows"]:
        assert row["off_accept_length"] == [pytest.approx(4.0)] and row["on_accept_length"][0] < 3.0
        assert not row["equal_work"] and row["served"] and "verify steps by request" in row["not_decidable"]
