"""The batches of the self-check: random tokens over a scattered, real-scale KV context, shaped to make mistakes loud."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
    """One decode batch. tokens: the step's inputs by name, int64 [rows] each; seq_lens include the new token, whose slot is
    out_cache_loc. table: [rows, columns] int32, what the first columns of the request rows must hold."""

    tokens: dict[str, torch.Tensor]
    table: torch.Tensor


@dataclass(frozen=True)
class CheckInputs:
    """The batches, and what they use of SGLang's: request_rows [rows] int64 of req_to_token, the same in every batch, and
    slots [n] int64. loudness: [n] float, the factor on a slot's V."""

    batches: list[CheckBatch]
    request_rows: torch.Tensor
    slots: torch.Tensor
    loudness: torch.Tensor

    @property
    def columns(self) -> int:
        return self.batches[0].table.shape[1]


def make_inputs(geometry: Geometry, kv: KvState, rows: int, generator: torch.Generator) -> CheckInputs:
    """Batches of `rows` requests that cover LENGTHS, as far as the context, the rope table and the pool allow.

    Every length has slots of its own; where rows outnumber the lengths left, a batch is filled up with short requests.
    Raises RuntimeError when the pool cannot hold one token a request.
    """
    lengths = _request_lengths(geometry, kv, rows)
    device = kv.req_to_token.device
    table, loudness = _scatter(lengths, kv, generator)
    request_rows = 1 + torch.randperm(kv.req_to_token.shape[0] - 1, generator=generator)[:rows]  # row 0 is SGLang's padding
    batches = []
    for first in range(0, len(lengths), rows):
        at = slice(first, first + rows)
        seq_lens = torch.tensor(lengths[at])
        tokens = {
            "input_ids": torch.randint(0, geometry.vocab, (rows,), generator=generator),
            "positions": seq_lens - 1,
            "seq_lens": seq_lens,
            "req_pool_indices": request_rows,
            "out_cache_loc": table[at].gather(1, seq_lens[:, None] - 1).flatten(),
        }
        on_device = {name: tensor.to(device) for name, tensor in tokens.items()}
        batches.append(CheckBatch(on_device, table[at].to(device=device, dtype=torch.int32)))
    slots = loudness.nonzero().flatten()
    return CheckInputs(batches, request_rows.to(device), slots.to(device), loudness[slots].to(device))


def _scatter(lengths: list[int], kv: KvState, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots for every token of every request, on scattered pages: table [requests, columns] int64, and the loudness of
    every slot of the pool [num_slots], 0 where none lies."""
    page, num_pages = kv.page_size, kv.num_slots // kv.page_size
    pages = 1 + torch.randperm(num_pages - 1, generator=generator)  # page 0 is SGLang's padding
    table = torch.zeros((len(lengths), max(lengths) + 1), dtype=torch.int64)
    loudness = torch.zeros(kv.num_slots)
    taken = 0
    for row, length in enumerate(lengths):
        needed = _pages(length, page)
        slots = (pages[taken : taken + needed, None] * page + torch.arange(page)).flatten()
        taken += needed
        table[row, : length + 1] = slots[: length + 1]
        loudness[slots] = 1.0
        loudness[slots[[0, max(0, length - 2), *range(LOUD_STRIDE, length, LOUD_STRIDE)]]] = LOUD
        loudness[slots[length]] = GUARD
    return table, loudness


def _pages(length: int, page_size: int) -> int:
    return -(-(length + 1) // page_size)  # one token more: the guard


def _request_lengths(geometry: Geometry, kv: KvState, rows: int) -> list[int]:
    longest = min(kv.req_to_token.shape[1] - 1, geometry.max_position)
    pages = kv.num_slots // kv.page_size - 1
    wanted = list(LENGTHS) + [1 + 7 * i for i in range(-len(LENGTHS) % rows)]
    fixed = sum(_pages(1, kv.page_size) for _ in wanted)
    if fixed > pages or rows > kv.req_to_token.shape[0] - 1:
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
    return _row_scale(qkv[-geometry.num_kv_heads * geometry.head_dim :], input_norm)


def like_keys(noise: torch.Tensor, attention: Any, input_norm: torch.Tensor) -> torch.Tensor:
    """noise [tokens, num_kv_heads, head_dim] of unit RMS, scaled and shifted as the layer's own K rows come out: by its k norm,
    or without one by the projection and its bias. attention: SGLang's attention module of the layer."""
    norm = getattr(attention, "k_norm", None)
    if norm is not None:
        return noise * norm.weight.float()
    kv_size = noise[0].numel()
    keys = slice(-2 * kv_size, -kv_size)  # rows are q | k | v
    k = noise * _row_scale(attention.qkv_proj.weight[keys], input_norm)
    bias = getattr(attention.qkv_proj, "bias", None)
    return k if bias is None else k + bias[keys].float().view(noise.shape[1:])


def _row_scale(rows: torch.Tensor, input_norm: torch.Tensor) -> float:
    return math.sqrt(float((rows.float() * input_norm.float()).square().sum(dim=1).mean()))
