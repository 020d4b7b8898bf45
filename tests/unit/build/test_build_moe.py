"""build_step over a MoE model in SGLang's layouts, in host emulation: views of SGLang's tensors, self-checked, its steps judged by float64."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # tiny_serving.py
sys.path.insert(0, str(Path(__file__).parent))

from first_step import LENGTHS, first_step  # noqa: E402
from tiny_serving import MOE_FP8_GEOMETRY, MOE_GEOMETRY, TinyServing  # noqa: E402

from sgl_lowlatency.build.assemble import served_widths  # noqa: E402
from sgl_lowlatency.build.weights import collect_weights  # noqa: E402
from sgl_lowlatency.reference import moe_step, routing  # noqa: E402
from sgl_lowlatency.reference.inputs import random_weights  # noqa: E402
from sgl_lowlatency.specs.nvidia.qwen3_moe import QWEN3_MOE_SPEC  # noqa: E402

HF_CONFIG = SimpleNamespace(
    num_hidden_layers=MOE_GEOMETRY.num_layers, hidden_size=MOE_GEOMETRY.hidden, num_attention_heads=MOE_GEOMETRY.num_q_heads,
    num_key_value_heads=MOE_GEOMETRY.num_kv_heads, head_dim=MOE_GEOMETRY.head_dim, vocab_size=MOE_GEOMETRY.vocab,
    max_position_embeddings=MOE_GEOMETRY.max_position, rms_norm_eps=MOE_GEOMETRY.rms_eps, num_experts=MOE_GEOMETRY.num_experts,
    num_experts_per_tok=MOE_GEOMETRY.top_k, moe_intermediate_size=MOE_GEOMETRY.moe_intermediate, norm_topk_prob=True,
)


def test_weights_are_views_of_sglangs_tensors():
    serving = TinyServing(geometry=MOE_GEOMETRY)
    weights = collect_weights(serving.model, MOE_GEOMETRY, has_head=True)
    for layer, ours in zip(serving.model.model.layers, weights.layers, strict=True):
        gate, experts = layer.mlp.gate, layer.mlp.experts
        for theirs, tensor in ((gate.weight, ours.router), (experts.w13_weight, ours.gate_up), (experts.w2_weight, ours.down)):
            assert tensor.data_ptr() == theirs.data_ptr() and tensor.shape == theirs.shape and tensor.stride() == theirs.stride()


def test_fp8_experts_come_with_their_scales():
    serving = TinyServing(geometry=MOE_FP8_GEOMETRY, weight_format="fp8_block")
    weights = collect_weights(serving.model, MOE_FP8_GEOMETRY)
    assert weights.format == "fp8_block"
    for layer, ours in zip(serving.model.model.layers, weights.layers, strict=True):
        for name, theirs in (("gate_up", "w13_weight"), ("down", "w2_weight")):
            assert getattr(ours, name).data_ptr() == getattr(layer.mlp.experts, theirs).data_ptr()
            assert getattr(ours, f"{name}_scale").data_ptr() == getattr(layer.mlp.experts, f"{theirs}_scale_inv").data_ptr()


def test_steps_of_many_rows_with_fp8_experts_stay_sglangs():
    fp8, bf16 = (
        (MOE_FP8_GEOMETRY, random_weights(MOE_FP8_GEOMETRY, 0, weight_format="fp8_block")), (MOE_GEOMETRY, random_weights(MOE_GEOMETRY, 0))
    )
    assert list(served_widths((1, 2, 4, 8, 16), *fp8)) == [1, 2, 4, 8]
    assert list(served_widths((1, 2, 4, 8, 16), *bf16)) == [1, 2, 4, 8, 16]


def test_a_built_step_serves_what_float64_computes(emulated):
    serving = TinyServing(num_slots=8192, geometry=MOE_GEOMETRY)
    built, inputs, logits = first_step(serving, HF_CONFIG, QWEN3_MOE_SPEC.numerics.tolerances)
    assert "32 experts of 64, 4 a row; LM head inside" in built.summary()
    assert built._supervision.checked == {3}, "the step's width was compared to SGLang's forward first"
    head = serving.model.lm_head.weight
    # the newest launch's choices, which near ties let nobody else foretell
    ranked = [built._step.buffer("router_logits", 3, layer) for layer in range(MOE_GEOMETRY.num_layers)]
    choices = [routing.choose(of_layer, MOE_GEOMETRY.top_k, True) for of_layer in ranked]
    exact = moe_step.decode_step(MOE_GEOMETRY, serving.weights, inputs, torch.float64, head, choices=choices).outputs.logits
    theirs = moe_step.standard_step(MOE_GEOMETRY, serving.weights, inputs, head, choices=choices).outputs.logits

    def error(actual):
        return float((actual.double() - exact).norm() / exact.norm())

    assert error(logits) < 2 * error(theirs) < 0.06, f"ours {error(logits):.3g}, SGLang's rounding {error(theirs):.3g}"
