"""The batches of the self-check: random tokens over a scattered, real-scale KV context, shaped to make mistakes loud."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.runtime.sglang_state import KvState

# New token included. Short ones make one wrong token weigh much; the others straddle tiles, pages and splits.
LENGTHS = (1, 2, 3, 63, 17, 64, 65, 130, 1000)
LOUD = 8.0  # V of a sequence's first token, of its last old one and of those at multiples of LOUD_STRIDE
LOUD_STRIDE = 64
GUARD = 50.0  # V in the slot after a sequence's end: a mask that lets it in shows at any length


@dataclass(frozen=True)
class CheckBatch:
    """One decode batch. All tensors int64 [rows]; seq_lens include the new token, whose slot is out_cache_loc."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    out_cache_loc: torch.Tensor


@dataclass(frozen=True)
class CheckInputs:
    """rows of req_to_token and slots that the batches use, and the batches. `slots` [n] int64, `request_rows` [m] int64."""

    batches: list[CheckBatch]
    request_rows: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor  # [m, columns] int32: what the first columns of those rows must hold
    loudness: torch.Tensor  # [n] float: factor on V of a slot


def make_inputs(geometry: Geometry, kv: KvState, rows: int, generator: torch.Generator) -> CheckInputs:
    """Batches of `rows` requests that cover LENGTHS, as far as the context, the rope table and the pool allow.

    Every length has its own request row; a batch whose rows outnumber the lengths gets more short requests. Raises
    RuntimeError when the pool cannot hold one token a row.
    """
    requests = _request_lengths(geometry, kv, rows)
    device = kv.req_to_token.device
    page, num_pages = kv.page_size, kv.num_slots // kv.page_size
    pages = 1 + torch.randperm(num_pages - 1, generator=generator)  # page 0 is SGLang's padding
    columns = max(requests) + 1
    table = torch.zeros((len(requests), columns), dtype=torch.int64)
    loudness = torch.ones(kv.num_slots)
    used = torch.zeros(kv.num_slots, dtype=torch.bool)
    taken = 0
    for row, length in enumerate(requests):
        needed = _pages(length, page)
        slots = (pages[taken : taken + needed, None] * page + torch.arange(page)).flatten()
        taken += needed
        table[row, : length + 1] = slots[: length + 1]
        used[slots] = True
        loud = [0, max(0, length - 2), *range(LOUD_STRIDE, length, LOUD_STRIDE)]
        loudness[slots[loud]] = LOUD
        loudness[slots[length]] = GUARD
    request_rows = 1 + torch.randperm(kv.req_to_token.shape[0] - 1, generator=generator)[: len(requests)]
    lengths = torch.tensor(requests)
    batches = []
    for first in range(0, len(requests), rows):
        at = slice(first, first + rows)
        last = lengths[at] - 1
        new_slots = table[at].gather(1, last[:, None]).flatten()
        tokens = torch.randint(0, geometry.vocab, (rows,), generator=generator)
        tensors = (tokens, last, lengths[at], request_rows[at], new_slots)
        batches.append(CheckBatch(*(tensor.to(device) for tensor in tensors)))
    slots = used.nonzero().flatten()
    return CheckInputs(
        batches=batches,
        request_rows=request_rows.to(device),
        slots=slots.to(device),
        table=table.to(device=device, dtype=torch.int32),
        loudness=loudness[slots].to(device),
    )


def _pages(length: int, page_size: int) -> int:
    return -(-(length + 1) // page_size)  # one token more: the guard


def _request_lengths(geometry: Geometry, kv: KvState, rows: int) -> list[int]:
    longest = min(kv.req_to_token.shape[1] - 1, geometry.max_position)
    pages = kv.num_slots // kv.page_size - 1
    wanted = list(LENGTHS) + [1 + 7 * i for i in range(-len(LENGTHS) % rows)]
    fixed = sum(_pages(1, kv.page_size) for _ in wanted)
    if fixed > pages or len(wanted) > kv.req_to_token.shape[0] - 1:
        raise RuntimeError(
            f"decode_step self-check: a KV pool of {kv.num_slots} slots and {kv.req_to_token.shape[0]} request rows is too "
            f"small to check {rows} rows"
        )
    spare, lengths = pages - fixed, []
    for length in wanted:
        length = min(length, longest)
        room = (spare + _pages(1, kv.page_size)) * kv.page_size - 1
        length = max(1, min(length, room))
        spare -= _pages(length, kv.page_size) - _pages(1, kv.page_size)
        lengths.append(length)
    return lengths


def value_scale(qkv: torch.Tensor, input_norm: torch.Tensor, geometry: Geometry) -> float:
    """RMS of a layer's V for normalised inputs of unit RMS: the scale at which its own V rows come out.

    qkv: [(num_q_heads + 2 num_kv_heads) head_dim, hidden] bf16, input_norm: [hidden] bf16.
    """
    v_rows = qkv[-geometry.num_kv_heads * geometry.head_dim :].float() * input_norm.float()
    return math.sqrt(float(v_rows.square().sum(dim=1).mean()))
