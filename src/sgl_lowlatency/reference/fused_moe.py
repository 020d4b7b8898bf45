"""Oracle of fused_moe: the MoE of a DeepSeek-V4.1 layer in float64, from the tensors that SGLang holds after load on sm_90.

    logits = x @ router.T;  score = sqrt(softplus(logits));  ids = top_k of score + bias;  weight = score / (sum + 1e-20) * routed_scaling
    out = expert(shared) + sum over ids of weight * expert(id);  expert: down @ (silu(min(gate @ x, limit)) * clamp(up @ x, -limit, limit))

Tensors are those of kernels/fused_moe.py. The standard path beside it rounds where SGLang 0.5.23 does; what it adds beyond bf16, FP8 activations of
the shared expert, is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sgl_lowlatency.reference import fused_moe_layout as layout

if TYPE_CHECKING:
    from sgl_lowlatency.kernels.fused_moe import FusedMoeWeights

SUM_EPSILON = 1e-20
UNDECIDED = 4e-6  # biased scores that are nearer may be ordered either way in fp32, unless they are equal


def expert_matrix(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [rows, columns] of one expert's interleaved FP4 matrix."""
    values = layout.decode_values(layout.deinterleave_weights(stored))
    exponents = layout.deinterleave_scales(scale[None])[0].double() - 127
    return values * torch.exp2(exponents).repeat_interleave(32, 1)


def shared_matrix(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [rows, columns] of an FP8 matrix with scales of 32 x 32 blocks."""
    return weight.double() * scale.double().repeat_interleave(32, 0).repeat_interleave(32, 1)


def logits(weights: FusedMoeWeights, x: torch.Tensor) -> torch.Tensor:
    """float64 [rows, E]."""
    return x.double() @ weights.router.double().T


def scores(values: torch.Tensor) -> torch.Tensor:
    """float64, of logits."""
    wide = values.double()
    return torch.where(wide > 20, wide, torch.log1p(torch.exp(wide.clamp(max=20)))).sqrt()


def biased_scores(weights: FusedMoeWeights, values: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [rows, E]: what logits [rows, E] are ranked by; NaN as infinity."""
    bias = weights.bias.double().expand(values.shape[0], -1)
    if weights.bias_alt is not None:
        bias = torch.where((token_ids == weights.alt_token_id)[:, None], weights.bias_alt.double(), bias)
    biased = scores(values) + bias
    return torch.where(biased.isnan(), math.inf, biased)


def route(weights: FusedMoeWeights, values: torch.Tensor, token_ids: torch.Tensor | None = None, num_live_rows: int | None = None):
    """(ids int64 [rows, top_k] by rank, weights float64 [rows, top_k], is_decided bool [rows]) of logits [rows, E].

    By score + bias, descending, equal ones by id, ascending; NaN ranks above all. Rows from num_live_rows on: -1 and 0. is_decided: no other
    choice or order is within UNDECIDED, but for scores that are equal.
    """
    rows, num_experts = values.shape
    score, biased = scores(values), biased_scores(weights, values, token_ids)
    ids = torch.full((rows, weights.top_k), -1, dtype=torch.int64)
    chosen = torch.zeros(rows, weights.top_k, dtype=torch.float64)
    is_decided = torch.ones(rows, dtype=torch.bool)
    for row in range(rows if num_live_rows is None else min(rows, num_live_rows)):
        of_row = biased[row].tolist()
        ranked = sorted(range(num_experts), key=lambda e: (-of_row[e], e))
        ids[row] = torch.tensor(ranked[: weights.top_k])
        gaps = [of_row[a] - of_row[b] for a, b in zip(ranked[: weights.top_k], ranked[1:])]
        is_decided[row] = all(gap == 0 or gap > UNDECIDED or math.isnan(gap) for gap in gaps)
        chosen[row] = score[row, ids[row]]
    if weights.top_k > 1:
        chosen = chosen / (chosen.sum(1, keepdim=True) + SUM_EPSILON)
    return ids, chosen * weights.routed_scaling, is_decided


def _swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


def outputs(weights: FusedMoeWeights, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the oracle float64, SGLang's standard path bf16), both [rows, H], with given choices and weights: route's, or those of a kernel.

    The standard path rounds gate, up, activation, each expert's output, the experts' sum, the shared expert's output and the total to bf16.
    """
    limit, wide = weights.swiglu_limit, x.double()
    roundings = (lambda t: t), (lambda t: t.bfloat16().double())

    def expert(gate, up, down, rows, rounded):
        return rounded(rounded(_swiglu(rounded(rows @ gate.T), rounded(rows @ up.T), limit)) @ down.T)

    shared_gate_up = shared_matrix(weights.shared_gate_up, weights.shared_gate_up_scale)
    shared_down = shared_matrix(weights.shared_down, weights.shared_down_scale)
    shared = [expert(*shared_gate_up.chunk(2), shared_down, wide, rounded) for rounded in roundings]
    routed = [torch.zeros_like(shared[0]) for _ in roundings]
    for e in sorted(set(ids.flatten().tolist()) - {-1}):
        up, gate = expert_matrix(weights.gate_up[e], weights.gate_up_scale[e]).chunk(2)
        down = expert_matrix(weights.down[e], weights.down_scale[e])
        row, k = (ids == e).nonzero(as_tuple=True)
        for total, rounded in zip(routed, roundings, strict=True):
            total[row] += factors[row, k, None].double() * expert(gate, up, down, wide[row], rounded)
    oracle, standard = (rounded(s + rounded(r)) for s, r, rounded in zip(shared, routed, roundings, strict=True))
    return oracle, standard.bfloat16()


def standard_logits(weights: FusedMoeWeights, x: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, E]: SGLang's router accumulates bf16 products in fp32 and keeps fp32."""
    return x.float() @ weights.router.float().T


def shard(weights: FusedMoeWeights, rank: int, num_ranks: int) -> FusedMoeWeights:
    """What SGLang's loader leaves rank `rank` of a tensor-parallel group: of every expert its rows of gate and of up and its columns of down, of the
    shared one too; router and biases are whole. Blocks of interleaved FP4 are 64 rows and 128 columns at most, so that a share of them is a slice."""

    def rows(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Of both halves of dimension `dim` the share."""
        return torch.cat([half.chunk(num_ranks, dim)[rank] for half in tensor.chunk(2, dim)], dim).contiguous()

    def columns(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(num_ranks, dim)[rank].contiguous()

    return dataclasses.replace(
        weights, gate_up=rows(weights.gate_up, 1), gate_up_scale=rows(weights.gate_up_scale, 1), down=columns(weights.down, 2),
        down_scale=columns(weights.down_scale, 2), shared_gate_up=rows(weights.shared_gate_up, 0),
        shared_gate_up_scale=rows(weights.shared_gate_up_scale, 0), shared_down=columns(weights.shared_down, 1),
        shared_down_scale=columns(weights.shared_down_scale, 1),
    )  # fmt: skip


def outputs_of_ranks(
    shards: Sequence[FusedMoeWeights], x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As outputs, of a tensor-parallel group: (the sum of the shards' oracles float64, the fp32 sum of their standard paths rounded to bf16)."""
    parts = [outputs(one, x, ids, factors) for one in shards]
    return sum(oracle for oracle, _ in parts), torch.stack([standard.float() for _, standard in parts]).sum(0).bfloat16()
