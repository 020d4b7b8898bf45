"""What the runtime reads of SGLang beyond the published contract is there, under the names it uses."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.plugin_kernels.amd.spec import ShapeKey
from sglang.srt import runtime_context
from sglang.srt.kernel_plugins.amd import binding as amd_binding
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3Model
from sglang.srt.models.qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeForCausalLM, Qwen3MoeModel, Qwen3MoeSparseMoeBlock
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang_source import source

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.fallback import fallback_reason
from sgl_lowlatency.specs.nvidia.dense import MAX_ROWS


def parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("model", [Qwen3ForCausalLM, Qwen3MoeForCausalLM])
def test_plan_knows_every_parameter_of_the_forward_it_stands_before(model):
    theirs = parameters(model.forward)
    assert theirs[:4] == ["self", "input_ids", "positions", "forward_batch"]
    ours = inspect.signature(fallback_reason).parameters
    assert [name for name in theirs[4:] if name not in ours] == []
    for name in theirs[4:]:
        assert ours[name].default == inspect.signature(model.forward).parameters[name].default, name


@pytest.mark.parametrize("model", [Qwen3ForCausalLM, Qwen3MoeForCausalLM])
def test_the_logits_processor_is_called_as_the_model_calls_it(model):
    assert parameters(LogitsProcessor.forward)[:6] == [
        "self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states",
    ]
    assert "self.logits_processor(" in inspect.getsource(model.forward)


def test_a_batch_of_the_self_check_leaves_no_field_of_the_live_one_that_names_its_requests():
    """Fields that hold the live batch's requests or bind its outputs are replaced; a new one upstream must be looked at."""
    replaced = inspect.getsource(sglang_state.check_batch)
    fields = {field.name for field in dataclasses.fields(ForwardBatch)}
    per_request = {
        "input_ids", "req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu", "seq_lens_sum", "orig_seq_lens",
        "positions", "out_cache_loc", "out_cache_loc_virtual", "kv_loc_plan", "kv_loc_cols", "residual_stream",
        "next_token_logits_buffer", "aux_hidden_states_buffer", "capture_hidden_mode", "return_logprob",
        "forward_metadata_ready", "batch_size", "spec_info",
    }
    assert per_request <= fields
    assert [name for name in sorted(per_request) if f"{name}=" not in replaced] == []


@pytest.mark.parametrize(
    "owner, name",
    [
        (AttentionBackend, "kv_index_translator"),
        (AttentionBackend, "init_forward_metadata"),
        (KVIndexTranslator, "bind_runner_slots"),
        (MHATokenToKVPool, "get_kv_buffer"),
        (capture_mode, "is_capture_mode"),
        (ForwardMode.DECODE, "is_target_verify"),
    ],
)
def test_the_names_exist(owner, name):
    assert hasattr(owner, name)


def test_a_draft_model_is_built_in_the_scope_that_tells_it_from_the_target():
    assert "moe.in_speculative_scope = True" in source("srt.layers.moe.utils")
    for worker in ("standalone_worker_v2", "eagle_worker_v2"):
        assert "draft_model_build_scope()," in source(f"srt.speculative.{worker}"), worker


def test_the_graphs_of_a_draft_model_are_not_asked_whether_they_run_ours():
    """SGLang refuses a runner none of whose decode graphs runs the kernel; a draft model's graphs are captured by other code."""
    assert "self.model_runner.capture_tail_hooks" in source("srt.model_executor.runner.decode_cuda_graph_runner")
    for runner in ("eagle_draft_cuda_graph_runner", "eagle_draft_extend_cuda_graph_runner"):
        text = source(f"srt.speculative.{runner}")
        assert "def capture_one_shape(" in text and "capture_tail_hooks" not in text, runner


def test_the_spec_asks_for_no_wider_step_than_the_kernel_has():
    assert MAX_ROWS <= abi.MAX_ROWS


def test_backends_that_serve_ngram_never_read_its_mask_at_breadth_1():
    """fa3 and fa4 are one class: both of its verify paths gate the mask on topk, and topk is the breadth."""
    flash = source("srt.layers.attention.flashattention_backend")
    assert "topk<=1 never extracts the mask; both metadata paths gate on topk > 1." in flash
    assert "self.topk = get_spec().speculative_eagle_topk or 0" in flash
    assert "FlashAttentionBackend(runner, fa_impl_ver=4)" in source("srt.layers.attention.attention_registry")
    assert "custom_mask" not in source("srt.layers.attention.trtllm_mha_backend")
    assert "speculative_eagle_topk=cfg.speculative_ngram_max_bfs_breadth" in source("srt.arg_groups.speculative_hook")


def test_a_verify_steps_positions_are_its_inputs():
    """ForwardBatch.init_new takes them from the verify input; rope gets what it is given, not a count from the prefix."""
    assert "ret.positions = ret.spec_info.positions" in source("srt.model_executor.forward_batch_info")


def test_the_fields_of_a_verify_input_exist():
    made = NgramVerifyInput(custom_mask=torch.ones(1, dtype=torch.bool), draft_token_num=3)
    assert made.is_verify_input() and made.ragged_verify_layout is None and made.draft_token_num == 3
    eagle = {field.name for field in dataclasses.fields(EagleVerifyInput)}
    assert {"draft_token", "custom_mask", "positions", "seq_lens_cpu", "seq_lens_sum", "kv_loc_plan", "topk", "draft_token_num"} <= eagle


def test_capture_mode_is_read_where_sglang_sets_it():
    assert sglang_state.capturing_graphs() is False
    with capture_mode.model_capture_mode():
        assert sglang_state.capturing_graphs() is True
    assert sglang_state.capturing_graphs() is False


def test_a_moe_block_calls_its_router_as_the_self_check_stands_in_for_it():
    """runtime/self_check_moe.py: topk(hidden_states, router_logits), of the gate's output, and its ids and weights are the experts' only choice."""
    source = inspect.getsource(Qwen3MoeSparseMoeBlock.forward_normal)
    assert "router_logits, _ = self.gate(hidden_states)" in source
    assert "topk_output = self.topk(hidden_states, router_logits)" in source
    assert "self.experts(hidden_states, topk_output)" in source
    assert StandardTopKOutput._fields == ("topk_weights", "topk_ids", "router_logits")


def test_a_moe_layer_takes_its_stream_from_the_batch():
    """The self-check stands before each layer (test_verify_dispatch.py runs it): the residual is the batch's, not an argument."""
    assert parameters(Qwen3MoeDecoderLayer.forward)[:4] == ["self", "positions", "hidden_states", "forward_batch"]
    loop = "".join(inspect.getsource(Qwen3MoeModel.forward).split())
    assert "hidden_states=layer(positions,hidden_states,forward_batch," in loop and "hidden_states=residual_batch.final_norm(" in loop
    assert parameters(residual_batch.snapshot) == parameters(residual_batch.set_written) == ["hidden_states", "forward_batch"]


def test_a_dense_layer_takes_its_stream_from_the_batch_too():
    """AMD's self-check stands before dense layers as well."""
    assert parameters(Qwen3DecoderLayer.forward)[:4] == ["self", "positions", "hidden_states", "forward_batch"]
    loop = "".join(inspect.getsource(Qwen3Model.forward).split())
    assert "hidden_states=self.layers[i](positions,hidden_states,forward_batch," in loop and "hidden_states=residual_batch.final_norm(" in loop


@pytest.mark.parametrize(("algorithm", "drafts", "expected"), [(None, None, 1), (None, 4, 1), ("EAGLE", 4, 4), ("STANDALONE", None, 1)])
def test_tokens_of_a_request_are_those_that_amds_dispatch_serves(monkeypatch, algorithm, drafts, expected):
    spec = SimpleNamespace(speculative_algorithm=algorithm, speculative_num_draft_tokens=drafts)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    monkeypatch.setattr(amd_binding, "get_spec", lambda: spec)
    assert sglang_state.tokens_per_request() == amd_binding._server_step()[1] == expected


def test_amds_dispatch_keeps_the_forward_that_the_build_has_put_on_the_model():
    """It counts the steps that are not routed; build/monokernel.py puts it there."""
    model, seen = torch.nn.Module(), []
    model.forward = lambda input_ids, positions, forward_batch: seen.append("original")
    spec = SimpleNamespace(requires=SimpleNamespace(attention_backends=frozenset()), unread_metadata=frozenset())
    built = SimpleNamespace(forward=lambda plan, *args, **kwargs: seen.append((plan.key.rows, len(args), kwargs)))
    served = frozenset({ShapeKey("decode", 2, 1)})
    amd_binding._install_forward(model=model, built=built, served=served, spec=spec)
    for rows in (2, 3):
        batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=rows, input_ids=torch.zeros(rows))
        model.forward(batch.input_ids, None, batch)
    assert seen == [(2, 3, {}), "original"]
