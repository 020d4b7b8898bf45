"""A timed tensor-parallel step: the served step's bits under weak memory, and the clock at every point. The judge of the served step's bits is the
unsharded oracle, in test_parallel_step.py."""

import pytest
import torch
from parallel_cases import RankRunner
from schedules import STARVATION
from test_parallel_step import LOST_TILE, Stream, least, require_all_stopped

from sgl_lowlatency import _C
from sgl_lowlatency.bench import timeline
from sgl_lowlatency.kernels.decode_step import DecodeStep
from sgl_lowlatency.reference.inputs import random_step, random_weights


@pytest.mark.parametrize("name", ["two", "one layer, blocks of one operation", "four"])
def test_it_passes_every_point_in_order_and_changes_no_bit(name):
    stream = Stream(name)
    for seed, starvation in enumerate([-1, *STARVATION.values()]):
        runner = stream.runner(is_timed=True)
        assert stream.problems(*runner.stream(stream.steps, seed=seed, starvation=starvation)) == [], seed
        for of_rank in runner.timelines:
            times = of_rank[..., [timeline.POINTS[point] for point in (
                "Begin", "QkvOperand", "Qkv", "Attention", "OutProjOperand", "OutProj", "Mid", "GateUpOperand", "GateUp", "DownOperand", "Down",
                "End",
            )]]
            passed = times > 0
            assert all(bool(passed[..., index].any()) for index in range(passed.shape[-1])), "a point that no block passes"
            latest = times.cummax(dim=-1).values
            assert bool((latest == times)[passed].all()), "a clock that runs backwards"
            inside = of_rank[..., timeline.POINTS["Fenced"]] - of_rank[..., timeline.POINTS["Fence"]]
            assert bool((inside >= 0).all()) and bool((of_rank[..., timeline.POINTS["Fence"]] > 0).all())


def test_a_lost_tile_stops_every_rank_and_is_named():
    stream = Stream("two")
    report, faults, _ = stream.runner(is_timed=True).stream(stream.steps, seed=1, planted=LOST_TILE)
    texts = require_all_stopped(stream, report, faults)
    assert any("for rank 0's part of tile 0 of " in text or "for rank 0's rows of the embedding, tile 0" in text for text in texts), texts


def test_what_no_timed_step_is_refused():
    geometry = least(2, 1)
    weights = random_weights(geometry, 36)
    runner = RankRunner(geometry, weights, 2, (1, 9), 2, is_timed=True)
    params = [runner.steps[0].prepare(**runner.begin(random_step(geometry, [4] * rows, 36))[0][1])[0] for rows in (1, 9)]

    def refusal(of, **fields):
        changed = _C.abi.TimedStepParams(of)
        for name, value in fields.items():
            setattr(changed, name, value)
        with pytest.raises(ValueError) as error:
            _C.timed_step_emulate([[changed]], runner.ranks.grid)
        return str(error.value)

    assert refusal(params[0], timeline=0) == "decode_step: a timed step has no timeline"
    assert refusal(params[1]) == "decode_step: rows 9 of a timed step is above 8"
    served = RankRunner(geometry, weights, 2, (1, 9), 2)
    with pytest.raises(ValueError, match="virtual ranks disagree: some are timed"):
        type(runner.ranks)([runner.steps[0], served.steps[1]])
    step = runner.steps[0]
    with pytest.raises(ValueError, match="timeline: the step has no group"):
        DecodeStep(runner.local, runner.plans, runner.shards[0], runner.device, 1.0, timeline=step.timeline)
    with pytest.raises(ValueError, match="timeline"):
        DecodeStep(runner.local, runner.plans, runner.shards[0], runner.device, 1.0, group=step.group, timeline=torch.zeros(3, dtype=torch.int64))
