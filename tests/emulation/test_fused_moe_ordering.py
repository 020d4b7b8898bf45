"""fused_moe under adversarial schedules: no access that nothing orders, the same bits whatever the schedule; deadlines that name what is missing."""

import pytest
import torch
from fused_moe_cases import Moe
from schedules import STARVATION

from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import FusedMoeFault

MISSING_AWAIT, WITHHELD_SIGNAL, RING_NO_WAIT, PARTIAL_NO_WAIT, STALE_ROUTING, NO_AWAIT_OF_PREVIOUS = 2, 3, 9, 22, 23, 40  # dialect::Planted


def moe_of(**options):
    return Moe(128, 128, 32, 2, grid=3, max_rows=16, emulation=EmulationOptions(**options))


@pytest.mark.parametrize("starvation", STARVATION.values(), ids=STARVATION.keys())
@pytest.mark.parametrize("rows", [1, 10])
def test_the_same_under_every_schedule(starvation, rows):
    moe = moe_of(check_order=True, starvation=starvation)
    x, _ = moe.inputs(rows)
    first = None
    for seed in range(4):
        moe.kernel.emulation.seed = seed
        moe.run(x)
        report = moe.kernel.last_report
        assert ([f"{r.kind} {r.region}+{r.offset}" for r in report.races], report.num_races) == ([], 0), seed
        first = moe.out if first is None else first
        assert torch.equal(moe.out, first), seed
    assert moe.problems(x) == []


@pytest.mark.parametrize("planted", [MISSING_AWAIT, RING_NO_WAIT, PARTIAL_NO_WAIT, STALE_ROUTING])
def test_what_is_not_waited_for_is_missed(planted):
    """By the checks of order, or by a result that is wrong."""
    found = 0
    for seed in range(4):
        moe = moe_of(check_order=True, planted=planted, seed=seed)
        x, _ = moe.inputs(10)
        try:
            moe.run(x)
        except RuntimeError as error:
            assert isinstance(error, FusedMoeFault) or "fused_moe in emulation: " in str(error)
            found += 1
            continue
        found += moe.kernel.last_report.num_races
        try:
            found += len(moe.problems(x))
        except ValueError as error:  # logits of NaN, which both sides take
            assert "the oracle is not finite" in str(error)
            found += 1
    assert found > 0


def test_generations_alternate_and_are_cleared():
    """Every word of the generation that the next launch takes is clear, whatever rows the ones before had."""
    moe = moe_of()
    words = moe.kernel._words
    for launch, rows in enumerate((16, 3, 9, 16, 1)):
        moe.run(moe.inputs(rows)[0])
        following = moe.kernel._workspace[(launch + 1) % 2 * words :][:words]
        assert following.eq(-1).all(), launch
        assert not moe.kernel._workspace[launch % 2 * words :][:words].eq(-1).all()


def test_a_word_that_never_comes_ends_the_launch_and_is_named():
    """The shared expert's activations of tile 0; who waits for the outputs that should follow has begun as early, and may be named instead."""
    moe = moe_of(planted=WITHHELD_SIGNAL)
    moe.layer.params.deadline_ns = 1_000_000
    x, _ = moe.inputs(3)
    words = r"fused_moe stopped: rank 0, SM ., block . waited 0.00 s for word \d+ of (activation|output), which no block"
    with pytest.raises(FusedMoeFault, match=words):
        moe.run(x)
    with pytest.raises(FusedMoeFault, match="an earlier launch failed: fused_moe stopped"):
        moe.run(x)


def test_what_the_launch_in_front_writes_is_not_touched_before_it_is_over():
    moe = moe_of(planted=NO_AWAIT_OF_PREVIOUS)
    with pytest.raises(RuntimeError, match="before await_previous_launch, in a kernel behind another"):
        moe.run(moe.inputs(3)[0])
