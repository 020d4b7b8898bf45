"""Bugs planted in the kernel: each turns the gate that should catch it red, and the same run without it is green."""

import re

import pytest
from decode_step_cases import Runner, gate
from tiny_geometries import TINY

from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import DecodeStepFault
from sgl_lowlatency.reference.inputs import random_step, random_weights

NONE, MISSING_RELEASE, MISSING_ACQUIRE, WITHHELD_SIGNAL, OFF_BY_ONE_PAGE = 0, 1, 2, 3, 4  # dialect::Planted
WRONG_KV_HEAD, SKIPPED_NORM, WRONG_ROPE, MASK_OFF_BY_ONE, RING_NO_WAIT = 5, 6, 7, 8, 9
GEOMETRY = TINY["group2"]  # two kv heads, three layers
LENGTHS = [65, 63, 300]


def run(planted, seed=0, lengths=LENGTHS, check_order=False, fill_stale_slots=False):
    """(runner, gate report) of one step with the bug in it."""
    weights = random_weights(GEOMETRY, 21)
    inputs = random_step(GEOMETRY, lengths, 21)
    if fill_stale_slots:  # what lies beyond a length is another sequence's KV, not NaN
        for buffer in (*inputs.k_buffers, *inputs.v_buffers):
            buffer[buffer.isnan()] = 0.5
    options = EmulationOptions(seed=seed, planted=planted, check_order=check_order)
    runner = Runner(GEOMETRY, weights, (len(lengths),), 5, deadline_s=0.5, emulation=options)
    return runner, gate(GEOMETRY, weights, [inputs], [runner.run(inputs)])


def test_without_a_bug_everything_is_green():
    for seed in range(4):
        runner, report = run(NONE, seed, check_order=True, fill_stale_slots=True)
        assert report.passed, str(report)
        assert runner.kernel.last_report.num_races == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("planted", "kind"), [(MISSING_RELEASE, "missing release"), (MISSING_ACQUIRE, "missing acquire")])
def test_a_missing_fence_is_a_race_and_stale_data(planted, kind, seed):
    runner, _ = run(planted, seed, check_order=True)
    report = runner.kernel.last_report
    races = [race for race in report.races if race.kind == kind]
    assert races, [race.kind for race in report.races]
    assert any(race.stale for race in races), "the reader was given the value before the write"
    assert {race.region for race in races} <= {"residual", "qkv", "attention_out", "activation", "hidden_out"}


@pytest.mark.parametrize(
    ("planted", "hidden_at_least"),
    [(OFF_BY_ONE_PAGE, 10), (WRONG_KV_HEAD, 10), (SKIPPED_NORM, 10), (WRONG_ROPE, 4), (MASK_OFF_BY_ONE, 4)],
    ids=["off-by-one page", "wrong kv head", "skipped norm", "wrong rope", "mask off by one"],
)
def test_wrong_arithmetic_misses_the_gate(planted, hidden_at_least):
    """By a margin, in the hidden output, and before the bug's layer nothing is blamed: layer 0's KV rows stay right."""
    _, report = run(planted, fill_stale_slots=True)
    figures = {figure.output: figure for figure in report.figures}
    assert figures["hidden"].ratio > hidden_at_least, str(report)
    assert not figures["k_rows[1]"].passed and not figures["v_rows[1]"].passed, str(report)
    assert figures["k_rows[0]"].passed and figures["v_rows[0]"].passed, str(report)


@pytest.mark.parametrize("lengths", [[1], [64], [65], [1000]], ids=str)
@pytest.mark.parametrize("planted", [OFF_BY_ONE_PAGE, MASK_OFF_BY_ONE], ids=["off-by-one page", "mask off by one"])
def test_wrong_tokens_miss_the_gate_at_every_length_that_has_old_tokens(planted, lengths):
    _, report = run(planted, lengths=lengths, fill_stale_slots=True)
    assert report.passed == (lengths == [1]), str(report)  # a lone token has no page to be off by and no old token to drop


def test_reading_beyond_the_length_meets_poison():
    _, report = run(OFF_BY_ONE_PAGE)
    assert report.figures[0].output == "hidden"
    assert report.figures[0].num_not_finite > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_withheld_signal_ends_at_the_deadline_and_is_named(seed):
    with pytest.raises(DecodeStepFault, match=r"block \d, layer 0 waited .* for edge 'out_proj': expected 5, seen 4 \(1 signals missing\)"):
        run(WITHHELD_SIGNAL, seed)


@pytest.mark.parametrize("seed", range(4))
def test_weights_used_before_they_landed_are_found(seed):
    """The emulation sees the ring misused, or the numbers are wrong."""
    try:
        runner, report = run(RING_NO_WAIT, seed, check_order=True)
    except RuntimeError as error:
        assert re.search("mbarrier|ring stage", str(error)), str(error)
    else:
        assert not report.passed or runner.kernel.last_report.num_races > 0
