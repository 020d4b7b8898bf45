"""build_step over a model in SGLang's FP8 layouts, in host emulation: built, self-checked, and its steps judged by float64."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # tiny_serving.py

from sglang.kernels.plugin_kernels.nvidia.spec import BuildContext, Step  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, set_forward_context  # noqa: E402
from tiny_serving import GEOMETRY, TOLERANCES, TinyServing  # noqa: E402

from sgl_lowlatency import config  # noqa: E402
from sgl_lowlatency.build.assemble import build_step  # noqa: E402
from sgl_lowlatency.reference import dense_decode, standard_path  # noqa: E402
from sgl_lowlatency.reference.step import StepInputs  # noqa: E402
from sgl_lowlatency.runtime import sglang_state  # noqa: E402
from sgl_lowlatency.runtime.coverage import Coverage  # noqa: E402

LENGTHS = [65, 1, 300]
HF_CONFIG = SimpleNamespace(
    num_hidden_layers=GEOMETRY.num_layers, hidden_size=GEOMETRY.hidden, num_attention_heads=GEOMETRY.num_q_heads,
    num_key_value_heads=GEOMETRY.num_kv_heads, head_dim=GEOMETRY.head_dim, intermediate_size=GEOMETRY.intermediate,
    vocab_size=GEOMETRY.vocab, max_position_embeddings=GEOMETRY.max_position, rms_norm_eps=GEOMETRY.rms_eps,
)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(config, "get", lambda: config.Config(emulate=True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sglang_state, "capturing_graphs", lambda: False)
    monkeypatch.setattr(sglang_state, "metrics_enabled", lambda: False)
    # its line at exit would go to a stream that pytest has closed
    monkeypatch.setattr(Coverage, "start_reporting", lambda self, interval_s, with_metrics: None)


def live_batch(serving):
    """A decode batch of LENGTHS over scattered slots of SGLang's pool."""
    batch, rows = serving.batch(len(LENGTHS)), torch.arange(1, 1 + len(LENGTHS))
    slots = (1 + torch.randperm(serving.kv.num_slots - 1, generator=torch.Generator().manual_seed(3)))[: sum(LENGTHS)].split(LENGTHS)
    for row, taken in zip(rows.tolist(), slots):
        serving.kv.req_to_token[row, : len(taken)] = taken.int()
    batch.input_ids, batch.req_pool_indices = torch.tensor([7, 200, 31]), rows
    batch.seq_lens = torch.tensor(LENGTHS)
    batch.seq_lens_cpu, batch.positions = batch.seq_lens, batch.seq_lens - 1
    batch.out_cache_loc = torch.stack([taken[-1] for taken in slots])
    return batch


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_channel"])
def test_a_built_step_serves_what_float64_computes(emulated, weight_format):
    serving = TinyServing(num_slots=8192, weight_format=weight_format)
    previous = set_forward_context(ForwardContext(attn_backend=serving.backend))
    try:
        built = build_step(serving.model, HF_CONFIG, BuildContext(widths=(1, 3), tokens_per_request=1, deadline_s=30.0), tolerances=TOLERANCES)
        batch = live_batch(serving)
        assert built.plan(batch.input_ids, batch) == Step(mode="decode", rows=3)
        kv = [[buffer.clone() for buffer in buffers] for buffers in (serving.kv.k, serving.kv.v)]
        step = Step(mode="decode", rows=3, view=serving.view)
        logits = built.forward(step, serving.standard, batch.input_ids, batch.positions, batch).next_token_logits
    finally:
        set_forward_context(previous)
    assert built._checked == {3}, "the step's width was compared to SGLang's forward first"
    inputs = StepInputs(
        batch.input_ids, batch.positions, batch.seq_lens, batch.req_pool_indices, batch.out_cache_loc, serving.kv.req_to_token, *kv
    )
    head = serving.model.lm_head.weight
    exact = dense_decode.decode_step(GEOMETRY, serving.weights, inputs, torch.float64, head).logits

    def error(actual):
        return float((actual.double() - exact).norm() / exact.norm())

    ours, sglang = error(logits), error(standard_path.decode_step(GEOMETRY, serving.weights, inputs, head).logits)
    assert ours < 0.02 and 3 * ours < sglang, f"ours {ours:.3g}, SGLang's {sglang:.3g}"
