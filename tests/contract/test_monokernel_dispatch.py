"""AMD's steps in real SGLang code: its model runner, its install and its dispatch by shape key, on an emulated gfx950; verify steps of hand-built batches.

Oracles: the model's own forward on the same batch, and a float64 forward of prompt and drafts.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgl_lowlatency.cli.tiny_model import make_tiny_model
from sgl_lowlatency.guard.family import QWEN3, QWEN3_MOE

RUNNER = Path(__file__).with_name("monokernel_runner.py")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="host emulation is not installed on a machine with a GPU")


@pytest.fixture(scope="module", params=[QWEN3_MOE, QWEN3], ids=lambda family: family.name)
def family(request):
    if not request.param.is_moe and not request.config.getoption("--amd-servers"):
        pytest.skip("--amd-servers runs the dense model's steps here too")
    return request.param


@pytest.fixture(scope="module")
def facts(tmp_path_factory, family):
    """What monokernel_runner.py prints, in a process of its own: emulation and SGLang's globals stay there."""
    model = tmp_path_factory.mktemp("model")
    make_tiny_model(model, family=family)
    environment = {**os.environ, "SGL_LOWLATENCY_EMULATE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(RUNNER), str(model)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_verify_steps_run_the_kernels_and_give_what_the_model_does(facts, family):
    """Of a MoE model only as far as float64 decides it: a near tie of the router's makes two correct forwards take other experts."""
    got = facts["dispatch"]
    assert got["summary"].startswith("monokernel (verify, 4 tokens a request): 2 layers of two launches, ") and got["logits_shape"] == [8, 512]
    if not family.is_moe:
        assert max(got["logits"], got["hidden_states"], got["kv"]) < 0.03
    assert got["worst_share_of_bound"] < 1, "further from float64 than bf16 rounding takes SGLang's own path"
    assert got["decode_equals_original"]
    assert got["executed"] == {"8": 1} and got["mode"] == "verify", "the self-check's launches serve nobody"
    assert got["fallbacks"] == {"prefill": 2, "a decode step in a speculative server": 1}


def test_the_rope_table_is_the_one_that_sglang_reserves_after_the_build(facts):
    rope = facts["dispatch"]["rope"]
    assert rope["build"] == 2048 < rope["reserved"] == rope["kernels"] and rope["is_the_models"]


def test_sglang_reserves_rope_behind_the_install():
    """Were it before, a table taken in the build would do."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    source = inspect.getsource(ModelRunner.load_model)
    assert 0 < source.index("install_monokernel_forward(") < source.index("reserve_rope_cache_for_long_sequences(")


def test_wrong_kernels_are_refused_at_their_first_verify_step(facts):
    start = r"monokernel self-check failed, the server is refused: verify of 4 rows, 4 a request, lengths \[1, 2, 3, .* FAILED: .* is not within 0\.0"
    assert re.match(start, facts["wrong"])


def test_a_withheld_word_ends_the_step_within_its_deadline_with_its_record(facts):
    record = r"monokernel stopped: rank 0, SM \d, block \d waited 0\.0\d s for word \d+ of edge 'qkv' of layer 0 \(q, k and v\), which no block has written"
    assert re.fullmatch(record, facts["hanging"])


def test_a_draft_model_of_the_targets_architecture_keeps_its_own_forward(facts):
    assert facts["draft"] == "AmdDraftStep"
