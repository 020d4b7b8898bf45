"""fused_moe's ranks under adversarial schedules: no access that nothing orders, no deadlock, the same bits; planted faults and dead ranks are
named."""

import re

import pytest
from parallel_moe_cases import MoeRanks, options, same_bits
from schedules import UNORDERED_CLEAR

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.fault import FusedMoeFault, describe_moe_fault

NARROW = "scope that does not reach another rank"
WITHHELD_SIGNAL, MISSING_RELEASE, MISSING_ACQUIRE, GPU_SCOPE, FIRST_WORD_IS_FLAG, TWO_PARITIES, LOST_TILE, NO_AWAIT = 3, 34, 35, 36, 37, 38, 39, 40
DEADLINE_S = 0.04

STREAMS = {  # ranks, hidden, blocks, rows of the launches: every parity, and two of them again
    "two": (2, 128, 1, [1] * 5),
    "two, other rows": (2, 256, 3, [5, 1, 3, 9, 2]),
    "four": (4, 128, 1, [1] * 5),
    "four, other rows": (4, 128, 2, [2, 9, 1, 3]),
    "eight": (8, 128, 1, [1] * 4),
}
SEEDS = {"two": 60, "two, other rows": 12, "four": 30, "four, other rows": 8, "eight": 10}


class Stream(MoeRanks):
    """Launches of a group, and what each must leave bit by bit: what ranks launched one by one do, which the oracle judges."""

    def __init__(self, name):
        num_ranks, hidden, grid, self.rows = STREAMS[name]
        super().__init__(num_ranks, hidden, num_experts=16, top_k=1, max_rows=max(self.rows), grid=grid, deadline_s=DEADLINE_S)
        self.expected = []
        for launch, rows in enumerate(self.rows):
            x = self.inputs(max(self.rows), launch)[0][:rows].contiguous()
            self.run(x)
            assert self.problems(x) == []
            self.expected.append(self.outs[0])

    def stream(self, rows=None, **how):
        return super().stream(rows or self.rows, **how)

    def wrong(self, outcome):
        report, faults, outs = outcome
        found = [] if report.status == "ok" else [report.message]
        found += [f"{race.kind} ({race.missing}) in {race.region}" for race in report.races] + [fault for fault in faults if fault is not None]
        for rank, of_rank in enumerate(outs):
            found += [f"wrong bits of rank {rank}, launch {i}" for i, out in enumerate(of_rank) if not same_bits(out, self.expected[i][: len(out)])]
        return found


@pytest.mark.parametrize("name", STREAMS)
def test_no_race_no_deadlock_and_the_same_bits_under_every_schedule(name):
    stream = Stream(name)
    for seed in range(SEEDS[name]):
        how = {"seed": seed, "starvation": seed % 5 - 1}
        assert stream.wrong(stream.stream(**how)) == [], how


def test_ranks_with_other_grids_agree():
    """Words know nothing of blocks."""
    stream = Stream("two, other rows")
    for seed in range(4):
        assert stream.wrong(stream.stream(seed=seed, grids=[1, 4])) == [], seed


@pytest.mark.parametrize("name", ["two", "two, other rows", "four", "eight"])
@pytest.mark.parametrize(("planted", "missing"), [(MISSING_RELEASE, "missing release"), (MISSING_ACQUIRE, "missing acquire"), (GPU_SCOPE, NARROW)])
def test_a_fence_that_is_missing_or_too_narrow_is_named_with_every_seed(name, planted, missing):
    stream = Stream(name)
    for seed in range(4):
        races = stream.stream(seed=seed, planted=planted)[0].races
        clears = [race for race in races if race.kind == UNORDERED_CLEAR]
        assert clears and {race.missing for race in clears} == {missing}, seed
        assert all("symmetric" in race.region and race.first_rank != race.second_rank for race in clears)
        assert {race.kind for race in races} <= {UNORDERED_CLEAR, NARROW}


@pytest.mark.parametrize("name", ["two", "four", "eight"])
def test_a_parity_used_again_one_launch_early_is_found_with_every_seed(name):
    """Nothing orders another rank's words behind the clear of those before."""
    stream = Stream(name)
    for seed in range(8):
        races = stream.stream(seed=seed, planted=TWO_PARITIES)[0].races
        clears = [race for race in races if race.kind == UNORDERED_CLEAR]
        assert clears and {race.missing for race in clears} == {"missing release"}, seed
        assert all("symmetric" in race.region and race.first_rank != race.second_rank for race in clears), seed


@pytest.mark.parametrize("name", ["two", "four"])
def test_a_flag_before_its_data_gives_wrong_sums(name):
    stream, wrong = Stream(name), 0
    for seed in range(6):
        wrong += any("wrong bits" in what for what in stream.wrong(stream.stream(seed=seed, planted=FIRST_WORD_IS_FLAG)))
    assert wrong >= 5


def test_what_the_launch_in_front_writes_is_not_touched_before_it_is_over():
    stream = Stream("two")
    for seed in range(4):
        report, _, _ = stream.stream(seed=seed, planted=NO_AWAIT)
        assert report.status == "misuse" and "before await_previous_launch, in a kernel behind another" in report.message


def require_all_stopped(stream, outcome, but=()):
    """Every rank has trapped with a record of its own; what they say."""
    report, faults, _ = outcome
    live = [rank for rank in range(stream.num_ranks) if rank not in but]
    assert (report.status, report.message) == ("trapped", "trap of rank " + ", ".join(map(str, live)))
    assert [rank for rank, fault in enumerate(faults) if fault is not None] == live
    assert all(faults[rank].startswith(f"fused_moe stopped: rank {rank}, ") for rank in live)
    return [faults[rank] for rank in live]


@pytest.mark.parametrize("name", ["two", "four", "two, other rows", "eight"])
def test_a_tile_that_one_peer_never_gets_stops_every_rank_and_is_named(name):
    """Rank 0's tile 0 does not reach the last rank. It waits in layer 0, the others for it in layer 1: the oldest layer is the cause. Who gives up
    first does so after half of the deadline."""
    stream = Stream(name)
    last = stream.num_ranks - 1
    for seed in range(4):
        outcome = stream.stream(seed=seed, planted=LOST_TILE)
        texts = require_all_stopped(stream, outcome)
        assert " for rank 0's part of tile 0 of the experts of layer 0" in texts[-1], texts
        assert all(f" for rank {last}'s part of tile " in text and text.endswith(" of the experts of layer 1") for text in texts[:-1]), texts
        waits = [float(found) for text in texts for found in re.findall(r" waited ([0-9.]+) s for rank", text)]
        assert waits and all(0.5 * DEADLINE_S <= waited < 0.75 * DEADLINE_S for waited in waits), texts
        assert outcome[0].num_races == 0


@pytest.mark.parametrize("died_at", [0, 1, 3])
@pytest.mark.parametrize("name", ["two", "four", "eight"])
def test_a_dead_rank_stops_every_other_and_is_named(name, died_at):
    stream = Stream(name)
    dead = stream.num_ranks - 1
    for seed in range(2):
        outcome = stream.stream(seed=seed, launches=[died_at if rank == dead else len(stream.rows) for rank in range(stream.num_ranks)])
        for text in require_all_stopped(stream, outcome, but=(dead,)):
            assert f"rank {dead}'s part of tile " in text and f" of the experts of layer {died_at}" in text, text


def test_a_slow_rank_is_waited_for():
    stream, slower = Stream("four"), 0
    for seed in range(3):
        outcome = stream.stream(seed=seed, slowness=[10 if rank == 1 else 1 for rank in range(4)])
        assert stream.wrong(outcome) == []
        slower += outcome[0].virtual_ns > 2 * stream.stream(seed=seed)[0].virtual_ns
    assert slower == 3


def test_a_rank_that_comes_too_late_finds_that_the_others_have_given_up():
    """It ends at its begin, having pushed and stored nothing."""
    stream = Stream("four")
    for seed in range(3):
        require_all_stopped(stream, stream.stream(seed=seed, launches=[0 if rank == 1 else 5 for rank in range(4)]), but=(1,))
        late, out = stream.kernels[1], stream.empty(1)[0]
        report = _C.parallel_moe_emulate([[late.params(stream.layers[1], stream.inputs(1)[0], out)]], [stream.grid], seed=seed)
        text = describe_moe_fault(late.fault())
        assert report.status == "trapped"
        assert re.search(r": rank [023] gave up waiting for rank 1's part of tile \d of the experts of layer 0$", text), text
        assert bool(out.isnan().all())


def test_ranks_that_disagree_on_rows_stop():
    """Rank 1 launches one row where the others have two: what it does not push is missing."""
    stream = Stream("four, other rows")
    for seed in range(3):
        texts = require_all_stopped(stream, stream.stream(rows=[2, 2], seed=seed, rows_of={1: 1}))
        assert any("for rank 1's part of tile" in text for text in texts), texts


def test_a_rank_that_stops_by_itself_tells_the_others():
    """Activations of tile 0 of the shared expert are withheld on both ranks, but rank 0 finds its own written: it waits for rank 1, whose deadline
    passes."""
    for seed in range(4):
        how = options(seed=seed, planted=WITHHELD_SIGNAL)
        ranks = MoeRanks(2, 128, num_experts=16, top_k=1, max_rows=1, grid=2, deadline_s=1000.0, emulation=how)
        ranks.layers[1].params.deadline_ns = 1_000_000
        at = _C.moe_handover(_C.abi.MoeGeometry(128, 128, 16, 1), 1).activation
        ranks.kernels[0]._workspace[at : at + 8] = 0
        with pytest.raises(FusedMoeFault) as error:
            ranks.run(ranks.inputs(1)[0])
        first, second = str(error.value).split("; ")
        waited = r", while it waited for rank 1's part of tile \d of the experts of layer 5"
        assert re.fullmatch(rf"fused_moe stopped: rank 0, SM ., block .: rank 1 stopped by itself{waited}", first), first
        assert re.match(r"fused_moe stopped: rank 1, .* waited 0\.00 s for word \d+ of (activation|output), which no block", second), second
        assert ranks.ranks.last_report.virtual_ns < 100e9


def test_a_launch_behind_an_abort_ends_at_once():
    ranks = MoeRanks(2, 128, num_experts=16, top_k=1, max_rows=1, grid=2, deadline_s=1000.0, emulation=options(planted=LOST_TILE))
    x, _ = ranks.inputs(1)
    with pytest.raises(FusedMoeFault, match="for rank 0's part of tile 0 of the experts of layer 5"):
        ranks.run(x)
    with pytest.raises(FusedMoeFault, match="an earlier launch failed: fused_moe stopped: rank 1, "):
        ranks.run(x)
    outs = [ranks.empty(1)[0] for _ in ranks.kernels]
    params = [kernel.params(layer, x, out) for kernel, layer, out in zip(ranks.kernels, ranks.layers, outs, strict=True)]
    for kernel in ranks.kernels:
        kernel._host._owner[:48] = 0  # as a new process would find it, which maps the same workspaces
        kernel._state.zero_()
        kernel._workspace.fill_(-1)
    report = _C.parallel_moe_emulate([[one] for one in params], [2, 2])
    assert report.status == "trapped" and report.virtual_ns < 100e9
    texts = ranks.ranks.faults()
    assert len(texts) == 2 and all("gave up waiting for rank 0's part of tile 0 of the experts" in text for text in texts)
    assert all(out.isnan().all() for out in outs)
