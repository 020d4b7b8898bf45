"""The batches of the self-check cover the lengths that matter, on slots that nothing else holds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sgl_lowlatency.runtime.self_check_inputs import GUARD, LENGTHS, LOUD, make_inputs, value_scale
from sgl_lowlatency.runtime.sglang_state import KvState
from tiny_serving import GEOMETRY

from sgl_lowlatency.reference.inputs import random_weights


def pool(num_slots=4096, page_size=1, request_rows=40, context=1100):
    buffer = torch.zeros((num_slots, GEOMETRY.num_kv_heads, GEOMETRY.head_dim), dtype=torch.bfloat16)
    layers = [buffer] * GEOMETRY.num_layers
    return KvState(layers, layers, torch.zeros((request_rows, context), dtype=torch.int32), page_size)


def make(kv, rows, drafts=1):
    return make_inputs(GEOMETRY, kv, rows, torch.Generator().manual_seed(3), drafts)


def lengths_of(inputs):
    return torch.cat([batch.tokens["seq_lens"] for batch in inputs.batches]).tolist()


@pytest.mark.parametrize("rows", range(1, 17))
def test_every_width_meets_every_length(rows):
    inputs = make(pool(), rows)
    assert lengths_of(inputs)[: len(LENGTHS)] == list(LENGTHS)
    assert all(len(tensor) == rows for batch in inputs.batches for tensor in (*batch.tokens.values(), batch.table))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_slots_are_whole_scattered_pages_used_once(page_size):
    kv = pool(num_slots=64 * 200, page_size=page_size)
    inputs = make(kv, 5)
    seen = []
    for slots_of_row, length in zip(torch.cat([batch.table for batch in inputs.batches]), lengths_of(inputs)):
        seen.append(slots_of_row[: length + 1])
        assert torch.equal(seen[-1] % page_size, torch.arange(length + 1, dtype=torch.int32) % page_size)
    used = torch.cat(seen)
    assert len(used.unique()) == len(used) and int(used.min()) >= page_size, "a slot is used twice or is padding"
    assert set(used.tolist()) <= set(inputs.slots.tolist())
    firsts = torch.stack([slots[0] for slots in seen])
    assert not torch.equal(firsts, firsts.sort().values), "pages lie in order"


def test_positions_new_slots_and_rows_belong_together():
    inputs = make(pool(), 4)
    assert 0 not in inputs.request_rows and len(inputs.request_rows.unique()) == 4
    for batch in inputs.batches:
        tokens = batch.tokens
        assert torch.equal(tokens["req_pool_indices"], inputs.request_rows)
        assert torch.equal(tokens["positions"], tokens["seq_lens"] - 1)
        for slots, position, slot in zip(batch.table, tokens["positions"], tokens["out_cache_loc"]):
            assert int(slots[position]) == int(slot)


@pytest.mark.parametrize("requests, drafts", [(1, 2), (4, 4), (1, 16), (3, 5)])
def test_every_verify_width_meets_every_prefix_and_its_drafts_follow_it(requests, drafts):
    inputs = make(pool(), requests * drafts, drafts)
    assert lengths_of(inputs)[: len(LENGTHS)] == list(LENGTHS)
    written = []
    for at, batch in enumerate(inputs.batches):
        tokens = {name: tensor.view(requests, -1) for name, tensor in batch.tokens.items()}
        expected = tokens["seq_lens"] + torch.arange(drafts)
        assert torch.equal(tokens["out_cache_loc"], batch.table.long().gather(1, expected))
        if at % 2:
            expected[0, -1] = expected[0, 1]  # as NGRAM fills a chain up
        assert torch.equal(tokens["positions"], expected)
        written.append(tokens["out_cache_loc"].flatten())
    assert len(torch.cat(written).unique()) == torch.cat(written).numel(), "two drafts share a slot"


def test_what_a_chain_must_not_miss_and_what_it_must_not_see_is_loud():
    inputs = make(pool(), 4, 4)
    loudness = dict(zip(inputs.slots.tolist(), inputs.loudness.tolist()))
    slots = inputs.batches[LENGTHS.index(1000)].table[0].tolist()
    assert loudness[slots[999]] == LOUD, "the last token of the prefix"
    assert loudness[slots[1004]] == GUARD, "the slot behind the last draft"
    assert loudness[slots[1000]] == loudness[slots[1003]] == 1.0


def test_prefixes_shrink_until_the_drafts_fit():
    assert max(lengths_of(make(pool(context=101), 4, 4))) == 100 - 4
    short_rope = make_inputs(dataclasses.replace(GEOMETRY, max_position=40), pool(), 8, torch.Generator().manual_seed(0), 4)
    assert max(lengths_of(short_rope)) == 36
    assert max(int(batch.tokens["positions"].max()) for batch in short_rope.batches) == 39
    with pytest.raises(RuntimeError, match="too small to check 16 rows"):
        make(pool(num_slots=6 * 9), 16, 4)


def test_a_batch_needs_no_more_request_rows_than_it_has_requests():
    inputs = make(pool(request_rows=4), 3)
    assert sorted(inputs.request_rows.tolist()) == [1, 2, 3] and set(LENGTHS) <= set(lengths_of(inputs))


def test_ends_and_guards_are_loud():
    inputs = make(pool(), 1)
    loudness = dict(zip(inputs.slots.tolist(), inputs.loudness.tolist()))
    slots = inputs.batches[LENGTHS.index(1000)].table[0].tolist()
    assert loudness[slots[1000]] == GUARD
    assert all(loudness[slots[at]] == LOUD for at in (0, 64, 128, 998))
    assert loudness[slots[1]] == 1.0


def test_lengths_shrink_to_the_context_and_the_pool():
    small_context = make(pool(context=101), 1)
    assert max(lengths_of(small_context)) == 100
    small_pool = make(pool(num_slots=301), 1)
    lengths = lengths_of(small_pool)
    assert lengths[:5] == list(LENGTHS[:5]) and sum(lengths) + len(lengths) <= 300
    short_rope = make_inputs(dataclasses.replace(GEOMETRY, max_position=40), pool(), 1, torch.Generator().manual_seed(0))
    assert max(lengths_of(short_rope)) == 40


@pytest.mark.parametrize("sizes", [{"num_slots": 12}, {"request_rows": 5}])
def test_a_pool_too_small_to_check_is_an_error(sizes):
    with pytest.raises(RuntimeError, match="too small to check 16 rows"):
        make(pool(**sizes), 16)


def test_value_scale_is_that_of_the_projection():
    generator = torch.Generator().manual_seed(0)
    hidden = 512
    geometry = dataclasses.replace(GEOMETRY, hidden=hidden)
    rows = (geometry.num_q_heads + 2 * geometry.num_kv_heads) * geometry.head_dim
    qkv = torch.randn((rows, hidden), generator=generator) * 0.3
    norm = 1 + 0.2 * torch.randn(hidden, generator=generator)
    x = torch.randn((400, hidden), generator=generator) * norm
    values = (x @ qkv.T)[:, -geometry.num_kv_heads * geometry.head_dim :]
    tensors = dataclasses.replace(random_weights(GEOMETRY, 0).layers[0], qkv=qkv.bfloat16(), input_norm=norm.bfloat16())
    assert value_scale(tensors, geometry) == pytest.approx(float(values.square().mean().sqrt()), rel=0.03)
