"""The bf16 arm of the MoE half: its error is that of bf16 rounding, other bf16 arithmetic passes the gate beside it, and wrong experts do not."""

import dataclasses

import pytest
import torch

from sgl_lowlatency.reference import moe_decode, moe_standard_path
from sgl_lowlatency.reference.gate import figure

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, EPS = 256, 128, 64, 8, 1e-6
TENSORS = moe_decode.random_tensors(HIDDEN, INTERMEDIATE, NUM_EXPERTS, 1)
X = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()


def arms():
    """(oracle, standard) on the oracle's choices."""
    oracle = moe_decode.mlp_half(TENSORS, X, TOP_K, EPS)
    return oracle, moe_standard_path.mlp_half(TENSORS, X, TOP_K, EPS, choices=oracle.choices)


def test_its_error_is_that_of_bf16():
    """Of a value rounded once, about 2^-9 / sqrt(3); what is added to x has three roundings more."""
    oracle, standard = arms()
    assert standard.x.dtype == standard.logits.dtype == torch.bfloat16
    error = float((standard.x.double() - oracle.x).norm() / oracle.x.norm())
    assert 2.0**-11 < error < 2.0**-8
    added = float(((standard.x.double() - X.double()) - (oracle.x - X.double())).norm() / (oracle.x - X.double()).norm())
    assert error < added < 2.0**-6


def test_it_routes_as_the_oracle_where_rounding_leaves_the_order():
    own = moe_standard_path.mlp_half(TENSORS, X, TOP_K, EPS)
    oracle, _ = arms()
    same = (own.choices.ids == oracle.choices.ids).all(1)
    assert same.sum() >= 4
    assert float((own.choices.weights - oracle.choices.weights)[same].abs().max()) < 0.01


def test_the_arithmetic_of_a_fused_step_passes_the_gate():
    """float32 until the stream is rounded: the least that a fused kernel rounds."""
    oracle, standard = arms()
    fused = moe_decode.mlp_half(TENSORS, X, TOP_K, EPS, dtype=torch.float32, choices=oracle.choices).x.bfloat16()
    report = figure("x", fused, standard.x, oracle.x)
    assert report.passed, str(report)


@pytest.mark.parametrize("change", ["next expert", "gate and up", "weights in another order"])
def test_what_a_wrong_kernel_does_misses_the_gate(change):
    oracle, standard = arms()
    wrong, choices = TENSORS, oracle.choices
    if change == "next expert":
        wrong = dataclasses.replace(TENSORS, w2=TENSORS.w2.roll(1, 0))
    elif change == "gate and up":
        wrong = dataclasses.replace(TENSORS, w13=torch.cat(TENSORS.w13.chunk(2, 1)[::-1], 1))
    else:
        choices = dataclasses.replace(choices, weights=choices.weights.flip(1))
    report = figure("x", moe_decode.mlp_half(wrong, X, TOP_K, EPS, choices=choices).x.bfloat16(), standard.x, oracle.x)
    assert not report.passed and report.ratio > 4, str(report)
