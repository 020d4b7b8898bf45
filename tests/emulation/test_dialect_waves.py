"""Waves of 64 on the host dialect: the MFMA's layout, copies that a lane awaits for itself, a barrier that orders shared memory alone.

Oracle: the CDNA3 and CDNA4 instruction sets, worked out by hand for each kernel of selftest_waves.cpp.
"""

import pytest

from sgl_lowlatency import _C

SEEDS = range(24)


def test_the_mfma_is_the_product():
    result = _C.emulation_selftest("waves_mfma", 1)
    assert (result["status"], result["values"]) == ("ok", [0.0] * 256)


def test_ballots_and_shuffles_reach_all_lanes():
    for seed in SEEDS:
        result = _C.emulation_selftest("waves_ballot", seed)
        assert (result["status"], result["values"]) == ("ok", [0.0, 0.0])


def test_awaited_copies_deliver_every_byte():
    for seed in SEEDS:
        result = _C.emulation_selftest("waves_copies", seed)
        assert (result["status"], result["num_races"], result["values"]) == ("ok", 0, [0.0])


def test_a_wait_for_too_few_copies_is_found_with_every_seed():
    for seed in SEEDS:
        kinds = {race["kind"] for race in _C.emulation_selftest("waves_copies_weak_wait", seed)["races"]}
        assert "shared read before its asynchronous copy was awaited" in kinds


def test_a_barrier_without_the_other_waves_wait_publishes_too_early():
    """clang puts no vmcnt(0) in front of s_barrier: a release behind it covers its own wave's stores alone."""
    stale = 0
    for seed in SEEDS:
        assert _C.emulation_selftest("waves_publish", seed)["num_races"] == 0
        result = _C.emulation_selftest("waves_publish_without_wait", seed)
        assert {race["kind"] for race in result["races"]} == {"missing release"}
        stale += result["values"][0]
    assert stale > 0


@pytest.mark.parametrize("name", ["waves_other_mma"])
def test_calls_of_another_warp_size_are_misuse(name):
    result = _C.emulation_selftest(name, 0)
    assert result["status"] == "misuse"
    assert "mma_m16n8k16: this machine's warps have 64 lanes" in result["message"]
