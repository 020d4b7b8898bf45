"""build_step over a model in SGLang's FP8 layouts, in host emulation: built, self-checked, and its steps judged by float64."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # tiny_serving.py
sys.path.insert(0, str(Path(__file__).parent))

from first_step import first_step  # noqa: E402
from tiny_serving import GEOMETRY, TOLERANCES, TinyServing  # noqa: E402

from sgl_lowlatency.reference import dense_decode, standard_path  # noqa: E402

HF_CONFIG = SimpleNamespace(
    num_hidden_layers=GEOMETRY.num_layers, hidden_size=GEOMETRY.hidden, num_attention_heads=GEOMETRY.num_q_heads,
    num_key_value_heads=GEOMETRY.num_kv_heads, head_dim=GEOMETRY.head_dim, intermediate_size=GEOMETRY.intermediate,
    vocab_size=GEOMETRY.vocab, max_position_embeddings=GEOMETRY.max_position, rms_norm_eps=GEOMETRY.rms_eps,
)


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_channel"])
def test_a_built_step_serves_what_float64_computes(emulated, weight_format):
    serving = TinyServing(num_slots=8192, weight_format=weight_format)
    built, inputs, logits = first_step(serving, HF_CONFIG, TOLERANCES)
    assert built._supervision.checked == {3}, "the step's width was compared to SGLang's forward first"
    head = serving.model.lm_head.weight
    exact = dense_decode.decode_step(GEOMETRY, serving.weights, inputs, torch.float64, head).logits

    def error(actual):
        return float((actual.double() - exact).norm() / exact.norm())

    ours, sglang = error(logits), error(standard_path.decode_step(GEOMETRY, serving.weights, inputs, head).logits)
    assert ours < 0.02 and 3 * ours < sglang, f"ours {ours:.3g}, SGLang's {sglang:.3g}"
