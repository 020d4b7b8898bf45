"""Tensor-parallel decode_step in emulation: ranks of several GPUs with weak memory add up to the unsharded oracle's step, and every fault is found.

A rank is a GPU with a stream of launches; what it shares with others is its workspace alone.
"""

import pytest
import torch
from decode_step_cases import MIXED, gate, same_bits
from moe_cases import MoeRun, choices, moe_gate
from parallel_cases import RankRunner, same_streams
from schedules import CLEAR_OVERTAKES, STARVATION, UNORDERED_CLEAR

from sgl_lowlatency import _C
from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.kernels.fault import DecodeStepFault
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference.inputs import random_step, random_weights

MISSING_FENCE, GPU_SCOPE, FIRST_WORD_IS_FLAG, TWO_GENERATIONS, LOST_TILE = 1, 36, 37, 38, 39  # dialect::Planted
NO_FIRST_FENCE, NO_LAST_FENCE = 34, 35
NARROW = "scope that does not reach another rank"


def tiny(num_layers, hidden, num_q_heads, num_kv_heads, head_dim, intermediate, vocab=500):
    return Geometry(num_layers, hidden, num_q_heads, num_kv_heads, head_dim, intermediate, vocab, 8192, 1e-6, False)


WHOLE = {  # shapes whose shares meet what a rank's step meets
    "narrow": tiny(3, 256, 8, 8, 64, 512),  # one head a rank of eight, K of a chunk
    "wide": tiny(2, 1088, 16, 8, 128, 5120),  # of two ranks K of two, three and five stages, some with a rest
    "group5": tiny(2, 320, 40, 8, 64, 512),
}
FP8 = tiny(2, 256, 8, 8, 128, 1024)
MOE = Geometry(2, 256, 8, 4, 64, 0, 500, 8192, 1e-6, False, num_experts=32, top_k=4, moe_intermediate=256, norm_topk_prob=True)


def least(num_ranks, num_layers):
    """The smallest model whose ranks have a head and a chunk of channels each."""
    return tiny(num_layers, 64, num_ranks, num_ranks, 64, 64 * num_ranks, vocab=64)


@pytest.mark.parametrize(("name", "lengths", "num_ranks"), [
    ("narrow", MIXED[0], 1), ("narrow", MIXED[0], 2), ("narrow", MIXED[0], 4), ("narrow", MIXED[0], 8), ("group5", [17, 1, 65, 2], 8), ("wide", [9], 2), ("wide", [9], 4),
])
def test_ranks_add_up_to_the_unsharded_oracles_step(name, lengths, num_ranks):
    geometry = WHOLE[name]
    weights = random_weights(geometry, 21, has_lm_head=True)
    steps = [random_step(geometry, lengths, 21 + i) for i in range(3 if len(lengths) == 1 else 1)]
    runner = RankRunner(geometry, weights, num_ranks, (len(lengths),), 3, captured=(0, 1), emulation=EmulationOptions(seed=num_ranks))
    outputs = [runner.run(step) for step in steps]
    assert all(same_streams(of_ranks) for of_ranks in outputs)
    report = gate(geometry, weights, steps, [runner.joined(of_ranks) for of_ranks in outputs], captured=(0, 1))
    assert report.passed, report
    assert [step.executed() for step in runner.steps] == [{len(lengths): len(steps)}] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_of_16_rows_and_several_panels(num_ranks):
    geometry = tiny(1, 1088, 8, 8, 64, 512)
    weights, inputs = random_weights(geometry, 22), random_step(geometry, [65, 1, 3, 64] * 4, 22)
    runner = RankRunner(geometry, weights, num_ranks, (16,), 4, panel_budget_bytes=20 * 1024)
    assert any(op.num_panels > 1 for op in runner.plans[16].ops)
    outputs = runner.run(inputs)
    report = gate(geometry, weights, [inputs], [runner.joined(outputs)])
    assert same_streams(outputs) and report.passed, report


@pytest.mark.parametrize("weight_format", ["fp8_block", "fp8_channel"])
def test_ranks_with_fp8_weights(weight_format):
    weights = random_weights(FP8, 23, weight_format=weight_format, has_lm_head=True)
    steps = [random_step(FP8, [65, 1, 3, 17, 64], 23 + i) for i in range(2)]
    runner = RankRunner(FP8, weights, 4, (5,), 3)
    outputs = [runner.run(step) for step in steps]
    report = gate(FP8, weights, steps, [runner.joined(of_ranks) for of_ranks in outputs])
    assert all(map(same_streams, outputs)) and report.passed, report


def run_moe(runner, inputs):
    """(every rank's outputs, the whole step's MoeRun); all ranks have ranked and chosen the same."""
    records = [RoutingRecord.empty(runner.local, inputs.rows, runner.device) for _ in runner.steps]
    outputs = runner.run(inputs, records)
    for record in records:
        assert torch.equal(record.ids, records[0].ids) and torch.equal(record.logits.view(torch.int16), records[0].logits.view(torch.int16))
    assert torch.equal((records[0].ids < 0).all(dim=-1)[0], inputs.out_cache_loc == abi.PADDING_SLOT) and bool((records[0].ids >= -1).all())
    g, logits = runner.geometry, records[0].logits
    return outputs, MoeRun(runner.joined(outputs), logits, [choices(g, inputs, of_layer) for of_layer in logits])


@pytest.mark.parametrize(("num_ranks", "rows"), [(2, 1), (4, 5), (2, 9)])
def test_ranks_of_moe_layers(num_ranks, rows):
    """Each rank has a share of every expert's channels, and all choose alike."""
    weights = random_weights(MOE, 24, has_lm_head=True)
    steps = [random_step(MOE, ([33, 1, 3, 16] * 4)[:rows], 24 + i) for i in range(3 if rows == 1 else 1)]
    runner = RankRunner(MOE, weights, num_ranks, (rows,), 5)
    runs = [run_moe(runner, step) for step in steps]
    report = moe_gate(MOE, weights, steps, [one for _, one in runs])
    assert all(same_streams(outputs) for outputs, _ in runs) and report.passed, report


def test_rows_that_pad_a_step_of_ranks_choose_no_experts():
    """Every rank pushes sums of nothing for them."""
    weights = random_weights(MOE, 24, has_lm_head=True)
    step = random_step(MOE, [33, 1], 24, num_padded=2)
    outputs, run = run_moe(RankRunner(MOE, weights, 2, (4,), 5), step)
    report = moe_gate(MOE, weights, [step], [run])
    assert same_streams(outputs) and report.passed, report


STREAMS = {  # num_ranks, num_layers, grid, rows of the launches
    "two": (2, 3, 4, [1, 2, 1]),
    "one layer": (2, 1, 4, [2, 1, 1, 2, 1]),
    "blocks of one operation": (2, 2, 7, [1, 2, 1]),  # out_proj's four tiles and down's are other blocks'
    "one layer, blocks of one operation": (2, 1, 7, [1, 2, 1, 2, 1]),
    "four": (4, 2, 3, [2, 1]),
    "deep": (2, 9, 2, [1, 1]),
}


class Stream:
    """Launches of a group, and what each must leave bit by bit: what ranks launched one by one do, which the oracle judges above."""

    def __init__(self, name, moe=False):
        num_ranks, num_layers, grid, rows = STREAMS[name]
        self.geometry = self.moe_geometry(num_ranks, num_layers) if moe else least(num_ranks, num_layers)
        self.weights = random_weights(self.geometry, 31, has_lm_head=True)
        self.options = {"num_ranks": num_ranks, "rows": tuple(sorted(set(rows))), "grid": min(grid, 4) if moe else grid}
        self.num_ranks, self.steps = num_ranks, [random_step(self.geometry, [3 + i] * count, 40 + i) for i, count in enumerate(rows)]
        alone = self.runner()
        self.expected = [alone.run(step) for step in self.steps]  # [step][rank]

    @staticmethod
    def moe_geometry(num_ranks, num_layers):
        return Geometry(
            num_layers, 64, num_ranks, num_ranks, 64, 0, 64, 8192, 1e-6, False, num_experts=16, top_k=2, moe_intermediate=64 * num_ranks,
            norm_topk_prob=True,
        )

    def runner(self, **options):
        return RankRunner(self.geometry, self.weights, **self.options, **options)

    def run(self, **how):
        return self.runner().stream(self.steps, **how)

    def problems(self, report, faults, outputs):
        found = [] if report.status == "ok" else [report.message]
        found += [f"{race.kind} ({race.missing}) in {race.region}" for race in report.races] + [fault for fault in faults if fault is not None]
        for rank, of_rank in enumerate(outputs):
            found += [f"wrong bits of rank {rank}, launch {i}" for i, one in enumerate(of_rank) if not same_bits(one, self.expected[i][rank])]
        return found


@pytest.mark.parametrize("name", STREAMS)
def test_no_race_no_deadlock_and_the_same_bits_under_every_schedule(name, parallel_schedules):
    stream = Stream(name)
    for seed in range(parallel_schedules // len(STREAMS)):
        how = {"seed": seed, "starvation": seed % 5 - 1}
        assert stream.problems(*stream.run(**how)) == [], how


@pytest.mark.parametrize("name", ["two", "one layer", "four"])
def test_moe_layers_have_no_race_and_the_same_bits_under_every_schedule(name):
    stream = Stream(name, moe=True)
    for seed, starvation in enumerate([*STARVATION.values()] * 2):
        assert stream.problems(*stream.run(seed=seed, starvation=starvation)) == [], seed


def workspace_races(report):
    return [race for race in report.races if "workspace" in race.region]


@pytest.mark.parametrize("planted", [MISSING_FENCE, GPU_SCOPE])
@pytest.mark.parametrize("name", ["two", "one layer", "four"])
def test_a_fence_that_is_missing_or_too_narrow_is_found_with_every_seed(name, planted):
    stream = Stream(name)
    for seed in range(4):
        report, _, _ = stream.run(seed=seed, planted=planted)
        found = workspace_races(report)
        assert {race.kind for race in found} >= {UNORDERED_CLEAR, NARROW} and all(race.first_rank != race.second_rank for race in found), seed


@pytest.mark.parametrize(("name", "planted", "half"), [
    ("blocks of one operation", NO_FIRST_FENCE, "missing acquire"),
    ("one layer, blocks of one operation", NO_FIRST_FENCE, "missing release"),
    ("one layer, blocks of one operation", NO_LAST_FENCE, "missing acquire"),
])
def test_a_launch_without_its_first_or_last_fence_is_found_with_every_seed(name, planted, half):
    """Blocks that own tiles of out_proj alone need the first one, of down alone the last."""
    stream = Stream(name)
    for seed in range(4):
        found = workspace_races(stream.run(seed=seed, planted=planted)[0])
        assert half in {race.missing for race in found if race.kind == UNORDERED_CLEAR}, seed


@pytest.mark.parametrize("name", ["two", "one layer", "four"])
def test_words_used_again_two_layers_early_are_found_with_every_seed(name):
    stream, stopped = Stream(name), 0
    for seed in range(8):
        report, _, _ = stream.run(seed=seed, planted=TWO_GENERATIONS)
        assert {UNORDERED_CLEAR, CLEAR_OVERTAKES} & {race.kind for race in workspace_races(report)}, seed
        stopped += report.status == "trapped"
    assert stopped > 0, "no seed ever lost a word"


@pytest.mark.parametrize("name", ["two", "four"])
def test_a_flag_before_its_data_gives_wrong_sums(name):
    stream, wrong = Stream(name), 0
    for seed in range(6):
        wrong += any("wrong bits" in what for what in stream.problems(*stream.run(seed=seed, planted=FIRST_WORD_IS_FLAG)))
    assert wrong >= 5


def require_all_stopped(stream, report, faults, but=()):
    """Every rank has trapped with a record of its own; what they say."""
    live = [rank for rank in range(stream.num_ranks) if rank not in but]
    assert (report.status, report.message) == ("trapped", "trap of rank " + ", ".join(map(str, live)))
    assert [rank for rank, fault in enumerate(faults) if fault is not None] == live
    assert all(faults[rank].startswith(f"decode_step stopped: rank {rank}, ") for rank in live)
    return [faults[rank] for rank in live]


@pytest.mark.parametrize("name", ["two", "four", "blocks of one operation"])
def test_a_tile_that_one_peer_never_gets_stops_every_rank_and_is_named(name):
    """Rank 0's tile 0 does not reach the last rank."""
    stream = Stream(name)
    for seed in range(6):
        report, faults, _ = stream.run(seed=seed, planted=LOST_TILE)
        texts = require_all_stopped(stream, report, faults)
        assert any("for rank 0's part of tile 0 of " in text or "for rank 0's rows of the embedding, tile 0" in text for text in texts), texts
        assert report.num_races == 0


@pytest.mark.parametrize("died_at", [0, 1])
@pytest.mark.parametrize("name", ["two", "four"])
def test_a_dead_rank_stops_every_other_and_is_named(name, died_at):
    stream = Stream(name)
    for seed in range(4):
        dead = stream.num_ranks - 1
        report, faults, _ = stream.run(seed=seed, launches=[died_at if rank == dead else len(stream.steps) for rank in range(stream.num_ranks)])
        for text in require_all_stopped(stream, report, faults, but=(dead,)):
            assert f"rank {dead}'s " in text, text


def test_a_slow_rank_is_waited_for():
    stream, slower = Stream("four"), 0
    for seed in range(4):
        outcome = stream.run(seed=seed, slowness=[10 if rank == 1 else 1 for rank in range(4)])
        assert stream.problems(*outcome) == []
        slower += outcome[0].virtual_ns > 2 * stream.run(seed=seed)[0].virtual_ns
    assert slower == 4


def test_a_rank_that_stops_by_itself_tells_the_others():
    """An id outside the vocabulary on rank 1 alone: rank 0 does not wait for its deadline."""
    stream = Stream("two")
    for seed in range(4):
        runner = stream.runner(deadline_s=1000.0, emulation=EmulationOptions(seed=seed))
        begun = runner.begin(stream.steps[0])
        begun[1][1]["input_ids"][0] = 64
        with pytest.raises(DecodeStepFault) as error:
            runner.ranks.launch([arguments for _, arguments in begun])
        first, second = str(error.value).split("; ")
        assert "rank 0, " in first and ": rank 1 stopped by itself in layer 0" in first
        assert "rank 1, " in second and "row 0 has input id 64, outside 0..63" in second
        assert runner.ranks.last_report.virtual_ns < 100e9


def test_a_launch_behind_an_abort_ends_at_once():
    stream = Stream("two")
    runner = stream.runner(emulation=EmulationOptions(planted=LOST_TILE), deadline_s=1000.0)
    begun = [arguments for _, arguments in runner.begin(stream.steps[0])]
    with pytest.raises(DecodeStepFault, match="rank 0's"):
        runner.ranks.launch(begun)
    with pytest.raises(DecodeStepFault, match="an earlier launch failed: decode_step stopped: rank 0, "):
        runner.ranks.launch(begun)
    prepared = [step.prepare(**arguments)[0] for step, arguments in zip(runner.steps, begun)]
    for step in runner.steps:
        step._host._owner[:48] = 0  # as a new process would find it, which maps the same workspaces
    report = _C.parallel_step_emulate([[params] for params in prepared], runner.ranks.grid)
    assert report.status == "trapped" and report.virtual_ns < 100e9 and all("gave up waiting" in text for text in runner.ranks.faults())


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_what_a_launch_leaves_in_the_workspaces(num_layers):
    """Launches of changing rows: of the words that ranks push, those of the last layer are written and no others, and the state says how many rows they
    have."""
    geometry = least(2, num_layers)
    runner = RankRunner(geometry, random_weights(geometry, 33), 2, (1, 2, 5), 3)
    for turn, rows in enumerate((5, 1, 2, 2, 5, 1)):
        runner.run(random_step(geometry, [4] * rows, 50 + turn))
        for step in runner.steps:
            mapped = step.group.workspaces
            memory = mapped.owner.owner[mapped.rank]
            state = memory[mapped.layout.state + _C.abi.kUsedRowsOffset :][:4].view(torch.int32)
            assert state.item() == rows
            copies = memory[mapped.layout.tiles :].view(torch.int32).view(_C.abi.kPeerCopies // 2, 2, 2, 4, 5, 16)  # generation, op, rank, tile, row
            is_written = (copies != -1).flatten(2, 3).any(-1)  # [generation, op, tile of a rank, row]
            first = step.sync_words(_C.abi.kFirstGenerationOffset, 1)[0]  # of the next launch's embedding
            for back in range(1, _C.abi.kPeerCopies // 2 + 1):
                of_layer = is_written[(first - back) % (_C.abi.kPeerCopies // 2)]
                if back == 1:
                    assert bool(of_layer[:, :, :rows].all()) and not bool(of_layer[:, :, rows:].any())
                else:
                    assert not bool(of_layer.any()), f"launch {turn}, {back} layers back"


def test_the_launch_refuses_what_the_front_never_passes():
    runner = RankRunner(least(2, 1), random_weights(least(2, 1), 34), 2, (1,), 2)
    (_, arguments), _ = runner.begin(random_step(least(2, 1), [4], 34))
    params, _ = runner.steps[0].prepare(**arguments)

    def refusal(**fields):
        changed = _C.abi.ParallelStepParams(params)
        for name, value in fields.items():
            setattr(changed, name, value)
        with pytest.raises(ValueError) as error:
            _C.parallel_step_emulate([[changed]], runner.ranks.grid)
        return str(error.value)

    copies = _C.abi.kPeerCopies
    assert refusal(symmetric=_C.symmetric_layout(9, 1, 64, copies)) == "decode_step: num_ranks 9 is outside 1..8"
    assert refusal(rank=2) == "decode_step: rank 2 is not below num_ranks 2"
    assert refusal(symmetric=_C.symmetric_layout(2, 1, 128, copies)) == "decode_step: the workspaces have hidden 128, the layer 64"
    assert refusal(symmetric=_C.symmetric_layout(2, 0, 64, copies)) == "decode_step: rows 1 is above 0, the most of the kernel and of its workspaces"
    assert refusal(symmetric=_C.symmetric_layout(2, 1, 64)) == "decode_step: symmetric is not symmetric_layout of num_ranks, max_rows, hidden and 8"
    assert refusal(symmetric=_C.symmetric_layout(3, 1, 64, copies)) == (
        "decode_step: the address of the workspace of rank 2 is null or not a multiple of 128"
    )
    assert refusal(num_tokens=1000) == "decode_step: 2 shards of 32 rows do not hold a vocabulary of 1000"
