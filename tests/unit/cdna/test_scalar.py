"""Scalar instructions against Python's integers. Oracle: the formulas of the CDNA3 instruction set, written out a second time on single values."""

import random

import pytest

from cdna.errors import UnknownInstruction
from cdna.single import run

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES = [0, 1, 2, 31, 32, 33, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 0x0010_0004, 0xDEAD_BEEF]


def signed(value, bits=32):
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def pairs():
    source = random.Random(1)
    return [(x, y) for x in EDGES for y in EDGES] + [(source.getrandbits(32), source.getrandbits(32)) for _ in range(50)]


def wraps(value):
    """scc of signed sums: whether 32 bits hold the value."""
    return int(not -(1 << 31) <= value < 1 << 31)


# mnemonic -> (x, y, scc) -> (result, scc after; None: as before)
TWO = {
    "s_add_u32": lambda x, y, c: (x + y, int(x + y > M32)),
    "s_addc_u32": lambda x, y, c: (x + y + c, int(x + y + c > M32)),
    "s_add_i32": lambda x, y, c: (x + y, wraps(signed(x) + signed(y))),
    "s_sub_u32": lambda x, y, c: (x - y, int(y > x)),
    "s_subb_u32": lambda x, y, c: (x - y - c, int(y + c > x)),
    "s_sub_i32": lambda x, y, c: (x - y, wraps(signed(x) - signed(y))),
    "s_mul_i32": lambda x, y, c: (x * y, None),
    "s_mul_hi_u32": lambda x, y, c: (x * y // 2**32, None),
    "s_mul_hi_i32": lambda x, y, c: (signed(x) * signed(y) // 2**32, None),
    "s_and_b32": lambda x, y, c: (x & y, int(x & y != 0)),
    "s_or_b32": lambda x, y, c: (x | y, int(x | y != 0)),
    "s_xor_b32": lambda x, y, c: (x ^ y, int(x != y)),
    "s_andn2_b32": lambda x, y, c: (x & (M32 - y), int(x & (M32 - y) != 0)),
    "s_orn2_b32": lambda x, y, c: (x | (M32 - y), int(x | (M32 - y) != 0)),
    "s_nand_b32": lambda x, y, c: (M32 - (x & y), int(x & y != M32)),
    "s_nor_b32": lambda x, y, c: (M32 - (x | y), int(x | y != M32)),
    "s_xnor_b32": lambda x, y, c: (M32 - (x ^ y), int(x ^ y != M32)),
    "s_lshl_b32": lambda x, y, c: (x * 2 ** (y % 32), int(x * 2 ** (y % 32) % 2**32 != 0)),
    "s_lshr_b32": lambda x, y, c: (x // 2 ** (y % 32), int(x // 2 ** (y % 32) != 0)),
    "s_ashr_i32": lambda x, y, c: (signed(x) // 2 ** (y % 32), int(signed(x) // 2 ** (y % 32) != 0)),
    "s_min_u32": lambda x, y, c: (min(x, y), int(x <= y)),
    "s_max_u32": lambda x, y, c: (max(x, y), int(x >= y)),
    "s_min_i32": lambda x, y, c: (min(signed(x), signed(y)), int(signed(x) <= signed(y))),
    "s_max_i32": lambda x, y, c: (max(signed(x), signed(y)), int(signed(x) >= signed(y))),
    "s_lshl2_add_u32": lambda x, y, c: (4 * x + y, int(4 * x + y > M32)),
    "s_absdiff_i32": lambda x, y, c: (abs(signed(x) - signed(y)), int(x != y)),
    "s_bfm_b32": lambda x, y, c: ((2 ** (x % 32) - 1) * 2 ** (y % 32), None),
    "s_pack_ll_b32_b16": lambda x, y, c: (x % 2**16 + y % 2**16 * 2**16, None),
}


@pytest.mark.parametrize("mnemonic", TWO)
def test_two_sources(mnemonic):
    for x, y in pairs():
        for carry in (0, 1):
            w = run(f"{mnemonic} s4, s2, s3", s={2: x, 3: y}, scc=carry)
            result, scc = TWO[mnemonic](x, y, carry)
            assert (w.s[4], w.scc) == (result % 2**32, carry if scc is None else scc), (x, y, carry)


@pytest.mark.parametrize("kind", ["i32", "u32"])
@pytest.mark.parametrize("relation", ["eq", "lg", "lt", "le", "gt", "ge"])
def test_comparisons(relation, kind):
    tests = {"eq": "==", "lg": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    for x, y in pairs():
        first, second = (signed(x), signed(y)) if kind == "i32" else (x, y)
        assert run(f"s_cmp_{relation}_{kind} s2, s3", s={2: x, 3: y}).scc == int(eval(f"{first} {tests[relation]} {second}"))


def test_comparisons_with_an_immediate():
    assert run("s_cmpk_lg_i32 s1, 0xfb50", s={1: M32 + 1 - 0x4B0}).scc == 0
    assert run("s_cmpk_eq_u32 s1, 0xfb50", s={1: 0xFB50}).scc == 1
    assert run("s_cmp_lg_u64 s[2:3], 0", s={2: 0, 3: 1}).scc == 1
    assert run("s_cmp_eq_u64 s[2:3], 0", s={2: 0, 3: 1}).scc == 0


def test_immediates_are_extended_by_their_sign():
    assert run("s_movk_i32 s0, 0xfff0").s[0] == M32 - 15
    assert run("s_addk_i32 s0, 0xffff", s={0: 5}).s[0] == 4
    assert run("s_mulk_i32 s0, 0xfffe", s={0: 5}).s[0] == 2**32 - 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s_mov_b64 s[4:5], s[2:3]", 0x1234_5678_9ABC_DEF0),
        ("s_not_b64 s[4:5], s[2:3]", M64 - 0x1234_5678_9ABC_DEF0),
        ("s_lshl_b64 s[4:5], s[2:3], 36", 0xABCD_EF00_0000_0000 & M64 | (0x1234_5678_9ABC_DEF0 << 36) & M64),
        ("s_lshr_b64 s[4:5], s[2:3], 4", 0x0123_4567_89AB_CDEF),
        ("s_bfe_u64 s[4:5], s[2:3], 0x200010", 0x5678_9ABC),
        ("s_bfe_i64 s[4:5], s[2:3], 0x200000", M64 + 1 + signed(0x9ABC_DEF0)),
        ("s_and_b64 s[4:5], s[2:3], 0xf0", 0xF0),
        ("s_or_b64 s[4:5], s[2:3], 0x80000000", 0x1234_5678_9ABC_DEF0),  # an unsigned literal: no sign to extend
        ("s_mov_b64 s[4:5], -1", M64),
        ("s_mov_b64 s[4:5], 1.0", 0x3FF0_0000_0000_0000),
        ("s_cselect_b64 s[4:5], s[2:3], 0", 0x1234_5678_9ABC_DEF0),
        ("s_brev_b64 s[4:5], s[2:3]", int(f"{0x1234_5678_9ABC_DEF0:064b}"[::-1], 2)),
    ],
)
def test_64_bits(text, expected):
    w = run(text, s={2: 0x9ABC_DEF0, 3: 0x1234_5678}, scc=1)
    assert w.s[4] | w.s[5] << 32 == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s_bcnt1_i32_b64 s4, s[2:3]", 9),
        ("s_ff1_i32_b64 s4, s[2:3]", 4),
        ("s_ff1_i32_b32 s4, s6", M32),
        ("s_flbit_i32_b32 s4, s3", 3),
        ("s_flbit_i32_b64 s4, s[2:3]", 3),
        ("s_sext_i32_i8 s4, s2", M32 - 15),
        ("s_abs_i32 s4, s7", 7),
        ("s_bfe_u32 s4, s2, 0x40004", 0xF),
        ("s_bfe_i32 s4, s2, 0x40004", M32),
        ("s_cmov_b32 s4, s3", 0x1000_0000),
        ("s_bitset1_b32 s6, 3", None),
    ],
)
def test_counts_and_fields(text, expected):
    w = run(text, s={2: 0x0000_00F0 | 0xF000, 3: 0x1000_0000, 6: 0, 7: M32 - 6}, scc=1)
    assert w.s[6] == 8 if expected is None else w.s[4] == expected


def test_bit_tests():
    assert run("s_bitcmp1_b32 s2, 5", s={2: 32}).scc == 1
    assert run("s_bitcmp0_b32 s2, 5", s={2: 32}).scc == 0
    assert run("s_bitcmp1_b64 s[2:3], 33", s={2: 0, 3: 2}).scc == 1


@pytest.mark.parametrize(
    ("operation", "function"),
    [
        ("and", lambda x, e: x & e),
        ("or", lambda x, e: x | e),
        ("xor", lambda x, e: x ^ e),
        ("andn1", lambda x, e: ~x & e),
        ("andn2", lambda x, e: x & ~e),
        ("orn2", lambda x, e: x | ~e & M64),
    ],
)
def test_exec_is_saved_and_changed(operation, function):
    old, source = 0xFF00_FF00_0F0F_3333, 0x0FF0_00FF_FFFF_0000
    w = run(f"s_{operation}_saveexec_b64 s[4:5], s[2:3]", s={2: source & M32, 3: source >> 32}, exec_mask=old)
    assert (w.s[4] | w.s[5] << 32, w.exec, w.scc) == (old, function(source, old) & M64, 1)
    assert [lane for lane in range(64) if w.exec >> lane & 1] == list(w.lanes)


def test_halves_of_vcc_and_exec():
    w = run(["s_mov_b32 vcc_lo, 7", "s_mov_b32 vcc_hi, 9", "s_mov_b32 exec_hi, 1", "s_mov_b32 m0, 0x1234"])
    assert (w.vcc, w.exec, w.s[124]) == (7 | 9 << 32, 1 << 32 | M32, 0x1234)


def test_what_is_unknown_is_named():
    with pytest.raises(UnknownInstruction, match=r"s_quadmask_b32 s0, s1 at 0x0 has no entry"):
        run("s_quadmask_b32 s0, s1")
    with pytest.raises(UnknownInstruction, match="scalar operand 'ttmp3'"):
        run("s_mov_b32 s0, ttmp3")
    with pytest.raises(UnknownInstruction, match="modifier clamp is not modelled for it"):
        run("v_add_u32_e64 v0, v1, v2 clamp")
