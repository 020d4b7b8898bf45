"""The draft models of benchmark/drafts.py in SGLang's own draft classes: every parameter is loaded, and the target's successors are proposed.

Oracle: forced_text.successor, which the target's LM head is made of; the target itself names the first token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.dspark import Qwen3DSparkModel
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

RUNNER = Path(__file__).with_name("draft_runner.py")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="host emulation is not installed on a machine with a GPU")
CLASSES = {
    "eagle3": LlamaForCausalLMEagle3.__name__, "dflash": DFlashDraftModel.__name__, "dspark": Qwen3DSparkModel.__name__,
    "standalone": "Qwen3ForCausalLM", "standalone llama": "LlamaForCausalLM",
}
SHARED = {"eagle3": ["lm_head.weight", "model.embed_tokens.weight"]}  # the worker gives these the target's


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """What draft_runner.py prints, in a process of its own."""
    environment = {**os.environ, "SGL_LOWLATENCY_EMULATE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(RUNNER), str(tmp_path_factory.mktemp("drafts"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("draft", CLASSES)
def test_sglang_loads_every_tensor_and_fills_every_parameter(facts, draft):
    got = facts[draft]
    assert got["class"] == CLASSES[draft]
    assert got["unfilled"] == SHARED.get(draft, [])
    assert got["filled_elements"] == got["elements"], "a tensor that no parameter took"


@pytest.mark.parametrize("draft", CLASSES)
def test_the_load_hook_draws_what_the_files_hold(facts, draft):
    assert facts[draft]["drawn_as_in_files"]


@pytest.mark.parametrize("draft", ["eagle3", "dflash", "dspark"])
def test_drafts_are_the_targets_own_tokens(facts, draft):
    got = facts[draft]
    assert got["proposed"] == got["wanted"] and all(len(tokens) == 4 for tokens in got["wanted"])
    assert [tokens[0] % 64 for tokens in got["wanted"]] == [1, 1, 0], "a text that wraps is among them"


def test_dflash_reads_what_the_target_hands_over(facts):
    """States that are one position late make drafts that are: a plugin that handed over wrong rows would lose its accept length."""
    got = facts["dflash"]
    for late, wanted in zip(got["from_states_of_the_position_before"], got["wanted"], strict=True):
        assert late == [wanted[0], wanted[0], *wanted[1:3]]


def test_the_layers_are_those_that_the_config_names(facts):
    assert facts["layers_to_capture"] == [2, 4, 5]
