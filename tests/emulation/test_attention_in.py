"""attention_in in emulation: the next input, latent queries, queries and KV rows through the numerics gate, and every other byte of the cache.
Oracle: reference/attention_in.py."""

import dataclasses

import pytest
import torch
from attention_in_cases import SMALL, Layer, empty_cache, random_weights

from sgl_lowlatency.kernels.attention_in import KV_DATA_BYTES, KV_SCALE_BYTES, AttentionIn, AttentionInSizes, KvPages
from sgl_lowlatency.kernels.fault import AttentionInFault
from sgl_lowlatency.reference import attention_in as oracle

SHAPES = [  # sizes, grid
    (SMALL, 4),
    (AttentionInSizes(1280, 384, 1), 5),  # two splits of K, the second one short
    (AttentionInSizes(128, 128, 1), 40),  # more blocks than units of most ops
    (AttentionInSizes(256, 256, 1), 1),  # a block alone
    (AttentionInSizes(128, 1280, 1), 3),  # DeepSeek-V4.1's latent width: two stages, the second one short
    (AttentionInSizes(5120, 128, 1), 3),  # its own width: five splits
]


@pytest.mark.parametrize(("sizes", "grid"), SHAPES)
def test_rows(sizes, grid):
    """Launches of different rows, of every instance of the kernel, alternate on one workspace; every other one has no pre."""
    layer = Layer(sizes, grid=grid)
    for seed, rows in enumerate((1, 6, 12, 48, 9, 17, 1) if sizes is SMALL else (1, 12, 48, 6)):
        layer.kernel.emulation.seed = seed
        inputs = layer.inputs(rows, seed, has_pre=seed % 2 == 0)
        layer.run(*inputs)
        assert layer.problems(*inputs) == [], rows


def test_kv_rows_are_the_standard_paths_bit_by_bit():
    """Almost: sums in another order round a few values to their neighbours."""
    layer = Layer()
    for rows in (5, 40):
        streams, pre, positions, slots = layer.inputs(rows)
        layer.run(streams, pre, positions, slots)
        _, standard = oracle.outputs(SMALL, layer.weights, streams, pre, positions)
        differ = oracle.read_slots(layer.cache, slots.long()) != standard.kv
        assert float(differ.double().mean()) < 0.005


def test_a_row_without_a_slot_is_not_stored():
    layer = Layer()
    streams, pre, positions, slots = layer.inputs(6)
    slots[[0, 4]] = torch.tensor([-1, -7], dtype=torch.int32)
    layer.run(streams, pre, positions, slots)
    assert layer.problems(streams, pre, positions, slots) == []
    layer.run(streams, pre, positions, torch.full_like(slots, -1))
    assert layer.untouched([])


def test_rows_of_queries_may_be_apart():
    layer = Layer()
    inputs = layer.inputs(3)
    layer.run(*inputs, padding=512)
    assert layer.problems(*inputs) == [] and not layer.q.is_contiguous()


@pytest.mark.parametrize("factor", [0.0, 1e-6, 1e4])
def test_keys_of_any_size(factor):
    """The norm makes them alike, but for the eps, which leaves zeros and makes small ones smaller."""
    layer = Layer()
    inputs = layer.inputs(4)
    layer.layer.weights.wqkv_a_scale.mul_(2.0 ** round(torch.tensor(max(factor, 1e-6)).log2().item()))
    if factor == 0.0:
        layer.layer.weights.kv_norm.zero_()
    layer.run(*inputs)
    assert layer.problems(*inputs) == []
    if factor == 0.0:
        assert oracle.read_slots(layer.cache, inputs[3].long()).eq(0).all()


def test_a_group_of_tiny_keys_has_the_least_scale():
    """Group 2, whose largest value is about 2^-16, below 1e-4: 2^-22 is the least power of two that is not below 1e-4 / 448."""
    layer = Layer()
    inputs = layer.inputs(4)
    layer.layer.weights.kv_norm[2 * 64 : 3 * 64].mul_(2.0**-18)
    layer.run(*inputs)
    assert layer.problems(*inputs) == []
    size = layer.cache.page_size
    for slot in inputs[3].tolist():
        scales = layer.cache.pages[slot // size, size * KV_DATA_BYTES + slot % size * KV_SCALE_BYTES :][:7]
        assert scales[2] == 127 - 22 and bool((scales[[0, 1, 3, 4, 5, 6]] > 127 - 10).all())


@pytest.mark.parametrize(("all_rows", "some_rows"), [(32, (slice(0, 1), slice(5, 12), slice(3, 30))), (48, (slice(4, 40),))])
def test_a_row_does_not_depend_on_the_others(all_rows, some_rows):
    """Bit by bit up to 32 rows, and above: the widest instance has one sum for each N tile, the others two."""
    layer = Layer()
    inputs = layer.inputs(all_rows)
    layer.run(*inputs)
    x, q = layer.x, layer.q
    rows_kv = oracle.read_slots(layer.cache, inputs[3].long())
    for rows in some_rows:
        some = tuple(t[rows].contiguous() for t in inputs)
        layer.run(*some)
        assert torch.equal(layer.x, x[rows]) and torch.equal(layer.q, q[rows])
        assert torch.equal(oracle.read_slots(layer.cache, some[3].long()), rows_kv[rows])


@pytest.mark.parametrize(("change", "words"), [
    ({"hidden": 192}, "hidden 192 is not a positive multiple of 128"),
    ({"lora": 1536}, "lora 1536 is not a multiple of 128 up to 1408"),
    ({"heads": 0}, "heads 0 is below 1"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        AttentionIn(dataclasses.replace(SMALL, **change), 8, torch.device("cpu"), 4, 2.0)


@pytest.mark.parametrize(("field", "change", "words"), [
    ("wq_b_scale", lambda t: t.fill_(3.0), "wq_b_scale: 3.0 is no power of two"),
    ("wqkv_a", lambda t: t[:-16], r"wqkv_a: shape \(624, 256\) is not \(640, 256\)"),
    ("kv_norm", lambda t: t.float(), "kv_norm: dtype torch.float32 is not torch.bfloat16"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(field, change, words):
    layer, weights = Layer(), random_weights(SMALL)
    with pytest.raises(ValueError, match=words):
        layer.kernel.prepare(dataclasses.replace(weights, **{field: change(getattr(weights, field))}))


def test_launches_that_do_not_fit_are_refused():
    layer = Layer(max_rows=8)
    inputs, cache, q = layer.inputs(8), empty_cache("cpu"), torch.empty(8, 2, 512, dtype=torch.bfloat16)
    rest = torch.empty(8, 256, dtype=torch.bfloat16), torch.empty(8, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"rows 9 is outside 1\.\.8"):
        layer.run(*layer.inputs(9))
    with pytest.raises(ValueError, match="a page of 18688 bytes does not hold 33 slots, 19272 bytes"):
        layer.kernel.launch(layer.layer, *inputs, KvPages(cache.pages[:, :18688], 33), *rest, q)
    with pytest.raises(ValueError, match="q: strides .* a row must lie together"):
        layer.kernel.launch(layer.layer, *inputs, cache, *rest, q.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.parametrize(("which", "value", "words"), [
    (2, 97, r"row 2 has position 97, outside 0\.\.96 \(the rows of the rope table\)"), (2, -3, r"row 2 has position -3, outside 0\.\.96"),
    (3, 96, r"row 2 has KV slot 96, outside 0\.\.95 \(the slots of the KV pool\)"),
])  # fmt: skip
def test_what_would_read_or_write_foreign_memory_ends_the_launch(which, value, words):
    layer = Layer()
    inputs = layer.inputs(4)
    inputs[which][2] = value
    with pytest.raises(AttentionInFault, match="attention_in stopped: .* " + words):
        layer.run(*inputs)
