"""epilogue_multicast on emulated ranks under adversarial schedules: no wrong sum, no race, no deadlock; planted faults are caught and named.

Oracle: the sum in float64 (epilogue_cases.py). `pytest --epilogue-schedules N` runs N schedules in all instead of 10 000.
"""

import pytest
import torch
from epilogue_cases import EPS, Group, integers, oracle

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.epilogue_multicast import EpilogueMulticast, RankTensors
from sgl_lowlatency.kernels.fault import EpilogueMulticastFault, describe_fault

NARROW = "scope that does not reach another rank"
CLEAR = "word used with no order after its clear"
MISSING_RELEASE, MISSING_ACQUIRE, GPU_SCOPE, FIRST_WORD_IS_FLAG, TWO_PARITIES, LOST_TILE, NO_AWAIT = 34, 35, 36, 37, 38, 39, 40  # dialect::Planted

# Per mille of all schedules, ranks, rows of the launches, blocks a rank. Five launches use every parity and two of them again.
SHAPES = [
    (350, 4, [1] * 5, 1),
    (100, 4, [2, 1, 3, 2, 1], [1, 2, 2, 1]),
    (50, 4, [9, 16, 1, 4], 1),
    (450, 8, [1] * 4, 1),
    (50, 8, [1, 2, 1, 2, 1], [2, 1, 1, 2, 1, 1, 2, 1]),
]
CHUNKS = 4  # tests of one shape, for the workers of a parallel run


def shape_id(value):
    return "-".join(map(str, value)) if isinstance(value, list) else None


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize(("share", "num_ranks", "rows", "blocks"), SHAPES, ids=shape_id)
def test_sums_are_right_under_every_schedule(share, num_ranks, rows, blocks, chunk, epilogue_schedules):
    group = Group(num_ranks, rows, blocks=blocks, seed=chunk)
    count = epilogue_schedules * share // 1000 // CHUNKS
    assert count > 0
    for seed in range(chunk * 1_000_000, chunk * 1_000_000 + count):
        found = group.problems(group.run(seed=seed))
        assert found == [], f"seed {seed}: {found}"


@pytest.mark.parametrize("rows", [1, 8, 9, 16])
@pytest.mark.parametrize(("hidden", "k", "blocks"), [(64, 64, 3), (2064, 128, 2), (48, 1600, 2)])
def test_wider_shapes(rows, hidden, k, blocks):
    """A thread with two vectors, warps that add up, a ring that goes round."""
    group = Group(2, [rows, rows], hidden=hidden, k=k, blocks=blocks)
    assert group.problems(group.run(seed=rows)) == []


def test_a_panel_that_holds_a_part_of_k():
    group = Group(2, [16, 16], hidden=48, k=8192, blocks=1, seed=1)
    assert group.problems(group.run(seed=3)) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 7])
def test_other_numbers_of_ranks(num_ranks):
    group = Group(num_ranks, [1, 3, 2, 1, 2])
    for seed in range(6):
        assert group.problems(group.run(seed=seed)) == []


def test_multicast_stores_give_the_same_bits():
    """What the NVLink form does, one target after the other."""
    plain, multicast = Group(4, [1, 2, 1, 3, 2]), Group(4, [1, 2, 1, 3, 2], multicast=True)
    for seed in range(20):
        outcome = multicast.run(seed=seed)
        assert multicast.problems(outcome) == []
        for ours, theirs in zip(outcome.normed, plain.run(seed=seed + 100).normed, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize(
    ("planted", "missing"),
    [(MISSING_RELEASE, "missing release"), (MISSING_ACQUIRE, "missing acquire"), (GPU_SCOPE, NARROW)],
    ids=["missing release", "missing acquire", "gpu scope"],
)
def test_a_fence_that_is_missing_or_too_narrow_is_named_with_every_seed(num_ranks, planted, missing):
    group = Group(num_ranks, [1] * 5)
    for seed in range(10):
        races = group.run(seed=seed, planted=planted).report.races
        clears = [race for race in races if race.kind == CLEAR]
        assert clears and {race.missing for race in clears} == {missing}, f"seed {seed}"
        assert all(race.first_rank != race.second_rank for race in clears)
        assert {race.kind for race in races} <= {CLEAR, NARROW}


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_flag_before_its_data_gives_wrong_sums(num_ranks):
    group = Group(num_ranks, [1] * 5)
    for seed in range(10):
        assert any("wrong sum" in what for what in group.problems(group.run(seed=seed, planted=FIRST_WORD_IS_FLAG))), f"seed {seed}"


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_parity_used_again_one_launch_early_is_found_with_every_seed(num_ranks):
    """Nothing orders another rank's words behind the clear of those before; lost ones end in a deadline."""
    group, stopped = Group(num_ranks, [1] * 5), 0
    for seed in range(20):
        outcome = group.run(seed=seed, planted=TWO_PARITIES)
        clears = [race for race in outcome.report.races if race.kind == CLEAR]
        assert clears and {race.missing for race in clears} == {"missing release"}, f"seed {seed}"
        stopped += outcome.report.status == "trapped"
    assert stopped > 0, "no seed ever lost a word"


def test_a_product_that_does_not_wait_for_the_launch_in_front_is_found_with_every_seed():
    group = Group(4, [1] * 5)
    for seed in range(10):
        report = group.run(seed=seed, planted=NO_AWAIT).report
        assert report.status == "misuse" and "before await_previous_launch, in a kernel behind another" in report.message


def assert_all_stopped(group, outcome, but=()):
    """Every rank has trapped with a record."""
    live = [rank for rank in range(group.num_ranks) if rank not in but]
    assert (outcome.report.status, outcome.report.message) == ("trapped", "trap of rank " + ", ".join(map(str, live)))
    assert [rank for rank, fault in enumerate(outcome.faults) if fault is not None] == live
    return [describe_fault(outcome.faults[rank], "epilogue_multicast") for rank in live]


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_lost_tile_stops_every_rank_and_is_named(num_ranks):
    group = Group(num_ranks, [1] * 5)
    for seed in range(10):
        outcome = group.run(seed=seed, planted=LOST_TILE)
        texts = assert_all_stopped(group, outcome)
        assert "waited" in texts[-1] and "for rank 0's part of tile 0 of layer 0" in texts[-1], texts[-1]
        assert outcome.report.num_races == 0
        assert all(text.startswith(f"epilogue_multicast stopped: rank {rank}, ") for rank, text in enumerate(texts))


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("died_at", [0, 1, 3])
def test_a_dead_rank_stops_every_other_and_is_named(num_ranks, died_at):
    """Rank 2 ends before launch `died_at`."""
    group = Group(num_ranks, [1] * 5)
    for seed in range(6):
        outcome = group.run(seed=seed, launches=[died_at if rank == 2 else 5 for rank in range(num_ranks)])
        for text in assert_all_stopped(group, outcome, but=(2,)):
            assert "for rank 2's part of tile " in text and f" of layer {died_at}" in text, text


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_slow_rank_is_waited_for(num_ranks):
    group, slower = Group(num_ranks, [1] * 5), 0
    for seed in range(6):
        outcome = group.run(seed=seed, slowness=[10 if rank == 1 else 1 for rank in range(num_ranks)])
        assert group.problems(outcome) == []
        slower += outcome.report.virtual_ns > 2 * group.run(seed=seed).report.virtual_ns
    assert slower == 6


def test_ranks_that_disagree_on_rows_stop():
    """Rank 1 launches one row where the others have two: what it does not push is missing."""
    group = Group(4, [2, 2])
    for seed in range(6):
        texts = assert_all_stopped(group, group.run(seed=seed, rows_of={1: 1}))
        assert any("for rank 1's part of tile" in text for text in texts)


def virtual_step(num_ranks, rows, hidden=64, k=128, **options):
    generator = torch.Generator().manual_seed(rows)
    weights = [integers(generator, hidden, k) for _ in range(num_ranks)]
    norm_weight = integers(generator, hidden)
    step = EpilogueMulticast(weights, norm_weight, blocks_per_rank=2, deadline_s=0.05, virtual_ranks=num_ranks, rms_eps=EPS, **options)
    residual = integers(generator, rows, hidden)
    live = range(step.num_ranks)
    tensors = [RankTensors(integers(generator, rows, k), residual, torch.zeros_like(residual), torch.zeros_like(residual)) for _ in live]
    return step, tensors, weights, norm_weight


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 6, 8, 16])
def test_virtual_ranks_of_one_launch(num_ranks, rows):
    step, tensors, weights, norm_weight = virtual_step(num_ranks, rows, emulation=EmulationOptions(seed=rows))
    wanted, wanted_normed = oracle([t.input for t in tensors], weights, tensors[0].residual, norm_weight)
    for layer in range(4):
        for one in tensors:
            one.sum.fill_(float("nan"))
            one.normed.fill_(float("nan"))
        step.run(tensors, layer=layer)
        for one in tensors:
            assert torch.equal(one.sum, wanted.to(torch.bfloat16)) and torch.equal(one.normed, tensors[0].normed)
            torch.testing.assert_close(one.normed.double(), wanted_normed, rtol=2**-8, atol=1e-6)


def test_a_virtual_rank_that_is_dead_is_named():
    step, tensors, _, _ = virtual_step(4, 2, live_ranks=3)
    with pytest.raises(EpilogueMulticastFault, match=r"waited 0\.0\d s for rank 3's part of tile \d of layer 7"):
        step.run(tensors, layer=7)
    with pytest.raises(EpilogueMulticastFault, match="an earlier launch failed: epilogue_multicast stopped"):
        step.run(tensors, layer=7)


def test_the_launch_refuses_what_the_front_never_passes():
    step, tensors, _, _ = virtual_step(2, 4)

    def refusal(**fields):
        params = step.params(tensors)
        for name, value in fields.items():
            setattr(params, name, value)
        with pytest.raises(ValueError) as error:
            _C.epilogue_multicast_emulate([[params]])
        return str(error.value)

    assert refusal(at=_C.symmetric_layout(9, 16, 64)) == "epilogue_multicast: num_ranks 9 is outside 1..8"
    assert refusal(at=_C.symmetric_layout(2, 16, 40)) == "epilogue_multicast: hidden 40 is not a multiple of 16 up to 8192"
    assert refusal(at=_C.symmetric_layout(2, 3, 64)) == "epilogue_multicast: rows 4 is outside 1..3"
    assert refusal(at=_C.symmetric_layout(2, 16, 80)) == "epilogue_multicast: num_tiles is not hidden / 16"
    assert refusal(at=_C.symmetric_layout(3, 16, 64)) == "epilogue_multicast: the address of the workspace of rank 2 is null or not a multiple of 16"
    assert refusal(ranks_in_launch=3) == "epilogue_multicast: ranks 0..2 are not among the 2"
    assert refusal(blocks_per_rank=0) == "epilogue_multicast: blocks_per_rank 0 is out of range"
    assert refusal(layer=65536) == "epilogue_multicast: layer 65536 is outside 0..65535"
    with pytest.raises(ValueError, match="^emulation: slowness must be 1 or more$"):
        _C.epilogue_multicast_emulate([[step.params(tensors)]], slowness=[0])
    assert refusal(norm_weight=0) == "epilogue_multicast: the address of norm_weight is null or not a multiple of 16"
