"""k1 and k2 on several emulated GPUs: pushed tiles at system scope, sums in rank order, and what stops all of them.

Oracle: the float64 decoder (reference/); what a fault says is worked out by hand. Five layers use every parity of the workspaces and two again.
"""

import pytest
import torch
from monokernel_cases import Group, gate, moe_gate, tiny, tiny_moe

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.fault import MonokernelFault
from sgl_lowlatency.reference.inputs import random_step, random_weights

MISSING_RELEASE, MISSING_ACQUIRE, GPU_SCOPE, FIRST_WORD_IS_FLAG, LOST_TILE, MISSING_STORE_WAIT = 34, 35, 36, 37, 39, 41  # dialect::Planted
NARROW, CLEAR = "scope that does not reach another rank", "word used with no order after its clear"
DEEP = tiny(5, 64, 2, 2, 64, 64)


@pytest.mark.parametrize(
    ("num_ranks", "isa", "batches"), [(2, "gfx942", [[5], [70, 9, 64, 1, 33, 2], [7] * 16]), (4, "gfx950", [[5], [9, 70]]), (8, "gfx942", [[9, 33]])]
)
def test_every_rank_has_the_oracles_stream(num_ranks, isa, batches):
    g = tiny(1, 64, num_ranks, num_ranks, 64, 32 * num_ranks)
    steps = [random_step(g, lengths, seed=len(lengths)) for lengths in batches]
    steps.append(random_step(g, [30], seed=5, rows_per_request=6, lengths_are_prefix=True))
    group = Group(g, random_weights(g, seed=1), steps, isa=isa, grid=2, num_ranks=num_ranks)
    for seed, step in enumerate(steps):
        report = gate(g, group.weights, step, group.run(step, seed=seed))
        assert report.passed, str(report)
        assert group.report.num_races == 0


def test_experts_of_several_ranks():
    g = tiny_moe(2, 128, 4, 2, 64, 16, 4, 128)
    step = random_step(g, [70, 9, 64, 1, 33, 2], seed=2)
    group = Group(g, random_weights(g, seed=2), [step], grid=2, num_ranks=2)
    ours = group.run(step)
    report = moe_gate(g, group.weights, step, ours, group.logits(step.rows))
    assert report.passed, str(report)
    assert group.report.num_races == 0


def test_ranks_of_any_pace_agree():
    """Under every schedule, bit by bit, a slow rank among them."""
    step = random_step(DEEP, [20, 3], seed=3)
    group = Group(DEEP, random_weights(DEEP, seed=3), [step], grid=2, num_ranks=2)
    first = group.run(step)
    for seed in range(1, 7):
        again = group.run(step, seed=seed, slowness=[1, seed])
        assert group.report.num_races == 0, f"seed {seed}"
        assert torch.equal(again.hidden, first.hidden), f"seed {seed}"


@pytest.mark.parametrize(
    ("planted", "missing"),
    [(MISSING_RELEASE, "missing release"), (MISSING_ACQUIRE, "missing acquire"), (GPU_SCOPE, NARROW)],
    ids=["missing release", "missing acquire", "agent scope"],
)
def test_a_fence_that_is_missing_or_too_narrow_is_named_with_every_seed(planted, missing):
    step = random_step(DEEP, [20, 3], seed=4)
    weights = random_weights(DEEP, seed=4)
    for seed in range(3):
        group = Group(DEEP, weights, [step], grid=2, num_ranks=2)
        group.run(step, seed=seed, planted=planted)
        clears = [race for race in group.report.races if race.kind == CLEAR]
        assert clears and {race.missing for race in clears} == {missing}, f"seed {seed}"
        assert all(race.first_rank != race.second_rank for race in clears)


def test_a_release_that_waits_for_its_own_wave_alone_is_found_with_every_seed():
    step = random_step(DEEP, [20], seed=5)
    weights = random_weights(DEEP, seed=5)
    for seed in range(3):
        group = Group(DEEP, weights, [step], grid=2)
        group.run(step, seed=seed, planted=MISSING_STORE_WAIT)
        assert "write overtakes read" in {race.kind for race in group.report.races}, f"seed {seed}"


def test_a_flag_before_its_data_gives_wrong_streams():
    step = random_step(DEEP, [20, 3], seed=6)
    weights = random_weights(DEEP, seed=6)
    for seed in range(3):
        group = Group(DEEP, weights, [step], grid=2, num_ranks=2)
        try:
            ours = group.run(step, seed=seed, planted=FIRST_WORD_IS_FLAG)
        except AssertionError as error:
            assert "has another stream" in str(error)
        else:
            assert not gate(DEEP, weights, step, ours).passed, f"seed {seed}"


def records(group):
    """By rank, (kind, awaited rank or edge, layer) of the records left."""
    kinds = {value: name for name, value in _C.abi.kFaultKinds.items()}
    return [None if (f := rank.fault()) is None else (kinds[f.kind], f.edge, f.layer) for rank in group.ranks]


def test_a_lost_tile_stops_every_rank_and_is_named():
    """Rank 0's tile 0 never reaches the last rank, which waits for it in vain, while the others wait for what it has not made."""
    g = tiny(2, 64, 3, 3, 64, 96)
    step = random_step(g, [20, 3], seed=7)
    weights = random_weights(g, seed=7)
    for seed in range(4):
        group = Group(g, weights, [step], grid=2, num_ranks=3, deadline_s=0.02)
        with pytest.raises(MonokernelFault, match=r"rank 0's part of tile 0 of layer 0"):
            group.run(step, seed=seed, planted=LOST_TILE)
        found = records(group)
        assert {record[0] for record in found} <= {"peer_tile", "peer_abort"} and "peer_tile" in {record[0] for record in found}, found
        assert all(rank.executed() == {} for rank in group.ranks)


def test_a_rank_that_never_comes_is_named_by_the_others():
    step = random_step(DEEP, [20], seed=8)
    group = Group(DEEP, random_weights(DEEP, seed=8), [step], grid=2, num_ranks=2, deadline_s=0.02)
    with pytest.raises(MonokernelFault, match=r"waited 0\.\d+ s for rank 1's part of tile \d+ of layer 0"):
        group.run(step, live_ranks=1)
    assert records(group)[1] is None


def test_ranks_that_were_stopped_stay_stopped():
    """The next launch of a rank whose abort word is raised ends at once."""
    step = random_step(DEEP, [20], seed=9)
    group = Group(DEEP, random_weights(DEEP, seed=9), [step], grid=2, num_ranks=2, deadline_s=0.02)
    with pytest.raises(MonokernelFault):
        group.run(step, planted=LOST_TILE)
    for rank in group.ranks:
        rank._host._owner.zero_()  # the records are read
    with pytest.raises(MonokernelFault, match="gave up waiting"):
        group.run(step)
