"""copy_async_16 on the host dialect: copies land late, by group; what reads them too early is found.

Oracle: PTX's cp.async.commit_group and cp.async.wait_group, worked out by hand for each kernel of selftest_copy_async.cpp.
"""

import pytest

from sgl_lowlatency import _C

SEEDS = range(24)
UNFINISHED = "shared read before its asynchronous copy was awaited"
OVERWRITE = "bulk load over shared memory in use"


def kinds_of(result):
    return {race["kind"] for race in result["races"]}


@pytest.mark.parametrize("name", ["copy_async", "copy_async_rows"])
def test_awaited_copies_deliver_every_byte(name):
    for seed in range(60):
        result = _C.emulation_selftest(name, seed)
        assert (result["status"], result["message"]) == ("ok", "")
        assert (result["num_races"], result["values"]) == (0, [0.0])


@pytest.mark.parametrize("name", ["copy_async_no_wait", "copy_async_weak_wait", "copy_async_no_barrier"])
def test_reading_too_early_gives_wrong_values_with_every_seed(name):
    for seed in SEEDS:
        result = _C.emulation_selftest(name, seed)
        assert result["status"] == "ok"
        assert result["values"][0] > 0


def test_copies_land_late_and_groups_in_order():
    old = poison = early = 0
    for seed in SEEDS:
        result = _C.emulation_selftest("copy_async_landing", seed)
        out_of_order, *seen = result["values"]
        assert out_of_order == 0
        assert seen[0] + seen[1] > 0, f"seed {seed}: every copy landed at once"
        old, poison, early = old + seen[0], poison + seen[1], early + seen[2]
    assert old > 0 and poison > 0 and early > 0


# own_warp: a lane waits for its own row, but the other lanes of its warp get bytes of it as well
@pytest.mark.parametrize("name", ["copy_async_rows_no_wait", "copy_async_own_warp_no_sync"])
def test_ldmatrix_of_copies_not_seen_to_land_is_found_with_every_seed(name):
    for seed in SEEDS:
        assert UNFINISHED in kinds_of(_C.emulation_selftest(name, seed))
        assert _C.emulation_selftest("copy_async_own_warp", seed)["num_races"] == 0


@pytest.mark.parametrize("name", ["copy_async_rows_no_barrier", "copy_async_rows_no_read_barrier"])
def test_copies_and_ldmatrix_in_no_order_are_found_with_every_seed(name):
    for seed in SEEDS:
        result = _C.emulation_selftest(name, seed)
        assert result["num_races"] >= 32
        assert kinds_of(result) <= {UNFINISHED, OVERWRITE}


def test_copies_of_written_memory_are_found():
    for seed in SEEDS:
        (race,) = _C.emulation_selftest("copy_async_source_written", seed)["races"]
        assert race["kind"] == "constant load of written memory"
        assert (race["offset"], race["bytes"]) == (16, 16), "the neighbour that nobody wrote is fine"
