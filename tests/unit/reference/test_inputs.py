"""Random steps: scattered, distinct, real-scale, and poisoned wherever nothing may be read."""

import pytest
import torch

from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference import dense_decode
from sgl_lowlatency.reference.inputs import random_step, random_weights

GEOMETRY = Geometry(3, 256, 4, 2, 64, 384, 512, 8192, 1e-6, False)
LENGTHS = [1, 2, 63, 64, 65, 300]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_slots_are_paged_scattered_and_distinct(page_size):
    step = random_step(GEOMETRY, LENGTHS, 5, page_size=page_size)
    seen = []
    for row, length in enumerate(LENGTHS):
        slots = step.req_to_token[step.req_pool_indices[row], :length].long()
        assert slots[-1] == step.out_cache_loc[row]
        assert torch.equal(step.old_slots(row), slots[:-1])
        offset = torch.arange(length) % page_size
        assert torch.equal(slots % page_size, offset), "tokens of a page lie in order"
        assert bool((slots >= page_size).all()), "page 0 is the padding page"
        seen.append(slots)
    joined = torch.cat(seen)
    assert joined.unique().numel() == joined.numel()
    pages = joined[::page_size] // page_size
    assert not torch.equal(pages, pages.sort().values)
    assert step.req_pool_indices.unique().numel() == len(LENGTHS) and int(step.req_pool_indices.min()) > 0
    assert step.positions.tolist() == [length - 1 for length in LENGTHS] and step.seq_lens.tolist() == LENGTHS


@pytest.mark.parametrize("page_size", [1, 16])
def test_only_old_tokens_and_the_padding_slot_are_finite(page_size):
    step = random_step(GEOMETRY, LENGTHS, 6, page_size=page_size)
    old = torch.cat([step.old_slots(row) for row in range(len(LENGTHS))])
    finite = torch.zeros(step.k_buffers[0].shape[0], dtype=torch.bool)
    finite[old] = True
    finite[0] = True
    for buffer in (*step.k_buffers, *step.v_buffers):
        assert torch.equal(buffer.isfinite().flatten(1).all(1), finite)
        assert torch.equal(buffer.isnan().flatten(1).all(1), ~finite)
    for row, length in enumerate(LENGTHS):
        stale = step.req_to_token[step.req_pool_indices[row], length:].long()
        assert stale.numel() > 0 and not bool(finite[stale].any()), "what lies beyond a length is poison"


def test_padded_rows_are_those_of_a_graph():
    step = random_step(GEOMETRY, [5], 7, num_padded=3)
    assert step.rows == 4
    for name, value in (("input_ids", 0), ("positions", 0), ("seq_lens", 1), ("req_pool_indices", 0), ("out_cache_loc", 0)):
        assert getattr(step, name)[1:].tolist() == [value] * 3
    assert step.req_to_token[0].tolist() == [0] * step.req_to_token.shape[1]


@pytest.mark.parametrize("lengths_are_prefix", [True, False], ids=["prefix", "counted"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_verify_step_has_consecutive_new_tokens(page_size, lengths_are_prefix):
    prefixes, chain = [0, 1, 15, 63], 4
    lengths = prefixes if lengths_are_prefix else [prefix + chain for prefix in prefixes]
    step = random_step(GEOMETRY, lengths, 5, page_size=page_size, num_padded=2, rows_per_request=chain, lengths_are_prefix=lengths_are_prefix)
    assert (step.rows, step.num_requests) == (6 * chain, 6)
    assert step.seq_lens.tolist() == [*lengths, 1, 1] and step.req_pool_indices[4:].tolist() == [0, 0]
    assert step.lengths() == [*(prefix + chain for prefix in prefixes), *([1 + chain] * 2 if lengths_are_prefix else [0, 0])]
    for name in ("input_ids", "positions", "out_cache_loc"):
        assert getattr(step, name)[4 * chain :].tolist() == [0] * 2 * chain
    for row in range(4 * chain):
        request, t = divmod(row, chain)
        slots = step.req_to_token[step.req_pool_indices[request]].long()
        assert int(step.positions[row]) == prefixes[request] + t
        assert int(step.out_cache_loc[row]) == int(slots[prefixes[request] + t]), "the table names the new tokens' slots, as SGLang's does"
        assert torch.equal(step.old_slots(row), slots[: prefixes[request]])
        assert range(4 * chain)[step.new_rows(row)] == range(request * chain, row + 1)
    assert all(bool(buffer[step.out_cache_loc[: 4 * chain]].isnan().all()) for buffer in (*step.k_buffers, *step.v_buffers))


def test_lengths_that_do_not_count_the_new_tokens_are_refused():
    with pytest.raises(ValueError, match=r"lengths \[3, 9\] do not all count the 4 new tokens of a request"):
        random_step(GEOMETRY, [3, 9], 5, rows_per_request=4)


def test_seeds_decide_everything():
    one, same, other = (random_step(GEOMETRY, LENGTHS, seed) for seed in (8, 8, 9))
    for name in ("input_ids", "req_to_token", "out_cache_loc"):
        assert torch.equal(getattr(one, name), getattr(same, name))
        assert not torch.equal(getattr(one, name), getattr(other, name))
    assert torch.equal(one.k_buffers[2].view(torch.int16), same.k_buffers[2].view(torch.int16))
    weights, again = random_weights(GEOMETRY, 8), random_weights(GEOMETRY, 8)
    assert torch.equal(weights.layers[2].down, again.layers[2].down)


def test_activations_are_of_order_one_and_attention_is_not_uniform():
    """What dummy weights of 1e-3 lack: a step whose parts all matter."""
    weights = random_weights(GEOMETRY, 10)
    step = random_step(GEOMETRY, LENGTHS, 10)
    outputs = dense_decode.decode_step(GEOMETRY, weights, step)
    for tensor in (outputs.hidden, outputs.v_rows, outputs.k_rows):
        assert 0.3 < float(tensor.pow(2).mean().sqrt()) < 4.0
    row = LENGTHS.index(300)
    slots = step.old_slots(row)
    generator = torch.Generator().manual_seed(11)
    q = torch.randn(64, 64, generator=generator) * 1.5
    attention = (q @ step.k_buffers[0][slots, 0].float().T / 8.0).softmax(-1)
    assert float(attention.max(-1).values.mean()) > 20 / 300, "a token weighs far more than its share"
