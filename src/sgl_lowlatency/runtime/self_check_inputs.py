"""The batches of the self-check: random tokens over a scattered, real-scale KV context, shaped to make mistakes loud."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sgl_lowlatency.kernels.decode_step_tensors import LayerTensors
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.runtime.sglang_state import KvState

# Of requests as SGLang counts them: new token included in decode, draft tokens left out in verify. Short ones make one wrong
# token weigh much; the others straddle tiles, pages and splits.
LENGTHS = (1, 2, 3, 63, 17, 64, 65, 130, 1000)
LOUD = 8.0  # V of a sequence's first token, of its last old one and of those at multiples of LOUD_STRIDE
LOUD_STRIDE = 64
GUARD = 50.0  # V in the slot after a sequence's end: a mask that lets it in shows at any length


@dataclass(frozen=True)
class CheckBatch:
    """One batch of decode or verify. tokens: the step's inputs by name, int64, as sglang_state.check_batch takes them; the new
    tokens' slots are out_cache_loc. table: [requests, columns] int32, what the first columns of the request rows must hold."""

    tokens: dict[str, torch.Tensor]
    table: torch.Tensor


@dataclass(frozen=True)
class CheckInputs:
    """The batches, and what they use of SGLang's: request_rows [requests] int64 of req_to_token, the same in every batch, and
    slots [n] int64. loudness: [n] float, the factor on a slot's V."""

    batches: list[CheckBatch]
    request_rows: torch.Tensor
    slots: torch.Tensor
    loudness: torch.Tensor

    @property
    def columns(self) -> int:
        return self.batches[0].table.shape[1]


def make_inputs(
    geometry: Geometry, kv: KvState, rows: int, generator: torch.Generator, tokens_per_request: int = 1
) -> CheckInputs:
    """Batches of `rows` rows that cover LENGTHS, as far as the context, the rope table and the pool allow.

    tokens_per_request: 1 for decode, more for verify. Every request has slots of its own; where requests outnumber the lengths
    left, a batch is filled up with short ones. Raises RuntimeError when the pool cannot hold the shortest requests.
    """
    news, requests = tokens_per_request, rows // tokens_per_request
    olds = _old_lengths(geometry, kv, requests, news)
    device = kv.req_to_token.device
    table, loudness = _scatter(olds, news, kv, generator)
    request_rows = 1 + torch.randperm(kv.req_to_token.shape[0] - 1, generator=generator)[:requests]  # row 0 is SGLang's padding
    batches = []
    for first in range(0, len(olds), requests):
        at = slice(first, first + requests)
        old = torch.tensor(olds[at])
        new = old[:, None] + torch.arange(news)
        tokens = {
            "input_ids": torch.randint(0, geometry.vocab, (rows,), generator=generator),
            "positions": (_padded_positions(new) if len(batches) % 2 else new).flatten(),
            "seq_lens": old + 1 if news == 1 else old,
            "req_pool_indices": request_rows,
            "out_cache_loc": table[at].gather(1, new).flatten(),
        }
        on_device = {name: tensor.to(device) for name, tensor in tokens.items()}
        batches.append(CheckBatch(on_device, table[at].to(device=device, dtype=torch.int32)))
    slots = loudness.nonzero().flatten()
    return CheckInputs(batches, request_rows.to(device), slots.to(device), loudness[slots].to(device))


def _padded_positions(new: torch.Tensor) -> torch.Tensor:
    """Positions of the new tokens at indices `new` [requests, news], where the last draft of the first request has that of the
    second: NGRAM fills a short chain up with tokens that follow the first one, and rope takes the position it is given."""
    positions = new.clone()
    positions[0, -1] = new[0, min(1, new.shape[1] - 1)]
    return positions


def _scatter(olds: list[int], news: int, kv: KvState, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots for every token of every request, on scattered pages: table [requests, columns] int64, and the loudness of
    every slot of the pool [num_slots], 0 where none lies. olds: tokens in the cache; `news` follow."""
    page, num_pages = kv.page_size, kv.num_slots // kv.page_size
    pages = 1 + torch.randperm(num_pages - 1, generator=generator)  # page 0 is SGLang's padding
    table = torch.zeros((len(olds), max(olds) + news + 1), dtype=torch.int64)
    loudness = torch.zeros(kv.num_slots)
    taken = 0
    for row, old in enumerate(olds):
        length = old + news
        needed = _pages(length, page)
        slots = (pages[taken : taken + needed, None] * page + torch.arange(page)).flatten()
        taken += needed
        table[row, : length + 1] = slots[: length + 1]
        loudness[slots] = 1.0
        loudness[slots[[0, max(0, old - 1), *range(LOUD_STRIDE, length, LOUD_STRIDE)]]] = LOUD
        loudness[slots[length]] = GUARD
    return table, loudness


def _pages(length: int, page_size: int) -> int:
    return -(-(length + 1) // page_size)  # one token more: the guard


def _old_lengths(geometry: Geometry, kv: KvState, requests: int, news: int) -> list[int]:
    """Tokens in the cache of every request: LENGTHS, shortened to what fits, and short ones that fill the last batch up."""
    longest = min(kv.req_to_token.shape[1] - 1, geometry.max_position)
    pages = kv.num_slots // kv.page_size - 1
    wanted = list(LENGTHS) + [1 + 7 * i for i in range(-len(LENGTHS) % requests)]
    counted = min(news, 2) - 1  # a length of LENGTHS counts the new token in decode, no draft token in verify
    least = _pages(counted + news, kv.page_size)
    if least * len(wanted) > pages or requests > kv.req_to_token.shape[0] - 1:
        raise RuntimeError(
            f"self-check: a KV pool of {kv.num_slots} slots and {kv.req_to_token.shape[0]} request rows is too "
            f"small to check {requests * news} rows"
        )
    spare, olds = pages - least * len(wanted), []
    for length in wanted:
        room = (spare + least) * kv.page_size - 1
        total = min(length - 1 + counted + news, longest, room)
        old = max(counted, total - news)
        spare -= _pages(old + news, kv.page_size) - least
        olds.append(old)
    return olds


def value_scale(tensors: LayerTensors, geometry: Geometry) -> float:
    """RMS of a layer's V for normalised inputs of unit RMS: the scale at which its own V rows come out."""
    return _row_scale(tensors, slice(-geometry.num_kv_heads * geometry.head_dim, None))


def like_keys(noise: torch.Tensor, tensors: LayerTensors) -> torch.Tensor:
    """noise [tokens, num_kv_heads, head_dim] of unit RMS, scaled and shifted as the layer's own K rows come out: by its k norm,
    or without one by the projection and its bias."""
    if tensors.k_norm is not None:
        return noise * tensors.k_norm.float()
    kv_size = noise[0].numel()
    keys = slice(-2 * kv_size, -kv_size)  # rows are q | k | v
    k = noise * _row_scale(tensors, keys)
    return k if tensors.qkv_bias is None else k + tensors.qkv_bias[keys].float().view(noise.shape[1:])


def _row_scale(tensors: LayerTensors, rows: slice) -> float:
    projection = tensors.dequantized("qkv", torch.float32, rows)
    return math.sqrt(float((projection * tensors.input_norm.float()).square().sum(dim=1).mean()))
