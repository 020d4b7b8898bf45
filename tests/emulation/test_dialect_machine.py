"""The host dialect's machine: matrix fragments, shuffles, mbarriers, the bulk-copy ring, barriers, time.

Oracle: PTX's formulas written out here or in selftest_machine.cpp, and exact integer arithmetic in Python.
"""

import math

import pytest

from sgl_lowlatency import _C

SEEDS = range(8)


def run(name, seed):
    result = _C.emulation_selftest(name, seed)
    assert (result["status"], result["message"]) == ("ok", "")
    assert result["num_races"] == 0
    return result["values"]


def matrix(values, rows, columns):
    assert len(values) == rows * columns
    return [values[row * columns : (row + 1) * columns] for row in range(rows)]


def test_mma_m16n8k16_equals_the_exact_product():
    for seed in SEEDS:
        values = run("mma", seed)
        a, b = matrix(values[:256], 16, 16), matrix(values[256:384], 16, 8)
        c, d = matrix(values[384:512], 16, 8), matrix(values[512:], 16, 8)
        assert len({x for row in a + b for x in row}) > 20, "the operands are too regular to tell layouts apart"
        expected = [[c[m][n] + sum(a[m][k] * b[k][n] for k in range(16)) for n in range(8)] for m in range(16)]
        assert d == expected  # small integers: exact in fp32


def test_ldmatrix_x4_gives_lane_l_the_pair_l_mod_4_of_row_l_div_4():
    for seed in SEEDS:
        values = run("ldmatrix", seed)
        for lane in range(32):
            for register in range(4):
                row, column = register * 8 + lane // 4, lane % 4 * 2
                at = (lane * 4 + register) * 2
                assert values[at : at + 2] == [row * 8 + column, row * 8 + column + 1]


def test_shuffles():
    for seed in SEEDS:
        rows = matrix(run("shuffles", seed), 33, 32)
        for mask in range(32):
            assert rows[mask] == [float(lane ^ mask) for lane in range(32)]
        assert rows[32] == [100.0 + (5 * lane + 3) % 32 for lane in range(32)]


def test_reductions_and_popcount():
    for seed in SEEDS:
        operands, largest, least, either, counts = ([int(x) for x in row] for row in matrix(run("reductions", seed), 5, 32))
        assert len(set(operands)) == 32 and max(operands) > 2**31
        assert largest == [max(operands)] * 32 and least == [min(operands)] * 32
        expected = 0
        for lane in range(0, 32, 15):
            expected |= operands[lane]
        assert either == [expected] * 32 and expected != 2**32 - 1
        assert counts == [operand.bit_count() for operand in operands]


def test_mbarrier_phases_parities_and_byte_counts():
    for seed in SEEDS:
        assert run("mbarrier_phases", seed) == [1.0] * 12


def test_ring_hand_over_delivers_every_tile():
    for seed in range(24):
        assert run("ring", seed) == [0.0]


@pytest.mark.parametrize("name", [
    "load_stage", "load_stage_two_parts", "load_stage_four_parts", "load_stage_past_k", "load_stage_fp8", "load_stage_tall",
    "load_stage_pair", "load_stage_pair_of_parts", "load_stage_fp4_pair", "load_stage_fp4_pair_of_parts", "load_stage_wide",
])  # fmt: skip
def test_a_stage_is_the_box_as_the_copy_engine_lays_it_out(name):
    for seed in SEEDS:
        assert run(name, seed) == [0.0]


def test_reading_a_stage_before_its_bytes_arrived_is_found():
    for seed in range(24):
        result = _C.emulation_selftest("ring_read_early", seed)
        assert "shared read before bulk load completed" in {race["kind"] for race in result["races"]}
        assert result["values"][0] > 0, "an early read never gave old or poisoned data"


def test_handing_a_stage_back_before_reading_it_is_found():
    for seed in range(24):
        result = _C.emulation_selftest("ring_release_early", seed)
        assert {race["kind"] for race in result["races"]} <= {
            "bulk load over shared memory in use",
            "shared read before bulk load completed",
        }
        assert result["num_races"] > 0


def test_named_barriers_pair_independent_teams():
    for seed in SEEDS:
        assert run("named_barriers", seed) == [0.0]


def test_a_deadline_of_seconds_expires_in_virtual_time():
    for seed in SEEDS:
        result = _C.emulation_selftest("deadline", seed)
        assert (result["status"], result["message"]) == ("trapped", "trap")
        (waited_ns,) = result["values"]
        assert 5e9 < waited_ns < 5.1e9
        assert result["slices"] < 20_000


def test_pause_takes_its_time_and_time_never_runs_back():
    for seed in SEEDS:
        around_ns, backwards = run("pause", seed)
        assert 1e6 <= around_ns < 3e6
        assert backwards == 0


def test_shared_memory_is_poisoned_at_every_launch():
    for _ in range(2):  # the kernel writes it; the next launch must not see that
        assert all(math.isnan(value) for value in run("poisoned_shared", 0))


def test_an_unknown_self_test_is_refused():
    with pytest.raises(ValueError, match="no self-test named nonsense"):
        _C.emulation_selftest("nonsense", 0)
