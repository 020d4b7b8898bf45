"""Kernels that are wrong on purpose end with a diagnosis that names the culprit, with every seed, and never hang."""

import re

import pytest

from sgl_lowlatency import _C

SEEDS = range(12)

# Self-test of selftest_misuse.cpp, selftest_copy_async.cpp or selftest_load_stage.cpp, and what the message must say (a regular expression).
MISUSE = [
    ("divergent_collectives", r"calls (shuffle|sync_warp) while other lanes of its warp wait in (sync_warp|shuffle)"),
    ("collective_after_exit", r"lane 7: exits while other lanes wait in shuffle|shuffle after lanes of its warp have exited"),
    ("barrier_in_divergent_warp", r"while other lanes of its warp wait in (a block barrier|sync_warp)"),
    ("barrier_after_warp_exit", r"barrier 0 with 64 threads can never complete: only 32 threads"),
    ("barrier_counts_differ", r"barrier 4 with (64|96) threads, but other warps wait in it with (64|96)"),
    ("barrier_count_not_of_warps", r"barrier 4 with 48 threads: not a multiple of 32"),
    ("mbarrier_too_many_arrivals", r"more than 1 arrivals in a phase"),
    ("mbarrier_uninitialised", r"mbarrier used without mbarrier_init"),
    ("mbarrier_no_barrier_after_init", r"warp 1 lane 1: mbarrier used (without mbarrier_init|with no barrier since)"),
    ("bulk_without_init_fence", r"bulk_load: no mbarrier_init_fence"),
    ("load_stage_misaligned", r"load_stage: the stage is not at a multiple of 1024 bytes"),
    ("load_stage_odd_part", r"load_stage: row 0, part 1, chunk 0 is outside the matrix"),
    ("load_stage_tall_row", r"load_stage: row 16 begins no tall stage"),
    ("load_stage_pair_beyond", r"load_stage: row 48, part 0, chunk 0 is outside the matrix"),
    ("load_stage_outside", r"load_stage: row 32, part 0, chunk 0 is outside the matrix"),
    ("bulk_in_flight_at_exit", r"block exits with 1 bulk loads in flight"),
    ("copy_async_never_waited_for", r"lane 4: exits with 1 copy_async_16 that it has not waited for"),
    ("copy_async_never_committed", r"lane 4: exits with 1 copy_async_16 that it has not waited for"),
    ("copy_async_misaligned", r"copy_async_16: address is not a multiple of its size"),
    ("copy_async_not_to_shared", r"copy_async_16: not in the block's shared memory"),
    ("shared_overrun", r"block 0 wrote shared byte 1029 of 1024"),
    ("misaligned_load", r"load_plain: address is not a multiple of its size"),
    ("exception", r"warp 0 lane 9: exception in the kernel: no such row"),
]


@pytest.mark.parametrize("name, message", MISUSE)
def test_misuse_is_diagnosed(name, message):
    for seed in SEEDS:
        result = _C.emulation_selftest(name, seed)
        assert result["status"] == "misuse"
        assert re.search(message, result["message"]), result["message"]


def test_a_deadlock_names_every_waiting_warp():
    for seed in SEEDS:
        result = _C.emulation_selftest("deadlock_barriers", seed)
        assert result["status"] == "deadlock"
        for block in (0, 1):
            assert f"block {block} warp 0: wait in barrier 1 (32 of 64 threads arrived)" in result["message"]
            assert f"block {block} warp 1: wait in barrier 2 (32 of 64 threads arrived)" in result["message"]


def test_pollers_without_a_deadline_are_given_up_and_named():
    result = _C.emulation_selftest("deadlock_mbarrier", 3)
    assert result["status"] == "deadlock"
    assert "only polling threads are left" in result["message"]
    assert "(1 arrivals, 0 bytes missing)" in result["message"]


def test_a_trap_ends_the_launch_and_the_next_one_is_sound():
    for seed in SEEDS:
        assert _C.emulation_selftest("trap", seed)["status"] == "trapped"
        assert _C.emulation_selftest("named_barriers", seed)["values"] == [0.0]
