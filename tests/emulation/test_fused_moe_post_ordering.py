"""fused_moe with mix and post under adversarial schedules: no access that nothing orders, the same bits whatever the schedule; words of the mix that
never come are named, and are clear when they are used again."""

import re

import pytest
import torch
from fused_moe_cases import Moe
from schedules import STARVATION

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import FusedMoeFault

MISSING_AWAIT, NO_AWAIT_OF_PREVIOUS, WITHHELD_MIX, WITHHELD_COEFFICIENTS = 2, 40, 44, 45  # dialect::Planted


def moe_of(**options):
    return Moe(128, 128, 32, 2, grid=3, max_rows=16, emulation=EmulationOptions(**options))


@pytest.mark.parametrize("starvation", STARVATION.values(), ids=STARVATION.keys())
@pytest.mark.parametrize("rows", [1, 10])
def test_the_same_under_every_schedule(starvation, rows):
    moe = moe_of(check_order=True, starvation=starvation)
    x, streams = moe.inputs(rows)[0], moe.streams(rows)
    first = None
    for seed in range(4):
        moe.kernel.emulation.seed = seed
        moe.run(x, streams=streams)
        report = moe.kernel.last_report
        assert ([f"{r.kind} {r.region}+{r.offset}" for r in report.races], report.num_races) == ([], 0), seed
        first = (moe.out, moe.post) if first is None else first
        assert torch.equal(moe.out, first[0]) and all(torch.equal(moe.post[name], first[1][name]) for name in first[1]), seed
    assert moe.problems(x, streams=streams) == []


def test_coefficients_that_are_not_waited_for_are_missed():
    """Words that nobody has written are taken for sums of the mix, or for coefficients."""
    found = 0
    for seed in range(4):
        moe = moe_of(planted=MISSING_AWAIT, seed=seed)
        x, streams = moe.inputs(10)[0], moe.streams(10)
        try:
            moe.run(x, streams=streams)
        except RuntimeError as error:
            assert isinstance(error, FusedMoeFault) or "fused_moe in emulation: " in str(error)
            continue
        found += not bool(moe.post["streams_out"].isfinite().all() and moe.post["coefficients"].isfinite().all())
    assert found > 0


def test_generations_are_cleared_whether_launches_have_streams_or_not():
    """Every word of the generation that the next launch takes is clear, and what a launch without streams uses ends in front of the mix."""
    moe = moe_of()
    words, geometry = moe.kernel._words, _C.abi.MoeGeometry(128, 128, 32, 2)
    for launch, (rows, has_streams) in enumerate(((16, True), (3, False), (9, False), (16, True), (1, True), (16, False), (12, True), (2, False))):
        moe.run(moe.inputs(rows)[0], streams=moe.streams(rows) if has_streams else None)
        own, following = (moe.kernel._workspace[(launch + i) % 2 * words :][:words] for i in range(2))
        assert following.eq(-1).all(), launch
        at = _C.moe_handover(geometry, rows)
        assert own[at.total_words :].eq(-1).all()
        assert own[at.mix : at.total_words].ne(-1).all() if has_streams else own[at.mix :].eq(-1).all(), launch
        used = moe.kernel._state.view(torch.int32)[64:66]  # abi::MoeState::used_words
        assert used.tolist() == [[at.mix, at.total_words][has_streams] if launch % 2 == i else 0 for i in range(2)]


@pytest.mark.parametrize(("planted", "edge"), [(WITHHELD_MIX, "mix"), (WITHHELD_COEFFICIENTS, "coefficients")])
def test_words_of_the_mix_that_never_come_end_the_launch_and_are_named(planted, edge):
    for seed in range(3):
        moe = moe_of(planted=planted, seed=seed)
        moe.layer.params.deadline_ns = 1_000_000
        at = _C.moe_handover(_C.abi.MoeGeometry(128, 128, 32, 2), 3)
        if edge == "mix":  # who waits for coefficients would have begun as early
            moe.kernel._workspace[at.coefficients : at.total_words] = 0
        with pytest.raises(FusedMoeFault, match=rf"fused_moe stopped: rank 0, SM ., block . waited 0.00 s for word \d+ of {edge}, which no") as error:
            moe.run(moe.inputs(3)[0], streams=moe.streams(3))
        word, size = int(re.search(r"word (\d+) of", str(error.value))[1]), {"mix": at.coefficients - at.mix, "coefficients": 72}[edge]
        assert 0 <= word < size, "its index within its own buffer"
        with pytest.raises(FusedMoeFault, match="an earlier launch failed: fused_moe stopped"):
            moe.run(moe.inputs(3)[0])


def test_a_launch_without_streams_has_no_mix_to_wait_for():
    for planted in (WITHHELD_MIX, WITHHELD_COEFFICIENTS):
        moe = moe_of(planted=planted)
        x, _ = moe.inputs(3)
        moe.run(x)
        assert moe.problems(x) == []


def test_what_the_launch_in_front_writes_is_not_touched_before_it_is_over():
    moe = moe_of(planted=NO_AWAIT_OF_PREVIOUS)
    with pytest.raises(RuntimeError, match="before await_previous_launch, in a kernel behind another"):
        moe.run(moe.inputs(3)[0], streams=moe.streams(3))
