"""Words that are data and flag at once, on the host dialect: fences, old and torn values, clears; each mistake is named.

Oracle: PTX's release and acquire patterns with fence.acq_rel, and its coherence order of one word, worked out by hand for each
kernel of selftest_words.cpp and selftest_clears.cpp.
"""

import pytest

from sgl_lowlatency import _C

SEEDS = range(24)
UNORDERED_CLEAR = "word used with no order after its clear"
CLEAR_OVERTAKES = "clear overtakes read"


def kinds_of(result):
    return {race["kind"] for race in result["races"]}


ORDERED = ["words", "words_own_lane", "words_outside_regions", "words_cumulativity", "words_progress", "handover", "clear_then_fence"]


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_programs_have_no_race_and_no_wrong_value(name):
    for seed in range(60):
        result = _C.emulation_selftest(name, seed)
        assert (result["status"], result["message"]) == ("ok", "")
        assert (result["num_races"], result["values"]) == (0, [0.0]), f"seed {seed}"


# name, races of every seed, the kind that all of them have
MESSAGES = [
    ("words_no_writer_fence", 32, "missing release"),
    ("words_no_reader_fence", 32, "missing acquire"),
    ("words_late_writer_fence", 32, "missing acquire"),  # somebody did release it, but not by this word
    ("words_early_reader_fence", 32, "missing acquire"),
    ("words_other_writer_fence", 31, "missing acquire"),  # lane 0 alone has a fence, and its own data is ordered
    ("words_other_reader_fence", 31, "missing acquire"),
]


@pytest.mark.parametrize("name, num_races, kind", MESSAGES)
def test_a_fence_missing_misplaced_or_of_another_lane_is_found_with_every_seed(name, num_races, kind):
    wrong = []
    for seed in SEEDS:
        result = _C.emulation_selftest(name, seed)
        assert (result["status"], result["num_races"]) == ("ok", num_races)
        assert kinds_of(result) == {kind}
        for race in result["races"]:
            assert race["region"] == "data"
            assert (race["first_block"], race["second_block"]) == (0, 1)
        wrong.append(result["values"][0])
    assert max(wrong) > 0, "no seed ever served the value before the write"
    assert min(wrong) < num_races, "no seed ever served a new value"


def test_a_fence_covers_other_lanes_only_by_a_barrier_before_it():
    for seed in SEEDS:
        result = _C.emulation_selftest("words_no_writer_sync", seed)
        assert result["num_races"] == 32
        assert kinds_of(result) <= {"missing release", "missing acquire", "write overtakes read"}


def test_a_fence_covers_other_warps_only_by_a_barrier_before_it():
    for seed in SEEDS:
        result = _C.emulation_selftest("words_cumulativity_no_barrier", seed)
        assert result["num_races"] == 2 * 95  # of 96 threads, the one that stores the word covers itself
        assert all(race["offset"] != 95 * 4 for race in result["races"])


def test_a_store_without_a_fence_ends_what_the_word_carried():
    missed = 0
    for seed in SEEDS:
        result = _C.emulation_selftest("replaced_publication", seed)
        unordered = {"missing acquire", "missing release"} & kinds_of(result)
        saw_first = result["values"][0] > 0
        assert saw_first or unordered, f"seed {seed}"
        missed += bool(unordered)
    assert missed > len(SEEDS) // 2


def test_plain_accesses_of_words_race_with_their_stores():
    for seed in SEEDS:
        (race,) = _C.emulation_selftest("load_plain_of_word", seed)["races"]
        assert race["kind"] == "missing release"
        (race,) = _C.emulation_selftest("store_plain_of_word", seed)["races"]
        assert race["kind"] == "unordered writes"


def test_vectors_tear_and_lag_but_no_word_goes_back():
    for seed in SEEDS:
        result = _C.emulation_selftest("torn_vectors", seed)
        assert (result["status"], result["num_races"]) == ("ok", 0), "an old value is no race"
        back, back_for_next, torn, old = result["values"]
        assert (back, back_for_next) == (0, 0)
        assert torn > 0 and old > 0, f"seed {seed}"


@pytest.mark.parametrize("name", ["handover_no_fence", "handover_fence_of_one_lane", "handover_no_barrier"])
def test_clears_that_nothing_orders_across_blocks_are_found_with_every_seed(name):
    wrong = 0
    for seed in SEEDS:
        result = _C.emulation_selftest(name, seed)
        assert kinds_of(result) == {UNORDERED_CLEAR, CLEAR_OVERTAKES}
        assert {race["region"] for race in result["races"]} == {"words"}
        wrong += result["values"][0]
    assert wrong > 0, "no seed ever served what lay there before a clear"


def test_a_clear_of_the_generation_in_use_is_found_with_every_seed():
    for seed in SEEDS:
        kinds = kinds_of(_C.emulation_selftest("handover_clear_too_early", seed))
        assert kinds & {UNORDERED_CLEAR, CLEAR_OVERTAKES}
        assert kinds <= {UNORDERED_CLEAR, CLEAR_OVERTAKES}


def test_a_clear_that_no_word_has_told_of_yet_is_found_with_every_seed():
    for seed in SEEDS:
        result = _C.emulation_selftest("handover_clear_too_late", seed)
        assert UNORDERED_CLEAR in kinds_of(result)
        assert result["values"][0] > 0


def test_a_generation_that_nobody_cleared_is_found_with_every_seed():
    for seed in SEEDS:
        result = _C.emulation_selftest("handover_no_clear", seed)
        assert kinds_of(result) == {"word written twice"}
        assert result["num_races"] == 6 * 3 * 64 * 4  # every word of the 6 layers after the first 4


def test_a_clear_after_the_fence_of_its_lane_is_not_covered_whichever_lane_it_is():
    for seed in SEEDS:
        result = _C.emulation_selftest("fence_then_clear", seed)
        assert result["num_races"] == 32
        assert kinds_of(result) == {UNORDERED_CLEAR}


# Two accesses of a vector in no order: name, kinds of either order
PAIRS = [
    ("clear_and_store", {UNORDERED_CLEAR, "unordered writes"}),
    ("clear_and_load", {UNORDERED_CLEAR, CLEAR_OVERTAKES}),
    ("clear_and_clear", {"unordered writes"}),
    ("store_and_store", {"word written twice"}),
]


@pytest.mark.parametrize("name, kinds", PAIRS)
def test_unordered_pairs_conflict_in_either_order(name, kinds):
    found = set()
    for seed in SEEDS:
        result = _C.emulation_selftest(name, seed)
        assert len(kinds_of(result)) == 1, f"seed {seed}"
        assert all(race["first_lane"] == race["second_lane"] == 3 for race in result["races"])
        found |= kinds_of(result)
    assert found == kinds, "a schedule is missing"


def test_data_over_data_is_a_mistake_even_of_one_thread():
    for seed in SEEDS:
        races = _C.emulation_selftest("store_then_store", seed)["races"]
        assert {race["kind"] for race in races} == {"word written twice"}
        assert (races[0]["offset"], races[0]["bytes"]) == (8, 4)
        assert _C.emulation_selftest("store_clear_store", seed)["num_races"] == 0


@pytest.mark.parametrize("name", ["words_no_reader_fence", "handover", "torn_vectors", "copy_async_weak_wait"])
def test_a_seed_replays_exactly(name):
    for seed in (0, 1, 2**63 + 5):
        assert _C.emulation_selftest(name, seed) == _C.emulation_selftest(name, seed)
