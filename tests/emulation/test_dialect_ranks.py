"""Several ranks on the host dialect: system scope orders them, gpu scope does not, and each half that is missing is named.

Oracle: PTX's morally strong relation (a release reaches an acquire when the scope of each includes the other's thread) and causality
order, worked out by hand for each kernel of selftest_ranks.cpp.
"""

import pytest

from sgl_lowlatency import _C

SEEDS = range(24)
NARROW = "scope that does not reach another rank"

ORDERED = ["ranks_message", "ranks_words", "ranks_relay", "ranks_kernels", "ranks_even", "ranks_slow", "ranks_multicast"]


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_programs_have_no_race_and_no_wrong_value(name):
    for seed in range(60):
        result = _C.emulation_selftest(name, seed)
        assert (result["status"], result["message"]) == ("ok", "")
        assert (result["num_races"], result["races"], result["values"]) == (0, [], [0.0]), f"seed {seed}"


# name, regions with races, what is missing between rank 0's store of data and rank 1's load
UNORDERED = [
    ("ranks_gpu_release", {"data"}, {NARROW}),
    ("ranks_gpu_acquire", {"data"}, {"missing acquire"}),
    ("ranks_words_gpu_writer_fence", {"data"}, {NARROW}),
    ("ranks_words_gpu_reader_fence", {"data"}, {"missing acquire"}),
]


@pytest.mark.parametrize(("name", "regions", "missing"), UNORDERED)
def test_gpu_scope_is_not_enough_between_ranks(name, regions, missing):
    """Each would be ordered within a rank: test_dialect_ordering.py, test_dialect_words.py."""
    wrong = []
    for seed in SEEDS:
        result = _C.emulation_selftest(name, seed)
        assert (result["status"], result["num_races"]) == ("ok", 32), f"seed {seed}"
        for race in result["races"]:
            assert race["region"] in regions and race["missing"] in missing and race["kind"] in missing
            assert (race["first_rank"], race["second_rank"]) == (0, 1)
        wrong.append(result["values"][0])
    assert max(wrong) > 0, "no seed ever served the value before the write"
    assert min(wrong) < 32, "no seed ever served a new value"


@pytest.mark.parametrize("name", ["ranks_words_gpu_store", "ranks_words_gpu_load"])
def test_words_of_gpu_scope_race_with_those_of_another_rank(name):
    for seed in SEEDS:
        result = _C.emulation_selftest(name, seed)
        flags = [race for race in result["races"] if race["region"] == "flags"]
        assert flags and {race["kind"] for race in flags} == {NARROW}, f"seed {seed}"
        assert {(race["first_rank"], race["second_rank"]) for race in flags} <= {(0, 1), (1, 0)}


def test_a_trap_ends_its_own_rank_and_is_named():
    for seed in SEEDS:
        result = _C.emulation_selftest("ranks_trap", seed)
        assert (result["status"], result["message"]) == ("trapped", "trap of rank 1")
        assert (result["values"][0], result["values"][2]) == (50.0, 50.0)
        assert result["values"][1] in (3.0, 4.0)  # lane 0 counts before or after lane 17 traps


def test_a_kernel_that_does_not_wait_for_the_one_in_front_is_misuse():
    for seed in SEEDS:
        result = _C.emulation_selftest("ranks_kernel_no_await", seed)
        assert result["status"] == "misuse"
        assert "rank 0 block" in result["message"] and "load_plain before await_previous_launch, in a kernel behind another" in result["message"]


def test_a_slow_rank_takes_its_time():
    for seed in range(8):
        even, slow = (_C.emulation_selftest(name, seed)["virtual_ns"] for name in ("ranks_even", "ranks_slow"))
        assert slow > 2 * even


def test_a_rank_that_never_comes_leaves_the_others_named():
    result = _C.emulation_selftest("ranks_dead", 1)
    assert result["status"] == "deadlock"
    assert "only polling threads are left" in result["message"] and "rank 0 block 0 warp 0: all lanes poll" in result["message"]


@pytest.mark.parametrize("name", ["ranks_gpu_release", "ranks_kernels", "ranks_trap", "ranks_slow"])
def test_a_seed_replays_exactly(name):
    for seed in (0, 1, 2**63 + 5):
        assert _C.emulation_selftest(name, seed) == _C.emulation_selftest(name, seed)
