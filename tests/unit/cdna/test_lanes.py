"""Data that crosses lanes. Oracle: the source lane of each control, written as a formula of one lane."""

import numpy as np
import pytest

from cdna.single import run

U, F = np.uint32, np.float32
LANE = np.arange(64, dtype=U)
M32 = (1 << 32) - 1

# control -> (lane) -> source lane, or None where there is none
CONTROLS = {
    "quad_perm:[1,0,3,2]": lambda n: n ^ 1,
    "quad_perm:[3,3,0,1]": lambda n: n // 4 * 4 + (3, 3, 0, 1)[n % 4],
    "row_mirror": lambda n: n // 16 * 16 + 15 - n % 16,
    "row_half_mirror": lambda n: n // 8 * 8 + 7 - n % 8,
    "row_shr:1": lambda n: n - 1 if n % 16 >= 1 else None,
    "row_shr:8": lambda n: n - 8 if n % 16 >= 8 else None,
    "row_shl:3": lambda n: n + 3 if n % 16 < 13 else None,
    "row_ror:5": lambda n: n // 16 * 16 + (n % 16 - 5) % 16,
    "row_newbcast:7": lambda n: n // 16 * 16 + 7,
    "row_bcast:15": lambda n: n // 16 * 16 - 1 if n >= 16 else None,
    "row_bcast:31": lambda n: 31 if n >= 32 else None,
}


@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
@pytest.mark.parametrize("control", CONTROLS)
def test_data_parallel_primitives(control, bound):
    x, old = LANE + U(100), np.full(64, 7, U)
    w = run(f"v_mov_b32_dpp v1, v0 {control} row_mask:0xf bank_mask:0xf{bound}", v={0: x, 1: old})
    sources = [CONTROLS[control](n) for n in range(64)]
    expected = [x[source] if source is not None else (0 if bound else 7) for source in sources]
    assert list(w.v[1]) == expected


def test_masks_of_rows_and_banks_choose_what_is_written():
    w = run("v_mov_b32_dpp v1, v0 row_mirror row_mask:0xa bank_mask:0x3 bound_ctrl:1", v={0: LANE, 1: np.full(64, 99, U)})
    for n in range(64):
        chosen = n // 16 in (1, 3) and n % 16 // 4 in (0, 1)
        assert w.v[1][n] == (n // 16 * 16 + 15 - n % 16 if chosen else 99)


@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
def test_inactive_lanes_are_no_source(bound):
    mask = 0x5555_5555_5555_5555
    w = run(f"v_mov_b32_dpp v1, v0 quad_perm:[1,1,2,2] row_mask:0xf bank_mask:0xf{bound}", v={0: LANE, 1: np.full(64, 99, U)}, exec_mask=mask)
    for n in range(64):
        if n % 2:
            assert w.v[1][n] == 99
        else:
            assert w.v[1][n] == (n if n % 4 == 2 else (0 if bound else 99))


def test_a_sum_of_a_row_in_place():
    """The source is the destination too: the old values are read."""
    x = np.random.default_rng(0).standard_normal(64).astype(F)
    w = run([f"v_add_f32_dpp v0, v0, v0 {c} row_mask:0xf bank_mask:0xf bound_ctrl:1" for c in list(CONTROLS)[:1] + ["row_half_mirror"]], v={0: x})
    pairs = x + x[LANE ^ 1]
    assert (w.vf[0] == pairs + pairs[LANE // 8 * 8 + 7 - LANE % 8]).all()


def test_permutations_through_lds():
    where = np.random.default_rng(1).permutation(64).astype(U)
    assert (run("ds_bpermute_b32 v2, v0, v1", v={0: where * U(4), 1: LANE + U(5)}).v[2] == where + 5).all()
    assert (run("ds_bpermute_b32 v2, v0, v1 offset:8", v={0: where * U(4), 1: LANE}).v[2] == (where + 2) % 64).all()
    pushed = run("ds_permute_b32 v2, v0, v1", v={0: where * U(4), 1: LANE + U(5)}).v[2]
    assert (pushed[where] == LANE + 5).all()
    half = run("ds_bpermute_b32 v2, v0, v1", v={0: (LANE ^ U(32)) * U(4), 1: LANE + U(5), 2: np.zeros(64, U)}, exec_mask=M32).v[2]
    assert (half == 0).all()  # the upper half is inactive: it is no source and is not written


@pytest.mark.parametrize(
    ("swizzle", "source"),
    [
        ("swizzle(SWAP,4)", lambda n: n ^ 4),
        ("swizzle(REVERSE,8)", lambda n: n // 8 * 8 + 7 - n % 8),
        ("swizzle(BROADCAST,8,3)", lambda n: n // 8 * 8 + 3),
        ("swizzle(QUAD_PERM,2,1,0,3)", lambda n: n // 4 * 4 + (2, 1, 0, 3)[n % 4]),
        ('swizzle(BITMASK_PERM,"01pip")', lambda n: n // 32 * 32 + (n % 32 & 0b00101 | 0b01000 | (n & 2 ^ 2))),
    ],
)
def test_swizzles(swizzle, source):
    w = run(f"ds_swizzle_b32 v1, v0 offset:{swizzle}", v={0: LANE})
    assert list(w.v[1]) == [source(n) for n in range(64)]


def test_to_and_from_scalars():
    x = LANE * U(3)
    assert run("v_readfirstlane_b32 s4, v0", v={0: x}, exec_mask=0b1100).s[4] == 6
    assert run("v_readlane_b32 s4, v0, s2", v={0: x}, s={2: 64 + 9}).s[4] == 27
    w = run("v_writelane_b32 v0, s3, 5", v={0: x}, s={3: 77}, exec_mask=1)
    assert w.v[0][5] == 77 and (np.delete(w.v[0], 5) == np.delete(x, 5)).all()


def test_counts_of_lower_lanes():
    mask = 0xF0F0_1234_8000_0001
    w = run(["v_mbcnt_lo_u32_b32 v1, s2, 0", "v_mbcnt_hi_u32_b32 v1, s3, v1"], s={2: mask & M32, 3: mask >> 32})
    assert list(w.v[1]) == [bin(mask & ((1 << n) - 1)).count("1") for n in range(64)]
    varying = run("v_mbcnt_hi_u32_b32 v1, v0, v2", v={0: LANE, 2: LANE})
    assert list(varying.v[1]) == [n + bin(n & ((1 << max(0, n - 32)) - 1)).count("1") for n in range(64)]


def test_swaps_of_rows():
    x, y = LANE, LANE + U(100)
    w = run("v_permlane32_swap_b32_e32 v0, v1", v={0: x, 1: y})
    assert list(w.v[0]) == [*range(32), *range(100, 132)] and list(w.v[1]) == [*range(32, 64), *range(132, 164)]
    w = run("v_permlane16_swap_b32_e32 v0, v1", v={0: x, 1: y})
    assert list(w.v[0]) == [*range(16), *range(100, 116), *range(32, 48), *range(132, 148)]
    assert list(w.v[1]) == [*range(16, 32), *range(116, 132), *range(48, 64), *range(148, 164)]
    w = run("v_swap_b32 v0, v1", v={0: x, 1: y})
    assert (w.v[0] == y).all() and (w.v[1] == x).all()
