"""Verify steps of real SGLang code: its model runner and its dispatch, driven as its NGRAM worker drives them.

Oracles: the model's own forward on the same batch, and a float64 forward of prompt and drafts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgl_lowlatency.cli.tiny_model import make_tiny_model
from sgl_lowlatency.guard.family import QWEN3, QWEN3_MOE
from sgl_lowlatency.specs.nvidia.dense import MAX_ROWS, QWEN3_SPEC
from sgl_lowlatency.specs.nvidia.qwen3_moe import QWEN3_MOE_SPEC

RUNNER = Path(__file__).with_name("verify_runner.py")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="host emulation is not installed on a machine with a GPU")


@pytest.fixture(scope="module", params=[QWEN3, QWEN3_MOE], ids=lambda family: family.name)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def facts(tmp_path_factory, family):
    """What verify_runner.py prints, in a process of its own: emulation and SGLang's globals stay there."""
    model = tmp_path_factory.mktemp("model")
    make_tiny_model(model, family=family)
    environment = {**os.environ, "SGL_LOWLATENCY_EMULATE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(RUNNER), str(model)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_verify_steps_run_the_kernel_and_give_what_the_model_does(facts, family):
    """Of a MoE model only as far as float64 decides it: a near tie of the router's makes two correct forwards take other experts."""
    got = facts["dispatch"]
    assert got["widths"] == list(range(4, MAX_ROWS + 1, 4)) and got["summary"].startswith("decode_step (verify, 4 tokens a request)")
    assert (got["logits_dtype"], got["logits_shape"]) == ("torch.float32", [12, 512])
    if not family.is_moe:
        assert got["logits"] < 0.03 and got["kv"] < 0.03
        assert got["hidden_states"] < 0.03, "EAGLE drafts read the final norm's output"
    assert got["other_slots_kept"]
    assert not got["null_has_hidden_states"]
    assert got["worst_share_of_bound"] < 1, "further from float64 than bf16 rounding takes SGLang's own path"
    assert got["executed"] == {"12": 2} and got["mode"] == "verify", "two steps; the self-check's launches serve nobody"
    assert got["decode_equals_original"]
    assert got["fallbacks"] == {
        "prefill": 3, "a decode step in a speculative server": 1, f"{MAX_ROWS + 4} rows, built for 4 to {MAX_ROWS}": 1
    }


def test_speculation_writes_the_text_that_float64_decides(facts):
    """Accepted drafts stay in the cache, rejected ones are written over: neither may change what follows."""
    got = facts["texts"]
    assert got["wrong"] == [] and got["tokens"] >= 2 * got["wanted"]
    assert got["steps"] < 0.7 * got["steps_without_drafts"], "hardly a draft was accepted: nothing was shown"


def test_layers_start_from_the_streams_they_are_given(facts, family):
    if not family.is_moe:
        assert "streams" not in facts
        return
    got = facts["streams"]
    assert got["embedding"] and got["left_by_the_first"], "what a layer would have started from, rounded as SGLang rounds it"
    assert got["values"], "V of the layer is its projection of the norm of what it was given, and nothing else"
    assert 0 < got["left_by_the_second"] < 0.01, "the layer adds to what it was given"
    assert got["given_is_kept"] and got["put_back"]


def test_a_wrong_kernel_is_refused_at_its_first_verify_step(facts, family):
    bound = (QWEN3_MOE_SPEC if family.is_moe else QWEN3_SPEC).numerics.tolerances["logits.relative_l2"]
    error = facts["refused"]["error"]
    assert error.startswith("decode_step self-check failed, the server is refused: verify of 4 rows, 4 a request, lengths [1, 2, 3, ")
    assert "logits.relative_l2" in error and f"is not within {bound:g}" in error


def test_a_draft_model_of_the_targets_architecture_keeps_its_own_forward(facts):
    assert facts["draft"] == {"kind": "DraftStep", "same": True, "fallbacks": {"a draft model's step": 2}}
