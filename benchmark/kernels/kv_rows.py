"""KV rows that a step of DeepSeek-V4.1 writes, and the tokens that its Engram layers keep, with slices of ours beside SGLang's own launches: the same
slots, rows near each other, nothing else touched, the same tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from benchmark.kernels import sglang_runner
from sgl_lowlatency.kernels.attention_in import KV_DATA_BYTES, KV_SCALE_BYTES, KvPages
from sgl_lowlatency.reference import attention_in as oracle


@dataclasses.dataclass(frozen=True)
class State:
    """keys: of every layer, a copy of its pages of window keys. history: of engram_history, None for a model without."""

    keys: list[KvPages]
    history: torch.Tensor | None


def state_of(runner: Any, layer_ids: Sequence[int]) -> State:
    """Of a runner whose pool has SGLang's V4 layout."""
    pool, history = runner.token_to_kv_pool, sglang_runner.engram_history(runner)
    keys = [KvPages(pool.get_swa_key_buffer_radix(i).view(torch.uint8).clone(), pool.get_swa_key_page_size()) for i in layer_ids]
    return State(keys, None if history is None else history.clone())


def invert(runner: Any, layer_ids: Sequence[int], batch: Any) -> None:
    """Every bit of the slots, in all layers, that the step of `batch` is to write: an earlier run of the step may have left there what this one writes."""
    pool = runner.token_to_kv_pool
    slots, size = pool.translate_loc_from_full_to_swa(batch.out_cache_loc).tolist(), pool.get_swa_key_page_size()
    for i in layer_ids:
        pages = pool.get_swa_key_buffer_radix(i).view(torch.uint8)
        for page, at in (divmod(slot, size) for slot in slots):
            for first, width in ((at * KV_DATA_BYTES, KV_DATA_BYTES), (size * KV_DATA_BYTES + at * KV_SCALE_BYTES, KV_SCALE_BYTES)):
                pages[page, first : first + width] ^= 0xFF


def written_slots(before: KvPages, after: KvPages) -> torch.Tensor:
    """Slots, int64, of which a byte changed."""
    size, changed = before.page_size, before.pages != after.pages
    data = changed[:, : size * KV_DATA_BYTES].unflatten(1, (size, KV_DATA_BYTES)).any(2)
    scales = changed[:, size * KV_DATA_BYTES :][:, : size * KV_SCALE_BYTES].unflatten(1, (size, KV_SCALE_BYTES)).any(2)
    return (data | scales).flatten().nonzero().flatten()


def compared(before: State, ours: State, theirs: State, rows: int) -> tuple[list[float], list[str]]:
    """(by layer, how far our rows are from SGLang's, by the norm; what is wrong beside that). before: in front of the step, of `rows` rows, that led to
    either."""
    distances, problems = [], []
    for number, (start, own, their) in enumerate(zip(before.keys, ours.keys, theirs.keys, strict=True)):
        slots, wanted = written_slots(start, own), written_slots(start, their)
        if not torch.equal(slots, wanted) or len(slots) != rows:
            problems.append(f"layer {number}: keys of slots {slots.tolist()[:8]} were written, SGLang writes {wanted.tolist()[:8]}, of {rows} rows")
            continue
        a, b = oracle.read_slots(own, slots), oracle.read_slots(their, slots)
        distances.append(((a - b).norm() / b.norm()).item())
    if ours.history is not None and not torch.equal(ours.history, theirs.history):
        problems.append("the tokens that Engram layers hash are not SGLang's behind the step")
    return distances, problems
