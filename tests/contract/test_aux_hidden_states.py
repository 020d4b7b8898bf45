"""Auxiliary hidden states as real SGLang models capture them, and the verify steps of the drafts that read them.

Oracle: the model's own forward on the same batch (aux_runner.py); the wheel's text for what only runs on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states
from sglang.srt.speculative import dflash_utils
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang_source import source

from sgl_lowlatency.cli.tiny_model import TinyModel, make_tiny_model
from sgl_lowlatency.guard.family import LLAMA, QWEN2, QWEN3
from sgl_lowlatency.guard.speculation import CHAIN_BACKENDS

RUNNER = Path(__file__).with_name("aux_runner.py")
ROWS = {"eagle3": 8, "dflash": 4}  # of the steps with their verify inputs, two requests and one
HIDDEN, BF16 = TinyModel().hidden_size, "torch.bfloat16"
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="host emulation is not installed on a machine with a GPU")


@pytest.fixture(scope="module", params=[QWEN3, LLAMA, QWEN2], ids=lambda family: family.architecture)
def facts(request, tmp_path_factory):
    """What aux_runner.py prints of a model of four layers, in a process of its own."""
    model = tmp_path_factory.mktemp("model")
    make_tiny_model(model, TinyModel(num_hidden_layers=4), family=request.param)
    environment = {**os.environ, "SGL_LOWLATENCY_EMULATE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(RUNNER), str(model)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"architecture": request.param.architecture}


@on_the_cpu
@pytest.mark.parametrize("algorithm", ROWS)
def test_the_fifth_argument_is_what_the_model_gives_packed(facts, algorithm):
    """The model gives a list in the order of its layers, whatever order they were named in; ours is that, packed."""
    assert facts["layers_to_capture"] == [2, 0, 1, 4, 2], "an output is the input of the layer behind it"
    got, rows = facts[algorithm], ROWS[algorithm]
    assert got["theirs"] == {"type": "AuxHiddenStateList", "dtypes": [BF16] * 3, "shapes": [[rows, HIDDEN]] * 3}
    assert got["ours"] == {"type": "Tensor", "dtypes": [BF16], "shapes": [[rows, 3 * HIDDEN]]}


@on_the_cpu
@pytest.mark.parametrize("algorithm", ROWS)
def test_a_draft_is_handed_what_the_model_would_hand_it(facts, algorithm):
    got = facts[algorithm]
    assert got["shapes"] == [[ROWS[algorithm], 3 * HIDDEN]] * 2
    embedding, *inside = got["distances"]
    assert embedding == 0.0 and len(inside) == 2 and all(0 < distance < 0.03 for distance in inside), got
    assert got["logits"] < 0.05


@on_the_cpu
def test_steps_are_ours_and_ragged_ones_are_not(facts):
    assert facts["executed"] == {"8": 2, "4": 1}, "of EAGLE3, of DFLASH, and one of two requests that wants no hidden states"
    assert not facts["null_has_hidden_states"] and not facts["ragged_is_planned"]
    assert facts["fallbacks"] == {"prefill": 2, "a ragged verify step": 1}
    assert facts["layers_after_the_self_check"] == facts["layers_to_capture"]


@on_the_cpu
def test_a_kernel_that_captures_what_leaves_a_layer_is_refused(facts):
    failed = facts["refusal"].split("FAILED: ")[1]
    assert failed.startswith("aux.relative_l2 ") and "aux.layer_ratio" in failed.split(" (")[0]
    assert "logits.relative_l2" not in failed.split(" (")[0], "all else is right"


@on_the_cpu
def test_only_qwen2_names_no_layers_for_dflash_and_dspark(facts):
    assert facts["can_dflash"] == (facts["architecture"] != "Qwen2ForCausalLM")


def test_a_packed_tensor_is_taken_as_it_is():
    packed = torch.zeros(2, 6)
    assert pack_aux_hidden_states(packed) is packed
    parts = [torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)]
    assert torch.equal(pack_aux_hidden_states(parts), torch.cat(parts, dim=1))


def test_graphs_bring_dense_models_no_buffer_for_what_they_capture():
    """Only models that say how wide theirs is get one, and must fill it."""
    assert "isinstance(model, _SupportsPackedAuxHiddenStates)" in source("srt.model_executor.model_runner_components.misc_utils")
    for model in ("qwen3", "qwen2", "llama"):
        text = source(f"srt.models.{model}")
        assert "get_aux_hidden_states_width" not in text and "AuxHiddenStateList()" in text, model


def test_layers_are_named_after_the_build_and_before_graphs_are_captured():
    """The build is the end of `initialize`; the layers are named with the attention backends, which graphs need."""
    runner = source("srt.model_executor.model_runner")
    methods = {text.split("(")[0]: text for text in runner.split("\n    def ")}
    assert methods["initialize"].rstrip().endswith(")") and "install_megakernel(" in methods["initialize"][-300:]
    assert [name for name, text in methods.items() if "configure_aux_hidden_state_capture(\n" in text] == ["init_attention_backends"]
    assert "Requires init_attention_backends() to have run." in source("srt.model_executor.model_runner_components.cuda_graph_setup")
    assert "layers_to_capture" not in runner, "nobody else changes them"


def test_dflash_and_dspark_verify_a_chain_without_a_mask():
    made = DFlashVerifyInput(draft_token=torch.zeros(4), positions=torch.zeros(4), draft_token_num=4)
    assert made.is_verify_input() and (made.topk, made.custom_mask, made.ragged_verify_layout) == (1, None, None)
    worker = source("srt.speculative.dflash_worker_v2")
    assert "TARGET_VERIFY uses standard causal masking; custom masks are unnecessary here." in worker
    verify = source("srt.speculative.dspark_components.dspark_verify")
    assert verify.count("DFlashVerifyInput(") == verify.count("custom_mask=None,") == 3
    hook = source("srt.arg_groups.speculative_hook")
    for algorithm in ("DFLASH", "DSpark"):
        assert f'"{algorithm} only supports speculative_eagle_topk == 1; overriding speculative_eagle_topk=%s to 1."' in hook


def test_backends_that_verify_chains_verify_them_causally_without_a_mask():
    classes = {
        "fa3": "FlashAttentionBackend", "fa4": "FlashAttentionBackend", "flashinfer": "FlashInferAttnBackend", "triton": "TritonAttnBackend",
        "trtllm_mha": "TRTLLMHAAttnBackend",
    }
    assert set(classes) == set(CHAIN_BACKENDS)
    assert set(classes.values()) <= dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS


def test_drafts_of_every_algorithm_are_built_in_the_scope_that_tells_them_from_the_target():
    """A draft of the target's architecture would get the target's spec, and DFLASH's verify-like draft block is not causal."""
    assert "with draft_model_build_scope():" in source("srt.speculative.draft_worker_common")
    for worker in ("dflash_worker_v2", "dspark_components.dspark_worker_v2"):
        assert "draft_worker_common" in source(f"srt.speculative.{worker}"), worker
    assert "draft_model_build_scope()," in source("srt.speculative.eagle_worker_v2")


def test_positions_of_a_verify_block_are_int64():
    """As the kernel reads them; a step of others would run SGLang's forward."""
    assert "(bs, verify_w), dtype=torch.int64" in source("srt.speculative.dspark_components.dspark_planner")
    worker = source("srt.speculative.dflash_worker_v2")
    block = worker[worker.index("self._draft_block_positions_buf = torch.empty(") :]
    assert "dtype=torch.int64" in block[: block.index(")\n")]
