"""Verify steps of tensor-parallel decode_step in emulation: 2, 4 and 8 ranks against the unsharded oracle's chains, the streams that drafts read the
same bits on all of them; and what ranks do that were given different drafts."""

import pytest
import torch
from decode_step_cases import gate, same_bits
from moe_cases import moe_gate
from parallel_cases import RankRunner, same_streams
from schedules import STARVATION, UNORDERED_CLEAR
from test_parallel_step import FP8, LOST_TILE, MISSING_FENCE, MOE, WHOLE, Stream, require_all_stopped, run_moe, tiny, workspace_races

from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import DecodeStepFault
from sgl_lowlatency.reference.inputs import random_step, random_weights

SEES_SIBLING, CAPTURES_OUTPUT = 10, 20  # dialect::Planted
CAPTURED = (0, 1, 2)  # of three layers: the embedding's too, and the last one's
SMALL = tiny(3, 64, 8, 8, 64, 512)  # as small as eight ranks come


def verify_step(geometry, prefixes, seed, rows_per_request, **options):
    return random_step(geometry, prefixes, seed, rows_per_request=rows_per_request, lengths_are_prefix=True, **options)


def runner_of(geometry, weights, num_ranks, chains, grid=4, **options):
    """chains: rows -> rows of a request."""
    return RankRunner(geometry, weights, num_ranks, tuple(chains), grid, rows_per_request=chains, **options)


@pytest.mark.parametrize(("name", "num_ranks", "rows_per_request", "prefixes"), [
    ("small", 2, 2, [65, 1, 15, 0, 17]), ("small", 4, 5, [64, 33]), ("small", 8, 8, [16]), ("group5", 8, 3, [63, 2]), ("wide", 2, 3, [9]),
])  # fmt: skip
def test_ranks_add_up_to_the_oracles_chains_and_streams(name, num_ranks, rows_per_request, prefixes):
    geometry = SMALL if name == "small" else WHOLE[name]
    captured = tuple(range(geometry.num_layers))
    weights, rows = random_weights(geometry, 61, has_lm_head=True), len(prefixes) * rows_per_request
    step = verify_step(geometry, prefixes, 61, rows_per_request)
    runner = runner_of(geometry, weights, num_ranks, {rows: rows_per_request}, captured=captured, emulation=EmulationOptions(seed=num_ranks))
    outputs = runner.run(step)
    assert same_streams(outputs) and all(one.aux.shape[0] == len(captured) for one in outputs)
    report = gate(geometry, weights, [step], [runner.joined(outputs)], captured=captured)
    assert report.passed, report
    assert all(map(same_bits, runner.run(step), outputs)), "the same step gives the same bits"
    assert [step.executed() for step in runner.steps] == [{rows: 2}] * num_ranks


def test_16_rows_of_several_panels_and_padded_requests():
    """As a graph pads them: their length 1 taken for a prefix, their tokens in the padding slot."""
    geometry = tiny(1, 1088, 8, 8, 64, 512)
    weights, step = random_weights(geometry, 62), verify_step(geometry, [65, 0, 30], 62, 4, num_padded=1)
    runner = runner_of(geometry, weights, 2, {16: 4}, panel_budget_bytes=20 * 1024)
    assert any(op.num_panels > 1 for op in runner.plans[16].ops)
    outputs = runner.run(step)
    report = gate(geometry, weights, [step], [runner.joined(outputs)], rows=12)
    assert same_streams(outputs) and report.passed, report


@pytest.mark.parametrize(("weight_format", "num_ranks"), [("fp8_block", 4), ("fp8_channel", 2)])
def test_fp8_weights(weight_format, num_ranks):
    weights, step = random_weights(FP8, 63, weight_format=weight_format, has_lm_head=True), verify_step(FP8, [17, 64], 63, 3)
    runner = runner_of(FP8, weights, num_ranks, {6: 3}, captured=(0, 1))
    outputs = runner.run(step)
    report = gate(FP8, weights, [step], [runner.joined(outputs)], captured=(0, 1))
    assert same_streams(outputs) and report.passed, report


@pytest.mark.parametrize(("num_ranks", "rows_per_request", "prefixes"), [(2, 4, [33, 0]), (4, 3, [5, 16, 1])])
def test_moe_layers(num_ranks, rows_per_request, prefixes):
    """Every row of a chain takes its own experts, on all ranks the same."""
    weights, step = random_weights(MOE, 64, has_lm_head=True), verify_step(MOE, prefixes, 64, rows_per_request)
    outputs, run = run_moe(runner_of(MOE, weights, num_ranks, {step.rows: rows_per_request}), step)
    report = moe_gate(MOE, weights, [step], [run])
    assert same_streams(outputs) and report.passed, report


def test_decode_and_verify_steps_share_the_workspaces():
    """Launches of either in turn, of changing rows, leave what each leaves alone."""
    geometry, chains = SMALL, {1: 1, 6: 3, 8: 8, 5: 1}
    weights = random_weights(geometry, 65, has_lm_head=True)
    shared = runner_of(geometry, weights, 4, chains, 3, captured=CAPTURED)
    for turn, rows in enumerate((6, 1, 8, 5, 8, 6)):
        step = verify_step(geometry, [9 + turn] * (rows // chains[rows]), 66 + turn, chains[rows])
        alone = runner_of(geometry, weights, 4, {rows: chains[rows]}, 3, captured=CAPTURED)
        assert all(map(same_bits, shared.run(step), alone.run(step))), f"launch {turn} of {rows} rows"


def test_plans_of_other_chains_are_other_plans():
    """What ranks compare before their first launch: 8 rows of one request are not those of two."""
    plans = [runner_of(SMALL, random_weights(SMALL, 65), 2, {8: chain}).plans[8] for chain in (1, 4, 8)]
    assert len({plan.hash for plan in plans}) == 3


VERIFY_STREAMS = {  # num_ranks, num_layers, grid, prefixes of the launches, rows of a request
    "two": (2, 3, 4, [[3], [5, 0], [17]], 3),
    "blocks of one operation": (2, 2, 7, [[3, 1], [5], [17]], 4),
    "four": (4, 2, 3, [[2, 16], [33]], 2),
    "eight": (8, 1, 2, [[4], [1]], 4),
}


class VerifyStream(Stream):
    """Launches of verify steps, as Stream has decode steps; of dense layers, the input of each is captured."""

    def __init__(self, name, moe=False):
        num_ranks, num_layers, grid, launches, rows_per_request = VERIFY_STREAMS[name]
        small = tiny(num_layers, 64, num_ranks, num_ranks, 64, 64 * num_ranks, vocab=32 * num_ranks)
        self.geometry = self.moe_geometry(num_ranks, num_layers) if moe else small
        self.weights = random_weights(self.geometry, 71, has_lm_head=True)
        self.num_ranks = num_ranks
        self.steps = [verify_step(self.geometry, prefixes, 80 + i, rows_per_request) for i, prefixes in enumerate(launches)]
        rows = tuple(sorted({step.rows for step in self.steps}))
        self.options = {"num_ranks": num_ranks, "rows": rows, "grid": grid, "rows_per_request": dict.fromkeys(rows, rows_per_request)}
        self.options["captured"] = () if moe else tuple(range(num_layers))
        alone = self.runner()
        self.expected = [alone.run(step) for step in self.steps]


@pytest.mark.parametrize("name", VERIFY_STREAMS)
def test_no_race_no_deadlock_and_the_same_bits_under_every_schedule(name, parallel_schedules):
    stream = VerifyStream(name)
    for seed in range(parallel_schedules // 20):
        how = {"seed": seed, "starvation": seed % 5 - 1}
        assert stream.problems(*stream.run(**how)) == [], how


def test_moe_layers_have_no_race_and_the_same_bits_under_every_schedule():
    stream = VerifyStream("two", moe=True)
    for seed, starvation in enumerate(STARVATION.values()):
        assert stream.problems(*stream.run(seed=seed, starvation=starvation)) == [], seed


@pytest.mark.parametrize("name", ["two", "four"])
def test_a_fence_that_is_missing_is_found_with_every_seed(name):
    stream = VerifyStream(name)
    for seed in range(3):
        report, _, _ = stream.run(seed=seed, planted=MISSING_FENCE)
        found = workspace_races(report)
        assert UNORDERED_CLEAR in {race.kind for race in found} and all(race.first_rank != race.second_rank for race in found), seed


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("planted", [SEES_SIBLING, CAPTURES_OUTPUT])
def test_a_planted_bug_misses_the_gate(planted, num_ranks):
    """A row that sees the draft behind it: every output but the embedding's stream. The stream that leaves a layer instead of the one that enters it:
    the captured streams, all of them, and nothing else. Ranks agree on the wrong bits, too."""
    geometry = SMALL
    weights, step = random_weights(geometry, 67, has_lm_head=True), verify_step(geometry, [16, 5], 67, 4)
    runner = runner_of(geometry, weights, num_ranks, {8: 4}, captured=CAPTURED, emulation=EmulationOptions(planted=planted))
    outputs = runner.run(step)
    assert same_streams(outputs)
    report = gate(geometry, weights, [step], [runner.joined(outputs)], captured=CAPTURED)
    failed = {figure.output for figure in report.figures if not figure.passed}
    aux = {figure.output for figure in report.figures if figure.output.startswith("aux[")}
    assert len(aux) == len(CAPTURED)
    if planted == CAPTURES_OUTPUT:
        assert failed == aux, report
    else:
        assert failed >= {"hidden", "logits"} and aux & failed == aux - {"aux[0]"}, report


@pytest.mark.parametrize("died_at", [0, 1])
@pytest.mark.parametrize("name", ["two", "four", "eight"])
def test_a_dead_rank_stops_every_other_and_is_named(name, died_at):
    stream = VerifyStream(name)
    dead = stream.num_ranks - 1
    for seed in range(2):
        report, faults, _ = stream.run(seed=seed, launches=[died_at if rank == dead else len(stream.steps) for rank in range(stream.num_ranks)])
        for text in require_all_stopped(stream, report, faults, but=(dead,)):
            assert f"rank {dead}'s " in text, text


def test_a_tile_that_one_peer_never_gets_stops_every_rank_and_is_named():
    stream = VerifyStream("two")
    for seed in range(3):
        texts = require_all_stopped(stream, *stream.run(seed=seed, planted=LOST_TILE)[:2])
        assert any("for rank 0's part of tile 0 of " in text or "for rank 0's rows of the embedding, tile 0" in text for text in texts), texts


def given(stream, first, second):
    """(runner, what its launch takes) of the stream's first step, whose last draft is `first` on rank 0 and `second` on rank 1."""
    runner = stream.runner()
    begun = runner.begin(stream.steps[0])
    begun[0][1]["input_ids"][-1], begun[1][1]["input_ids"][-1] = first, second
    return runner, begun


def test_a_rank_that_awaits_the_row_of_a_draft_that_its_owner_was_not_given_stops_all():
    """A token of rank 1's rows on rank 0, one of rank 0's on rank 1: neither has a reason to push a row."""
    stream = VerifyStream("two")
    runner, begun = given(stream, stream.geometry.vocab // 2 + 3, 3)
    with pytest.raises(DecodeStepFault) as error:
        runner.ranks.launch([arguments for _, arguments in begun])
    text = str(error.value)
    assert "rank 0, " in text and "rank 1's rows of the embedding" in text and "rank 0's rows of the embedding" in text, text


def test_other_differences_between_drafts_are_seen_by_no_rank():
    """Why they are refused before (guard/parallel.py): of one shard the row that comes is the owner's token's, on both ranks; of a shard each, every
    rank takes its own."""
    stream, outcomes = VerifyStream("two"), []
    for tokens in ((7, 7), (7, 9), (7, stream.geometry.vocab // 2 + 9)):
        runner, begun = given(stream, *tokens)
        runner.launch(begun)
        outcomes.append([arguments["hidden_out"].clone() for _, arguments in begun])
    same, of_one_shard, of_a_shard_each = outcomes
    assert torch.equal(*same) and all(map(torch.equal, same, of_one_shard))
    assert not torch.equal(*of_a_shard_each)
