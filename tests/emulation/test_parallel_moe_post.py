"""fused_moe with mix and post on 2, 4 and 8 emulated ranks: the post is on the sum over ranks, the same bits on every rank, under every schedule.
Oracle: the shards' sum and the hyper-connection in float64."""

import pytest
import torch
from fused_moe_cases import Moe
from parallel_moe_cases import MoeRanks, options, same_bits

from sgl_lowlatency.kernels.fault import FusedMoeFault

WITHHELD_MIX, NO_AWAIT, LOST_TILE, TRANSPOSED_MIX = 44, 40, 39, 42  # dialect::Planted

SHAPES = [  # ranks, their sizes, rows of the launches on one set of workspaces
    (2, {}, (1, 6, 12, 48)),
    (4, {"hidden": 128, "num_experts": 16, "top_k": 2, "grid": 3}, (48, 1, 12)),
    (8, {"num_experts": 16, "top_k": 1, "grid": 1}, (6, 1)),
]


@pytest.mark.parametrize(("num_ranks", "sizes", "rows"), SHAPES)
def test_the_gate(num_ranks, sizes, rows):
    """Launches with streams and without alternate; what out and choices are does not depend on it."""
    ranks = MoeRanks(num_ranks, **sizes)
    for seed, count in enumerate(rows):
        ranks.ranks.emulation.seed = seed
        x, streams = ranks.inputs(count, seed)[0], ranks.streams_of(count, seed)
        ranks.run(x, streams=streams)
        assert ranks.problems(x, streams=streams) == [], count
        outs = ranks.outs
        ranks.run(x)
        assert all(same_bits(a, b) for a, b in zip(ranks.outs, outs, strict=True))


def test_a_group_of_one_rank_gives_the_bits_of_a_kernel_without_ranks():
    ranks = MoeRanks(1)
    alone = Moe(weights=ranks.weights)
    for rows in (9, 1):
        x, streams = ranks.inputs(rows)[0], ranks.streams_of(rows)
        ranks.run(x, streams=streams)
        alone.run(x, streams=streams)
        assert all(same_bits(ranks.posts[0][name], alone.post[name]) for name in alone.post)


def test_a_bug_that_all_ranks_share_is_seen():
    ranks = MoeRanks(2, emulation=options(planted=TRANSPOSED_MIX))
    x, streams = ranks.inputs(6)[0], ranks.streams_of(6)
    ranks.run(x, streams=streams)
    found = ranks.problems(x, streams=streams)
    assert len(found) == 1 and found[0].startswith("MISS streams"), found


def test_a_rank_that_disagrees_on_streams_disturbs_nobody():
    """The mix and the post are a rank's own: what ranks exchange are sums of the MoE."""
    ranks = MoeRanks(2, 128, num_experts=16, top_k=1, max_rows=5, grid=2)
    x, streams = ranks.inputs(5)[0], ranks.streams_of(5)
    ranks.run(x, streams=streams)
    wanted, post = ranks.outs[0], ranks.posts[0]["streams_out"]
    outs, behind = [ranks.empty(5)[0] for _ in range(2)], torch.empty_like(post)
    ranks.ranks.launch(ranks.layers, [{"x": x, "out": outs[0]}, {"x": x, "out": outs[1], "streams": streams, "streams_out": behind}])
    assert all(same_bits(out, wanted) for out in outs) and same_bits(behind, post)


STREAMS = {  # ranks, hidden, blocks, rows of the launches, those with mix and post
    "two": (2, 128, 1, [1] * 5, (0, 2, 3)),
    "two, other rows": (2, 256, 3, [5, 1, 3, 9, 2], (0, 1, 3)),
    "four": (4, 128, 2, [2, 9, 1, 3], (1, 2, 3)),
}


class Stream(MoeRanks):
    """Launches of a group, those in has_streams with mix and post, and what each must leave bit by bit: what ranks launched one by one do, which the
    oracles judge."""

    def __init__(self, name):
        num_ranks, hidden, grid, self.rows, self.has_streams = STREAMS[name]
        super().__init__(num_ranks, hidden, num_experts=16, top_k=1, max_rows=max(self.rows), grid=grid, deadline_s=0.04)
        self.expected = []
        for launch, rows in enumerate(self.rows):
            x = self.inputs(max(self.rows), launch)[0][:rows].contiguous()
            streams = self.streams_of(max(self.rows), launch)[:rows].contiguous() if launch in self.has_streams else None
            self.run(x, streams=streams)
            assert self.problems(x, streams=streams) == []
            self.expected.append(self.outs[0] if streams is None else self.posts[0]["streams_out"])

    def outcome(self, **how):
        return self.stream(self.rows, has_streams=self.has_streams, **how)


@pytest.mark.parametrize("name", STREAMS)
def test_no_race_no_deadlock_and_the_same_bits_under_every_schedule(name):
    stream = Stream(name)
    for seed in range(10):
        report, faults, outs = stream.outcome(seed=seed, starvation=seed % 5 - 1)
        assert (report.status, report.num_races, faults) == ("ok", 0, [None] * stream.num_ranks), (seed, report.message)
        for of_rank in outs:
            assert all(same_bits(out, wanted) for out, wanted in zip(of_rank, stream.expected, strict=True)), seed


def test_what_the_launch_in_front_writes_is_not_touched_before_it_is_over():
    report, _, _ = Stream("two").outcome(planted=NO_AWAIT)
    assert report.status == "misuse" and "before await_previous_launch, in a kernel behind another" in report.message


def test_a_tile_that_one_peer_never_gets_stops_every_rank_and_is_named():
    stream = Stream("two")
    report, faults, _ = stream.outcome(planted=LOST_TILE)
    assert report.status == "trapped" and all(fault is not None for fault in faults)
    assert " for rank 0's part of tile 0 of the experts of layer 0" in faults[1]


def test_a_mix_that_never_comes_stops_every_rank_and_is_named():
    ranks = MoeRanks(2, 128, num_experts=16, top_k=1, max_rows=1, grid=2, deadline_s=0.001, emulation=options(planted=WITHHELD_MIX))
    with pytest.raises(FusedMoeFault) as error:
        ranks.run(ranks.inputs(1)[0], streams=ranks.streams_of(1))
    assert str(error.value).count("fused_moe stopped: rank ") == 2
    assert "of mix, which no block has written" in str(error.value) or "of coefficients, which no block has written" in str(error.value)
