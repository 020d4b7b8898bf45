"""attention_out of several ranks in emulation: GPUs with weak memory whose shares add up to the whole layer, the same bits on each; every planted fault
is found, and a rank that is missing is named.

Oracle: reference/attention_out.py of the whole layer. A rank is a GPU with a stream of launches; it shares with others its symmetric workspace alone.
"""

import functools
import re

import pytest
import torch
from attention_out_cases import Layer
from parallel_attention_out_cases import SPLIT, TINY, Group, Inputs, Stream, same_bits
from schedules import STARVATION, UNORDERED_CLEAR

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.attention_out import AttentionOutSizes
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import AttentionOutFault

MISSING_RELEASE, MISSING_ACQUIRE, GPU_SCOPE, FIRST_WORD_IS_FLAG, TWO_PARITIES, LOST_TILE, NO_AWAIT = 34, 35, 36, 37, 38, 39, 40  # dialect::Planted
WITHHELD_SIGNAL = 3
NARROW = "scope that does not reach another rank"

SHAPES = [  # num_ranks, the whole layer's sizes, grid
    (1, TINY, 2), (2, TINY, 3), (4, TINY, 1), (8, TINY, 2),
    (2, SPLIT, 2), (4, SPLIT, 3),
    (2, AttentionOutSizes(5120, 2, 64, 16, 2, 128), 3),  # DeepSeek-V4.1's width
]  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "sizes", "grid"), SHAPES)
def test_ranks_add_up_to_the_whole_layer(num_ranks, sizes, grid):
    """Rows change from launch to launch: what one leaves in a parity must not be taken for the words of a later one."""
    group = Group(num_ranks, sizes, grid=grid)
    for seed, rows in enumerate((1, 6, 8, 12, 48, 1, 2) if sizes is TINY else (20, 1, 9, 48) if sizes is SPLIT else (2, 1)):
        group.virtual.emulation.seed = seed
        inputs = Inputs(sizes, rows, seed)
        assert group.problems(inputs, group.run(inputs)) == [], rows


def test_a_group_of_one_has_the_bits_of_a_rank_alone():
    alone, group = Layer(TINY, grid=2), Group(1, grid=2)
    for rows in (1, 9):
        inputs = Inputs(TINY, rows, rows)
        (arguments,) = group.run(inputs)
        alone.run(inputs.x, inputs.positions, inputs.streams)
        assert torch.equal(arguments["streams_out"], alone.streams) and torch.equal(arguments["out"], alone.out)


def test_launches_repeat_bit_by_bit():
    group, inputs = Group(4, grid=2), Inputs(TINY, 6, 1)
    first = group.run(inputs)
    for seed in range(4):
        group.virtual.emulation.seed = seed
        assert all(same_bits(one, other) for one, other in zip(group.run(inputs), first, strict=True)), seed


STREAMS = {  # num_ranks, rows of the launches, grid. Five launches use every parity and two of them again
    "two": (2, (1, 2, 1, 2, 1), 2),
    "rows": (2, (6, 1, 48, 12, 8), 1),
    "four": (4, (1, 2, 1, 1), 1),
    "eight": (8, (1, 1, 1, 1), 1),
}


@functools.cache
def stream_of(name):
    return Stream(*STREAMS[name])


@pytest.mark.parametrize("name", STREAMS)
def test_no_race_no_deadlock_and_the_same_bits_under_every_schedule(name):
    stream = stream_of(name)
    for seed, starvation in enumerate([-1, *STARVATION.values()]):
        assert stream.problems(*stream.run(seed=seed, starvation=starvation)) == [], seed


@pytest.mark.parametrize("name", ["two", "four", "eight"])
@pytest.mark.parametrize(("planted", "missing"), [(MISSING_RELEASE, "missing release"), (MISSING_ACQUIRE, "missing acquire"), (GPU_SCOPE, NARROW)])
def test_a_fence_that_is_missing_or_too_narrow_is_named_with_every_seed(name, planted, missing):
    stream = stream_of(name)
    for seed in range(2):
        report, _, _ = stream.run(seed=seed, planted=planted)
        clears = [race for race in report.races if race.kind == UNORDERED_CLEAR]
        assert clears and {race.missing for race in clears} == {missing}, seed
        assert all(race.first_rank != race.second_rank and "symmetric workspace" in race.region for race in report.races)
        assert {race.kind for race in report.races} <= {UNORDERED_CLEAR, NARROW}


@pytest.mark.parametrize("name", ["two", "four", "eight"])
def test_a_parity_used_again_one_launch_early_is_found_with_every_seed(name):
    stream = stream_of(name)
    for seed in range(2):
        clears = [race for race in stream.run(seed=seed, planted=TWO_PARITIES)[0].races if race.kind == UNORDERED_CLEAR]
        assert clears and all("symmetric workspace" in race.region for race in clears), seed


@pytest.mark.parametrize("name", ["two", "four", "eight"])
def test_a_flag_before_its_data_gives_wrong_sums(name):
    stream = stream_of(name)
    for seed in range(2):
        assert any("wrong bits" in what for what in stream.problems(*stream.run(seed=seed, planted=FIRST_WORD_IS_FLAG))), seed


def test_a_launch_that_does_not_wait_for_the_one_in_front_is_found_with_every_seed():
    for seed in range(4):
        report, _, _ = stream_of("two").run(seed=seed, planted=NO_AWAIT)
        assert report.status == "misuse" and "before await_previous_launch, in a kernel behind another" in report.message


def require_all_stopped(stream, report, faults, but=()):
    """Every rank has trapped with a record of its own; what they say."""
    live = [rank for rank in range(stream.num_ranks) if rank not in but]
    assert (report.status, report.message) == ("trapped", "trap of rank " + ", ".join(map(str, live)))
    assert [int(re.match(r"attention_out stopped: rank (\d), ", text)[1]) for text in faults] == live
    return faults


@pytest.mark.parametrize("name", ["two", "four", "eight"])
def test_a_tile_that_one_peer_never_gets_stops_every_rank_and_is_named(name):
    """Rank 0's tile 0 does not reach the last rank."""
    stream = stream_of(name)
    for seed in range(2):
        report, faults, _ = stream.run(seed=seed, planted=LOST_TILE)
        texts = require_all_stopped(stream, report, faults)
        assert "for rank 0's part of tile 0 of wo_b of layer 0" in texts[-1], texts
        assert report.num_races == 0


@pytest.mark.parametrize("died_at", [0, 1, 3])
@pytest.mark.parametrize("name", ["two", "four", "eight"])
def test_a_dead_rank_stops_every_other_within_the_deadline_and_is_named(name, died_at):
    """The last rank ends before launch `died_at`. Who gave up had half of the deadline, and the others hear of it."""
    stream, deadline_s = stream_of(name), 0.05
    dead = stream.num_ranks - 1
    report, faults, _ = stream.run(seed=died_at, deadline_s=deadline_s, launches=[died_at if rank == dead else 5 for rank in range(stream.num_ranks)])
    texts = require_all_stopped(stream, report, faults, but=(dead,))
    assert all(f"rank {dead}'s part of tile " in text and f" of wo_b of layer {died_at}" in text for text in texts), texts
    waited = [float(found[1]) for text in texts if (found := re.search(r"waited ([0-9.]+) s for rank ", text))]
    assert waited and all(deadline_s / 2 <= seconds + 0.005 and seconds < deadline_s for seconds in waited), texts


@pytest.mark.parametrize("name", ["two", "four"])
def test_a_late_rank_is_waited_for(name):
    stream = stream_of(name)
    for seed in range(2):
        outcome = stream.run(seed=seed, slowness=[10 if rank == 1 else 1 for rank in range(stream.num_ranks)])
        assert stream.problems(*outcome) == []
        assert outcome[0].virtual_ns > 2 * stream.run(seed=seed)[0].virtual_ns


def test_a_rank_that_stops_by_itself_tells_the_others():
    """A position without frequencies on rank 1 alone: rank 0 does not wait for its deadline."""
    group = Group(2, deadline_s=1000.0)
    arguments = group.arguments(Inputs(TINY, 3, 0))
    arguments[1]["positions"] = arguments[1]["positions"].clone()
    arguments[1]["positions"][2] = 97
    with pytest.raises(AttentionOutFault) as error:
        group.virtual.launch(group.layers, arguments)
    first, second = str(error.value).split("; ")
    assert "rank 0, " in first and ": rank 1 stopped by itself in layer 0" in first
    assert "rank 1, " in second and "row 2 has position 97, outside 0..96" in second
    assert group.virtual.last_report.virtual_ns < 100e9


def test_a_word_of_its_own_blocks_that_never_comes_ends_all_ranks():
    group = Group(2, emulation=EmulationOptions(planted=WITHHELD_SIGNAL), deadline_s=0.05)
    with pytest.raises(AttentionOutFault, match=r"rank 0, .* for word \d+ of latent.*; attention_out stopped: rank 1, .* for word \d+ of latent"):
        group.run(Inputs(TINY, 3, 0))


def test_a_launch_behind_an_abort_ends_at_its_begin():
    """On rank 0 too, which had all that it waited for."""
    group = Group(2, emulation=EmulationOptions(planted=LOST_TILE), deadline_s=1000.0)
    inputs = Inputs(TINY, 2, 0)
    with pytest.raises(AttentionOutFault, match="rank 0's part of tile 0 of wo_b of layer 7"):
        group.run(inputs)
    with pytest.raises(AttentionOutFault, match="an earlier launch failed: attention_out stopped: rank 1, "):
        group.run(inputs)
    for one in group.virtual.ranks:
        one._host._owner[:48] = 0  # as a new process would find it, which maps the same workspaces
    group.virtual.emulation.planted = 0
    report, faults, _ = group.stream([inputs])
    assert report.status == "trapped" and report.virtual_ns < 100e9 and len(faults) == 2
    assert all(text.endswith("rank 1 gave up waiting for rank 0's part of tile 0 of wo_b of layer 7") for text in faults), faults


def test_a_rank_whose_peer_never_launches_is_ended_by_its_deadline():
    """Launched by itself, as on a GPU of its own."""
    group = Group(2, deadline_s=0.1)
    rank, layer, arguments = group.virtual.ranks[0], group.layers[0], group.arguments(Inputs(TINY, 2, 0))[0]
    words = r"attention_out stopped: rank 0, SM ., block . waited 0\.0\d s for rank 1's part of tile \d of wo_b of layer 7"
    with pytest.raises(AttentionOutFault, match=words):
        rank.launch(layer, **arguments)
    with pytest.raises(AttentionOutFault, match="an earlier launch failed: attention_out stopped: rank 0"):
        rank.launch(layer, **arguments)


def test_ranks_that_disagree_on_rows_stop():
    group = Group(2, deadline_s=0.05)
    both = [group.arguments(Inputs(TINY, rows, 0)) for rows in (2, 1)]
    filled = [one.fill(group.layers[rank], **both[rank][rank]) for rank, one in enumerate(group.virtual.ranks)]
    report = group.virtual.emulate([[params] for params, _ in filled], [outputs for _, outputs in filled])
    assert report.status == "trapped" and "waited 0.0" in group.virtual.faults()[0] and "for rank 1's part of tile" in group.virtual.faults()[0]


def test_what_launches_leave_in_the_workspaces():
    """Of the parities the newest launch's alone is written, all of its rows and no others, and the state says how many rows that are."""
    group, max_rows = Group(2, max_rows=20), 20
    for launch, rows in enumerate((16, 3, 20, 1, 9, 2)):
        group.run(Inputs(TINY, rows, launch))
        for one in group.virtual.ranks:
            mapped = one.workspaces
            memory = mapped.owner.owner[mapped.rank]
            state = memory[mapped.layout.state :]
            assert state[_C.abi.kLaunchesOffset :][:8].view(torch.int64).item() == launch + 1
            used_rows = state[_C.abi.kUsedRowsOffset :][: 4 * _C.abi.kParities].view(torch.int32).tolist()
            assert used_rows == [rows if parity == launch % 3 else 0 for parity in range(3)]
            words = memory[mapped.layout.tiles :].view(torch.int32).view(_C.abi.kParities, 2, TINY.hidden // 16, max_rows, 16)
            for parity, of_parity in enumerate(words != -1):
                assert bool(of_parity[:, :, :rows].all()) if parity == launch % 3 else not bool(of_parity.any()), (launch, parity)
                assert not bool(of_parity[:, :, rows:].any())


def test_the_launch_refuses_what_the_front_never_passes():
    group = Group(2, max_rows=4)
    params, _ = group.virtual.ranks[0].fill(group.layers[0], **group.arguments(Inputs(TINY, 4, 0))[0])

    def refusal(**fields):
        changed = _C.abi.ParallelAttentionOutParams(params)
        for name, value in fields.items():
            setattr(changed, name, value)
        with pytest.raises(ValueError) as error:
            _C.parallel_attention_out_emulate([[changed]], group.virtual.grid)
        return str(error.value)

    assert refusal(symmetric=_C.symmetric_layout(9, 4, 128)) == "attention_out: num_ranks 9 is outside 1..8"
    assert refusal(rank=2) == "attention_out: rank 2 is not below num_ranks 2"
    assert refusal(symmetric=_C.symmetric_layout(2, 4, 256)) == "attention_out: the workspaces have hidden 256, the layer 128"
    assert refusal(symmetric=_C.symmetric_layout(2, 3, 128)) == "attention_out: rows 4 is above 3, the most of the kernel and of its workspaces"
    assert refusal(symmetric=_C.symmetric_layout(2, 4, 128, 4)) == "attention_out: symmetric is not symmetric_layout of num_ranks, max_rows, hidden and 3"
    unmapped = "attention_out: the address of the workspace of rank 2 is null or not a multiple of 128"
    assert refusal(symmetric=_C.symmetric_layout(3, 4, 128)) == unmapped
    assert refusal(layer=65536) == "attention_out: layer 65536 is outside 0..65535"
    assert refusal(deadline_ns=0) == "attention_out: deadline_ns is 0"
