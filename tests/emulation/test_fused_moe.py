"""fused_moe in emulation: logits and output through the numerics gate, choices by the rule. Oracle: reference/fused_moe.py."""

import dataclasses

import pytest
import torch
from fused_moe_cases import Moe, random_weights

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.fused_moe import FusedMoe

SHAPES = [  # hidden, intermediate, experts, top_k, grid
    (256, 128, 32, 3, 4),
    (1280, 384, 48, 6, 5),  # two splits of K, the second one short; chunks of one step; warps without a chunk
    (128, 640, 16, 2, 40),  # more blocks than units of most ops
    (384, 128, 96, 1, 1),  # a block alone; a choice that is not normalised
    (5120, 256, 16, 2, 2),  # DeepSeek-V4.1's width, and its chunks of gate_up
    (128, 2304, 16, 2, 3),  # the same of down
]


@pytest.mark.parametrize(("hidden", "intermediate", "num_experts", "top_k", "grid"), SHAPES)
def test_rows(hidden, intermediate, num_experts, top_k, grid):
    """Launches of different rows alternate on one workspace."""
    moe = Moe(hidden, intermediate, num_experts, top_k, grid=grid)
    for seed, rows in enumerate((1, 6, 12, 48, 9, 1)):
        moe.kernel.emulation.seed = seed
        x, _ = moe.inputs(rows, seed)
        moe.run(x)
        assert moe.problems(x) == [], rows


@pytest.mark.parametrize("rows", [7, 20])
def test_other_bias_for_a_token_and_rows_that_are_not_live(rows):
    moe = Moe(alt=True)
    x, token_ids = moe.inputs(rows)
    moe.run(x, token_ids, rows - 3)
    assert moe.problems(x, token_ids, rows - 3) == []
    assert moe.record.ids[-3:].eq(-1).all() and moe.record.ids[:-3].ge(0).all()
    other = Moe(weights=dataclasses.replace(moe.weights, bias_alt=None))
    other.run(x, None, rows - 3)
    is_alt = token_ids[:-3] == moe.weights.alt_token_id
    assert (other.record.ids[:-3] != moe.record.ids[:-3]).any(1)[is_alt].any()
    assert torch.equal(other.record.ids[:-3][~is_alt], moe.record.ids[:-3][~is_alt])


def test_every_row_takes_the_same_experts():
    """Experts of 48 rows: six jobs each."""
    moe = Moe()
    moe.weights.bias[[3, 17, 30]] += 100.0
    x, _ = moe.inputs(48)
    moe.run(x)
    assert moe.problems(x) == []
    assert {tuple(sorted(ids)) for ids in moe.record.ids.tolist()} == {(3, 17, 30)}


def test_equal_scores_go_to_the_lowest_id_and_nan_ranks_first():
    moe = Moe()
    moe.weights.router.copy_(moe.weights.router[:1].expand(32, -1).clone())
    moe.weights.bias.zero_()
    x, _ = moe.inputs(5)
    moe.run(x)
    assert moe.record.ids.tolist() == [[0, 1, 2]] * 5
    moe.weights.bias[9] = float("nan")
    moe.weights.bias[20] = float("inf")
    moe.run(x)
    assert moe.record.ids.tolist() == [[9, 20, 0]] * 5


def test_the_limit_bounds_gates_and_ups():
    """Inputs so large that most gates and ups are beyond it; with none, the result is another."""
    found = {}
    for limit in (10.0, float("inf")):
        moe = Moe(limit=limit)
        x = moe.inputs(6)[0] * 16
        moe.run(x)
        assert moe.problems(x) == [], limit
        found[limit] = moe.out
    assert (found[10.0].float().norm() < 0.5 * found[float("inf")].float().norm()).item()


def test_a_row_does_not_depend_on_the_others():
    moe = Moe(num_experts=64, top_k=4)
    x, _ = moe.inputs(48)
    moe.run(x)
    together = moe.out
    for rows in (slice(0, 1), slice(5, 12), slice(20, 44)):
        moe.run(x[rows].contiguous())
        assert torch.equal(moe.out, together[rows])


@pytest.mark.parametrize("rows", [1, 20])
def test_rings_of_any_depth_give_the_same_bits(rows):
    """Of 1,280 columns a warp has five chunks of every unit, more than the shortest ring; smem_limit is what its whole block may take."""
    deep = Moe(1280, 384, 16, 2, max_rows=20)
    least = min(limit for limit in range(100_000, 232_448, 1024) if deep_enough(deep, limit))
    shallow = Moe(1280, 384, 16, 2, max_rows=20, weights=deep.weights, smem_limit=least)
    assert _C.moe_smem(deep.kernel._geometry, rows).depth > 2 == _C.moe_smem(deep.kernel._geometry, 20, least).depth
    x, token_ids = deep.inputs(rows, 3)
    deep.run(x, token_ids)
    shallow.run(x, token_ids)
    assert torch.equal(deep.out, shallow.out)
    with pytest.raises(ValueError, match=rf"need \d+ bytes of shared memory; a block has {least - 1024}"):
        Moe(1280, 384, 16, 2, max_rows=20, weights=deep.weights, smem_limit=least - 1024)


def deep_enough(moe, limit):
    return all(_C.moe_smem(moe.kernel._geometry, rows, limit).total_bytes <= limit for rows in range(1, moe.kernel.max_rows + 1))


@pytest.mark.parametrize(("sizes", "words"), [
    ((7168, 128), "hidden 7168 is not a multiple of 128 up to 5120"), ((256, 576), "intermediate 576 is not a multiple of 128 up to 2560"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        FusedMoe(*sizes, 32, 3, 8, torch.device("cpu"), 4, 2.0)


@pytest.mark.parametrize(("field", "change", "words"), [
    ("gate_up_scale", lambda t: t.fill_(129), "gate_up_scale: e8m0 byte 129 is above 128"),
    ("shared_down_scale", lambda t: t.fill_(3.0), "shared_down_scale: 3.0 is no power of two"),
    ("down", lambda t: t[:, :, :-1], "down: shape"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(field, change, words):
    moe = Moe()
    weights = random_weights(256, 128, 32, 3)
    with pytest.raises(ValueError, match=words):
        moe.kernel.prepare(dataclasses.replace(weights, **{field: change(getattr(weights, field))}))
