"""Bugs planted in the kernel: each turns the gate that should catch it red, and the same run without it is green."""

import re

import pytest
from decode_step_cases import Runner, gate
from tiny_geometries import TINY, deep

from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import DecodeStepFault
from sgl_lowlatency.reference.inputs import random_step, random_weights

NONE, MISSING_FENCE, MISSING_AWAIT, WITHHELD_SIGNAL, OFF_BY_ONE_PAGE = 0, 1, 2, 3, 4  # dialect::Planted
WRONG_KV_HEAD, SKIPPED_NORM, WRONG_ROPE, MASK_OFF_BY_ONE, RING_NO_WAIT = 5, 6, 7, 8, 9
SEES_SIBLING, SIBLING_IN_POOL, SIBLING_POSITION = 10, 11, 12
GEOMETRY = TINY["group2"]  # two kv heads, three layers
LENGTHS = [65, 63, 300]
UNORDERED_CLEAR, CLEAR_OVERTAKES, UNORDERED_WRITES = "word used with no order after its clear", "clear overtakes read", "unordered writes"
WRITTEN_TWICE = "word written twice"  # by a block so far ahead that it meets the generation again before its clear


def run(planted, seed=0, lengths=LENGTHS, check_order=False, fill_stale_slots=False, geometry=GEOMETRY, num_launches=1, rows_per_request=1):
    """(runner, gate report) of one step with the bug in it, the last of some. lengths: prefixes where requests have several rows."""
    weights = random_weights(geometry, 21)
    inputs = random_step(geometry, lengths, 21, rows_per_request=rows_per_request, lengths_are_prefix=rows_per_request > 1)
    if fill_stale_slots:  # what lies beyond a length is another sequence's KV, not NaN
        for buffer in (*inputs.k_buffers, *inputs.v_buffers):
            buffer[buffer.isnan()] = 0.5
    options = EmulationOptions(seed=seed, planted=planted, check_order=check_order)
    runner = Runner(geometry, weights, (inputs.rows,), 5, deadline_s=0.5, emulation=options, rows_per_request={inputs.rows: rows_per_request})
    outputs = [runner.run(inputs) for _ in range(num_launches)]
    return runner, gate(geometry, weights, [inputs], outputs[-1:])


def kinds_of(runner):
    return {race.kind for race in runner.kernel.last_report.races}


def test_without_a_bug_everything_is_green():
    for seed in range(4):
        runner, report = run(NONE, seed, check_order=True, fill_stale_slots=True)
        assert report.passed, str(report)
        assert runner.kernel.last_report.num_races == 0
        runner, report = run(NONE, seed, check_order=True, geometry=deep(6), num_launches=2)
        assert report.passed, str(report)
        assert runner.kernel.last_report.num_races == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_missing_fence_leaves_clears_in_no_order(seed):
    """The first launch has clears of words that it has read itself, as layer 3 clears the embedding's generation; the second also
    uses what it has cleared. Every unordered pair is one of a clear, in the generations."""
    runner, _ = run(MISSING_FENCE, seed, check_order=True, geometry=deep(6))
    assert kinds_of(runner) == {CLEAR_OVERTAKES, UNORDERED_WRITES}
    runner, report = run(MISSING_FENCE, seed, check_order=True, geometry=deep(6), num_launches=2)
    assert kinds_of(runner) == {UNORDERED_CLEAR, CLEAR_OVERTAKES, UNORDERED_WRITES}
    assert all(race.region.startswith("generation ") for race in runner.kernel.last_report.races)
    assert not report.passed, "words were read as they were before their clear"


def test_a_missing_fence_does_not_show_where_no_generation_comes_twice():
    """Three layers clear nothing that they use: the fence has nothing to order, and the numbers are right."""
    runner, report = run(MISSING_FENCE, check_order=True)
    assert report.passed and runner.kernel.last_report.num_races == 0


@pytest.mark.parametrize("seed", range(4))
def test_words_taken_unwritten_are_not_a_number(seed):
    """A word that nobody has written is a NaN in every type, and the gate takes none."""
    _, report = run(MISSING_AWAIT, seed)
    assert not report.passed
    hidden = report.figures[0]
    assert hidden.output == "hidden" and hidden.num_not_finite > 0, str(report)


def test_words_taken_unwritten_tell_nobody_that_clears_are_done():
    """The order of clears comes from words alone: who does not wait for them has none, with most schedules."""
    kinds = set()
    for seed in range(6):
        runner, report = run(MISSING_AWAIT, seed, check_order=True, geometry=deep(9), num_launches=2)
        assert not report.passed
        kinds |= kinds_of(runner)
    assert {UNORDERED_CLEAR, CLEAR_OVERTAKES} <= kinds <= {UNORDERED_CLEAR, CLEAR_OVERTAKES, UNORDERED_WRITES, WRITTEN_TWICE}


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
def test_wrong_tokens_miss_the_gate_at_every_length(planted, lengths):
    _, report = run(planted, lengths=lengths, fill_stale_slots=True)
    has_no_page = planted == OFF_BY_ONE_PAGE and lengths == [1]  # a lone token comes from the block itself, not from a page
    assert report.passed == has_no_page, str(report)


def test_reading_beyond_the_length_meets_poison():
    _, report = run(OFF_BY_ONE_PAGE)
    assert report.figures[0].output == "hidden"
    assert report.figures[0].num_not_finite > 0


# Rows of a request in one item, in several, each in its own; new tokens alone, in one run of 16 with old ones, and straddling two.
VERIFY = [("group1", 8), ("group2", 2), ("group2", 5), ("group5", 4), ("group8", 3), ("group12", 4)]
VERIFY_PREFIXES = [[0], [14], [65]]


@pytest.mark.parametrize("prefixes", VERIFY_PREFIXES, ids=str)
@pytest.mark.parametrize(("name", "rows_per_request"), VERIFY)
def test_verify_steps_without_a_bug_are_green(name, rows_per_request, prefixes):
    runner, report = run(NONE, lengths=prefixes, check_order=True, fill_stale_slots=True, geometry=TINY[name], rows_per_request=rows_per_request)
    assert report.passed, str(report)
    assert runner.kernel.last_report.num_races == 0


@pytest.mark.parametrize("prefixes", VERIFY_PREFIXES, ids=str)
@pytest.mark.parametrize(("name", "rows_per_request"), VERIFY)
@pytest.mark.parametrize("planted", [SEES_SIBLING, SIBLING_IN_POOL], ids=["sees a sibling", "sibling in the pool"])
def test_a_row_that_takes_its_siblings_wrongly_misses_the_gate(planted, name, rows_per_request, prefixes):
    """Layer 0's KV rows come before attention and stay right."""
    _, report = run(planted, lengths=prefixes, fill_stale_slots=True, geometry=TINY[name], rows_per_request=rows_per_request)
    figures = {figure.output: figure for figure in report.figures}
    assert figures["hidden"].ratio > 3, str(report)
    assert figures["k_rows[0]"].passed and figures["v_rows[0]"].passed, str(report)


@pytest.mark.parametrize("prefixes", [[0], [14]], ids=str)
@pytest.mark.parametrize(("name", "rows_per_request"), VERIFY)
def test_a_sibling_rotated_to_a_wrong_position_misses_the_gate(name, rows_per_request, prefixes):
    """Where new tokens are a good part of what a row sees: one key of many, off by one position, is within SGLang's own rounding."""
    _, report = run(SIBLING_POSITION, lengths=prefixes, geometry=TINY[name], rows_per_request=rows_per_request)
    figures = {figure.output: figure for figure in report.figures}
    assert figures["hidden"].ratio > 3 and not figures["k_rows[0]"].passed, str(report)
    assert figures["v_rows[0]"].passed, str(report)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "rows_per_request"), [case for case in VERIFY if case not in (("group1", 8), ("group2", 2))])
def test_a_sibling_read_from_the_pool_is_a_race_in_every_schedule(name, rows_per_request, seed):
    """Where a request's rows are several items, in several blocks: whether the read or the write comes first."""
    runner, report = run(SIBLING_IN_POOL, seed, lengths=[65], check_order=True, geometry=TINY[name], rows_per_request=rows_per_request)
    assert not report.passed
    races = runner.kernel.last_report.races
    assert races and all("_cache[" in race.region for race in races)


@pytest.mark.parametrize("seed", range(4))
def test_words_withheld_end_at_the_deadline_and_are_named(seed):
    """The first eight words of a row of the scaled stream are tile 0's; readers load four at a time."""
    with pytest.raises(DecodeStepFault) as fault:
        run(WITHHELD_SIGNAL, seed)
    message = re.fullmatch(
        r"decode_step stopped: rank 0, SM (\d), block (\d) waited (\d\.\d\d) s for word (\d+) of edge 'out_proj' of layer 0 "
        r"\(residual stream after attention\), which no block has written",
        str(fault.value),
    )
    assert message, str(fault.value)
    assert message[1] == message[2] and float(message[3]) >= 0.5
    row, word = divmod(int(message[4]), GEOMETRY.hidden // 2)
    assert row < len(LENGTHS) and word in (0, 4)


@pytest.mark.parametrize("seed", range(4))
def test_weights_used_before_they_landed_are_found(seed):
    """The emulation sees the ring misused, or the numbers are wrong."""
    try:
        runner, report = run(RING_NO_WAIT, seed, check_order=True)
    except RuntimeError as error:
        assert re.search("mbarrier|ring stage", str(error)), str(error)
    else:
        assert not report.passed or runner.kernel.last_report.num_races > 0
