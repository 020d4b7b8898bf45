"""The forms that a tensor-parallel step's sums may take: each gives the served step's bits under every schedule with weak memory, and what it relies
on is found missing. The judge of the served step's bits is the unsharded oracle, in test_parallel_step.py."""

import pytest
import torch
from parallel_cases import RankRunner
from schedules import STARVATION, UNORDERED_CLEAR
from test_parallel_step import (
    FIRST_WORD_IS_FLAG, GPU_SCOPE, LOST_TILE, MISSING_FENCE, NARROW, NO_FIRST_FENCE, NO_LAST_FENCE, TWO_GENERATIONS, Stream, least,
    require_all_stopped, workspace_races,
)

from sgl_lowlatency import _C
from sgl_lowlatency.bench import timeline
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.rank_group import FORMS
from sgl_lowlatency.reference.inputs import random_step, random_weights

WIDE, NARROW_FENCE, TAGGED = FORMS["wide stores"], FORMS["narrow fence"], FORMS["tagged words"]
ALL = {"wide stores, narrow fence": WIDE + NARROW_FENCE, "narrow fence": NARROW_FENCE, "tagged words, three ahead": TAGGED + FORMS["three ahead"]}
STREAMS = ["two", "one layer", "blocks of one operation", "one layer, blocks of one operation", "four"]


@pytest.fixture(scope="module")
def streams():
    return {name: Stream(name) for name in STREAMS}


def run(stream, form, **how):
    return stream.runner(form=form).stream(stream.steps, **how)


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("name", STREAMS)
def test_every_form_has_the_served_steps_bits_and_no_race_under_every_schedule(streams, name, form, parallel_schedules):
    stream = streams[name]
    for seed in range(max(3, parallel_schedules // 1000)):
        slowness = [10 if rank == seed % 3 else 1 for rank in range(4)] if seed > 4 else []
        how = {"seed": seed, "starvation": [-1, *STARVATION.values()][seed % 5], "slowness": slowness}
        assert stream.problems(*run(stream, ALL[form], **how)) == [], how


def test_eight_ranks_and_eight_rows():
    geometry = least(8, 2)
    weights, inputs = random_weights(geometry, 35), random_step(geometry, [5, 1, 9, 2, 3, 1, 1, 4], 35)
    served = RankRunner(geometry, weights, 8, (8,), 3).run(inputs)
    for form in FORMS.values():
        outputs = RankRunner(geometry, weights, 8, (8,), 3, form=form).run(inputs)
        assert all(torch.equal(one.hidden, other.hidden) for one, other in zip(outputs, served, strict=True))


@pytest.mark.parametrize("planted", [MISSING_FENCE, GPU_SCOPE])
@pytest.mark.parametrize("name", ["two", "one layer", "four"])
def test_the_narrow_fence_is_needed_where_it_is(streams, name, planted):
    """The warps that push and take fence at system scope, or it is found with every seed."""
    for seed in range(3):
        found = workspace_races(run(streams[name], NARROW_FENCE, seed=seed, planted=planted)[0])
        assert {race.kind for race in found} >= {UNORDERED_CLEAR, NARROW} and all(race.first_rank != race.second_rank for race in found), seed


@pytest.mark.parametrize(("name", "planted", "half"), [
    ("blocks of one operation", NO_FIRST_FENCE, "missing acquire"),
    ("one layer, blocks of one operation", NO_FIRST_FENCE, "missing release"),
    ("one layer, blocks of one operation", NO_LAST_FENCE, "missing acquire"),
])
def test_a_launchs_first_and_last_narrow_fence_are_needed(streams, name, planted, half):
    for seed in range(3):
        found = workspace_races(run(streams[name], NARROW_FENCE, seed=seed, planted=planted)[0])
        assert half in {race.missing for race in found if race.kind == UNORDERED_CLEAR}, seed


@pytest.mark.parametrize("planted", [GPU_SCOPE, NO_FIRST_FENCE, NO_LAST_FENCE])
@pytest.mark.parametrize("name", ["two", "one layer, blocks of one operation"])
def test_tagged_words_need_no_fence_of_system_scope(streams, name, planted):
    for seed in range(3):
        assert streams[name].problems(*run(streams[name], TAGGED, seed=seed, planted=planted)) == []


def test_tagged_words_need_their_second_copy(streams):
    """With one, the embedding of a rank that is ahead falls on words of `down` that a starved block has not taken: it waits for them in vain."""
    stream = streams["one layer"]
    for seed in range(6):
        how = {"seed": seed, "starvation": STARVATION["starved block"]}
        report, faults, _ = run(stream, TAGGED, planted=TWO_GENERATIONS, **how)
        assert report.status == "trapped" and any(fault is not None and " waited " in fault for fault in faults), seed
        assert stream.problems(*run(stream, TAGGED, **how)) == [], seed


@pytest.mark.parametrize("name", ["two", "four"])
def test_a_tag_stands_for_its_own_word_alone(streams, name):
    wrong = 0
    for seed in range(4):
        wrong += any("wrong bits" in what for what in streams[name].problems(*run(streams[name], TAGGED, seed=seed, planted=FIRST_WORD_IS_FLAG)))
    assert wrong >= 3


@pytest.mark.parametrize("form", [WIDE, NARROW_FENCE, TAGGED])
def test_a_lost_tile_and_a_dead_rank_stop_every_rank_and_are_named(streams, form):
    for name in ("two", "four"):
        stream = streams[name]
        report, faults, _ = run(stream, form, seed=1, planted=LOST_TILE)
        texts = require_all_stopped(stream, report, faults)
        assert any("for rank 0's part of tile 0 of " in text or "for rank 0's rows of the embedding, tile 0" in text for text in texts), texts
        dead = stream.num_ranks - 1
        report, faults, _ = run(stream, form, seed=2, launches=[1 if rank == dead else len(stream.steps) for rank in range(stream.num_ranks)])
        assert all(f"rank {dead}'s " in text for text in require_all_stopped(stream, report, faults, but=(dead,)))


@pytest.mark.parametrize("form", [0, NARROW_FENCE, TAGGED])
def test_a_timed_step_passes_every_point_in_order_and_changes_no_bit(streams, form):
    stream = streams["two"]
    runner = stream.runner(form=form, is_timed=True)
    outcome = runner.stream(stream.steps, seed=3)
    assert stream.problems(*outcome) == []
    for of_rank in runner.timelines:
        times = of_rank[..., [timeline.POINTS[name] for name in (
            "Begin", "QkvOperand", "Qkv", "Attention", "OutProjOperand", "OutProj", "Mid", "GateUpOperand", "GateUp", "DownOperand", "Down", "End",
        )]]
        owns_all = (times > 0).all(-1)
        assert bool(owns_all.any()) and bool((times.diff(dim=-1) >= 0)[owns_all].all())
        inside = of_rank[..., timeline.POINTS["Fenced"]] - of_rank[..., timeline.POINTS["Fence"]]
        assert bool((inside >= 0).all()) and bool((of_rank[..., timeline.POINTS["Fence"]] > 0).all())


def test_the_launch_refuses_what_is_no_form():
    geometry = least(2, 1)
    runner = RankRunner(geometry, random_weights(geometry, 36), 2, (1, 9), 2, form=0)
    params = [runner.steps[0].prepare(**runner.begin(random_step(geometry, [4] * rows, 36))[0][1])[0] for rows in (1, 9)]

    def refusal(of, **fields):
        changed = _C.abi.TrialStepParams(of)
        for name, value in fields.items():
            setattr(changed, name, value)
        with pytest.raises(ValueError) as error:
            _C.trial_step_emulate([[changed]], runner.ranks.grid)
        return str(error.value)

    assert refusal(params[0], form=16) == "decode_step: form 16 is not one"
    assert refusal(params[0], form=TAGGED + WIDE) == f"decode_step: form {TAGGED + WIDE} is not one"
    assert refusal(params[1]) == "decode_step: rows 9 of a form's step is above 8"
    with pytest.raises(ValueError, match="virtual ranks disagree: some are trials"):
        type(runner.ranks)([runner.steps[0], RankRunner(geometry, runner.weights, 2, (1, 9), 2).steps[1]], EmulationOptions())
