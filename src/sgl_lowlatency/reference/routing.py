"""The oracle of MoE routing: SGLang's softmax router in float64, and bitmaps and places from its choices, one row and expert at a time.

    ids[r], weights[r] = top_k of softmax(logits[r]);  row_bits[e] = { r : e in ids[r] };  experts = { e : row_bits[e] != 0 }, ascending
"""

from __future__ import annotations

import dataclasses
import math

import torch

NAN_RANK = -1e30  # where SGLang's router ranks a NaN logit


@dataclasses.dataclass(frozen=True)
class Choices:
    """ids int64 [rows, top_k], by rank, -1 for none. weights float64 [rows, top_k], 0 for none."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Places:
    """row_bits [num_experts]: bit r is set where row r has chosen the expert. experts: those that a row has chosen, ascending.
    places [rows, top_k]: the index in `experts` of each choice, -1 for none."""

    row_bits: list[int]
    experts: list[int]
    places: list[list[int]]

    @property
    def num_rows(self) -> list[int]:
        """How many rows each of `experts` has."""
        return [self.row_bits[expert].bit_count() for expert in self.experts]


def choose(logits: torch.Tensor, top_k: int, renormalizes: bool, num_live_rows: int | None = None) -> Choices:
    """The router's choices. logits: [rows, num_experts] of any float type, ranked as they are; rows from num_live_rows on choose nothing.

    By logit, descending, equal ones by id, ascending; NaN ranks as -1e30 (in float32). A weight is exp(logit) over the sum of all experts',
    with renormalizes over the sum of the chosen ones'. Where a logit is NaN or +inf, or all are -inf, the row's weights are NaN.
    """
    rows, num_experts = logits.shape
    nan_rank = float(torch.tensor(NAN_RANK, dtype=torch.float32))
    ids = torch.full((rows, top_k), -1, dtype=torch.int64)
    weights = torch.zeros(rows, top_k, dtype=torch.float64)
    for row, values in enumerate(logits.double().tolist()[:num_live_rows]):
        ranked = sorted(range(num_experts), key=lambda e: (-(nan_rank if math.isnan(values[e]) else values[e]), e))[:top_k]
        ids[row] = torch.tensor(ranked)
        if any(map(math.isnan, values)) or not math.isfinite(max(values)):
            weights[row] = math.nan
            continue
        exponentials = [math.exp(value - max(values)) for value in values]
        chosen = [exponentials[e] for e in ranked]
        total = math.fsum(chosen) if renormalizes else math.fsum(exponentials)
        weights[row] = torch.tensor([x / total for x in chosen], dtype=torch.float64)
    return Choices(ids, weights)


def place(ids: torch.Tensor, num_experts: int) -> Places:
    """Bitmaps and places of choices. ids: [rows, top_k] of any integer type, -1 for none; an id may come twice in a row.

    Raises ValueError for an id outside -1..num_experts - 1.
    """
    choices = ids.tolist()
    row_bits = [0] * num_experts
    for row, row_ids in enumerate(choices):
        for expert in row_ids:
            if not -1 <= expert < num_experts:
                raise ValueError(f"row {row} has expert {expert}, outside -1..{num_experts - 1}")
            if expert >= 0:
                row_bits[expert] |= 1 << row
    experts = [expert for expert in range(num_experts) if row_bits[expert]]
    return Places(row_bits, experts, [[experts.index(e) if e >= 0 else -1 for e in row_ids] for row_ids in choices])


def aligned(ids: torch.Tensor, num_experts: int, block_size: int) -> tuple[list[int], list[int]]:
    """What SGLang's moe_align_block_size makes of the choices: (sorted_token_ids up to the padded total, expert_ids of its blocks).

    A choice is its index in `ids`, flattened; each expert's choices fill blocks of block_size, padded with ids.numel(). Choices of -1 come
    first, as expert -1. Equal experts' choices are in ascending order, which SGLang leaves open.
    """
    flat = ids.flatten().tolist()
    tokens, blocks = [], []
    for expert in range(-1, num_experts):
        mine = [i for i, chosen in enumerate(flat) if chosen == expert]
        count = -(-len(mine) // block_size)
        tokens += mine + [len(flat)] * (count * block_size - len(mine))
        blocks += [expert] * count
    return tokens, blocks
