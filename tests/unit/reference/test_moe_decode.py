"""The MoE oracle equals Hugging Face's Qwen3-MoE block behind its norm, and a Routing is all that a grouped computation needs."""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")
from transformers import Qwen3MoeConfig  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeSparseMoeBlock  # noqa: E402

from sgl_lowlatency.kernels.bitmap_routing import BitmapRouting  # noqa: E402
from sgl_lowlatency.reference import moe_decode, routing  # noqa: E402
from sgl_lowlatency.reference.dense_decode import rms_norm  # noqa: E402

EPS = 1e-6
SHAPES = [(64, 48, 8, 2), (96, 32, 128, 8), (64, 32, 60, 4)]  # hidden, intermediate, experts, top k


def stream(rows: int, hidden: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)) * 3


def transformers_block(tensors, x, top_k, renormalizes, dtype):
    """(x + block(norm(x)), router logits) of the Hugging Face modules, in dtype."""
    num_experts, hidden = tensors.router.shape
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=tensors.w2.shape[2], num_experts=num_experts, num_experts_per_tok=top_k,
        norm_topk_prob=renormalizes, hidden_act="silu",
    )
    config._experts_implementation = "eager"
    block, norm = Qwen3MoeSparseMoeBlock(config).to(dtype), Qwen3MoeRMSNorm(hidden, EPS).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(tensors.post_norm)
        block.gate.weight.copy_(tensors.router)
        block.experts.gate_up_proj.copy_(tensors.w13)
        block.experts.down_proj.copy_(tensors.w2)
        y = norm(x.to(dtype))
        return x.to(dtype) + block(y[None])[0], block.gate(y)[0]


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("renormalizes", [True, False])
@pytest.mark.parametrize(("hidden", "intermediate", "num_experts", "top_k"), SHAPES)
def test_float32_oracle_is_transformers(hidden, intermediate, num_experts, top_k, renormalizes):
    tensors, x = moe_decode.random_tensors(hidden, intermediate, num_experts, 1), stream(6, hidden, 2)
    ours = moe_decode.mlp_half(tensors, x, top_k, EPS, renormalizes, torch.float32, logits_dtype=None)
    theirs, logits = transformers_block(tensors, x, top_k, renormalizes, torch.float32)
    assert distance(ours.logits, logits) < 1e-6
    assert distance(ours.x - x, theirs - x) < 1e-6


@pytest.mark.parametrize("change", ["gate and up", "next expert", "not renormalised"])
def test_the_comparison_tells_wrong_experts_apart(change):
    """Oracle: as above; each change is what a wrong layout or a wrong routing would do."""
    hidden, intermediate, num_experts, top_k = SHAPES[0]
    tensors, x = moe_decode.random_tensors(hidden, intermediate, num_experts, 1), stream(6, hidden, 2)
    theirs, _ = transformers_block(tensors, x, top_k, True, torch.float32)
    wrong, renormalizes = tensors, change != "not renormalised"
    if change == "gate and up":
        wrong = dataclasses.replace(tensors, w13=torch.cat(tensors.w13.chunk(2, 1)[::-1], 1))
    elif change == "next expert":
        wrong = dataclasses.replace(tensors, w2=tensors.w2.roll(1, 0))
    ours = moe_decode.mlp_half(wrong, x, top_k, EPS, renormalizes, torch.float32, logits_dtype=None)
    assert distance(ours.x - x, theirs - x) > 0.05


def test_float64_and_float32_oracle_agree_on_the_same_choices():
    tensors, x = moe_decode.random_tensors(*SHAPES[1][:3], 3), stream(16, SHAPES[1][0], 4)
    high = moe_decode.mlp_half(tensors, x, 8, EPS)
    low = moe_decode.mlp_half(tensors, x, 8, EPS, dtype=torch.float32, choices=high.choices)
    assert high.x.dtype == torch.float64 and low.x.dtype == torch.float32 and high.logits.dtype == torch.bfloat16
    assert distance(low.x, high.x) < 1e-6


def test_a_row_without_choices_is_left_as_it_is():
    tensors, x = moe_decode.random_tensors(*SHAPES[0][:3], 5), stream(3, SHAPES[0][0], 6).double()
    choices = routing.choose(stream(3, 8, 7), 2, True, num_live_rows=2)
    out = moe_decode.mlp_half(tensors, x, 2, EPS, choices=choices).x
    assert torch.equal(out[2], x[2]) and not torch.equal(out[1], x[1])


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize(("hidden", "intermediate", "num_experts", "top_k"), SHAPES)
def test_a_routing_is_all_that_a_grouped_computation_needs(rows, hidden, intermediate, num_experts, top_k):
    """Active experts by place, each once for all its rows; then the rows' sums by places, in the order of k. Oracle: row by row."""
    tensors, x = moe_decode.random_tensors(hidden, intermediate, num_experts, 8), stream(rows, hidden, 9).double()
    expected = moe_decode.mlp_half(tensors, x, top_k, EPS)
    router = BitmapRouting(num_experts, top_k, torch.device("cpu"))
    out = router.outputs(rows)
    router.route(expected.logits, out)
    y = rms_norm(x, tensors.post_norm, EPS)
    by_place = []
    for number in out.experts[: out.num_active.item()].tolist():
        row_ids = [row for row in range(rows) if out.row_bits[number].item() >> row & 1]
        by_place.append(dict(zip(row_ids, moe_decode.expert(tensors, number, y[row_ids]), strict=True)))
    assert sum(map(len, by_place)) == rows * top_k
    found = x.clone()
    for row in range(rows):
        for place, weight in zip(out.places[row].tolist(), out.weights[row].double(), strict=True):
            found[row] += weight * by_place[place][row]
    assert distance(found - x, expected.x - x) < 1e-6  # weights are float32
