"""Vector arithmetic, lane by lane. Oracle: the same operation on single Python integers, on numpy's f32, or on exact fractions."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from cdna.single import run

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
U, F = np.uint32, np.float32
EDGES = np.array([0, 1, 2, 15, 16, 31, 32, 33, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFE, 0xFFFF_FFFF], np.uint64)
FLOATS = np.array([0.0, -0.0, 1.0, -1.5, 3.25, 1e-40, -1e-38, 1e38, -3e38, np.inf, -np.inf, np.nan, 2**24 + 2, 0.1, -7.75, 123456.78], F)


def integers(seed, count=3):
    """count registers of edges and random values."""
    source = np.random.default_rng(seed)
    picked = source.permuted(np.tile(EDGES, (count, 4)), axis=1)
    return [np.where(source.random(64) < 0.5, row, source.integers(0, 2**32, 64, np.uint64)).astype(U) for row in picked]


def floats(seed, count=3):
    source = np.random.default_rng(seed)
    return [np.where(source.random(64) < 0.5, source.choice(FLOATS, 64), source.standard_normal(64).astype(F) * F(100)) for _ in range(count)]


def signed(x, bits=32):
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


def field(x, offset, width):
    return x >> offset % 32 & (1 << width % 32) - 1


def permuted(x, y, selector):
    pool = struct.pack("<II", y, x)
    result = bytearray()
    for pick in struct.pack("<I", selector):
        if pick < 8:
            result.append(pool[pick])
        elif pick < 12:
            result.append(255 * (pool[2 * (pick - 8) + 1] >> 7))
        else:
            result.append(0 if pick == 12 else 255)
    return struct.unpack("<I", result)[0]


INTEGERS = {
    "v_add_u32_e32 v3, v0, v1": lambda x, y, z: x + y,
    "v_sub_u32_e32 v3, v0, v1": lambda x, y, z: x - y,
    "v_subrev_u32_e32 v3, v0, v1": lambda x, y, z: y - x,
    "v_and_b32_e32 v3, v0, v1": lambda x, y, z: x & y,
    "v_or_b32_e32 v3, v0, v1": lambda x, y, z: x | y,
    "v_xor_b32_e32 v3, v0, v1": lambda x, y, z: x ^ y,
    "v_not_b32_e32 v3, v0": lambda x, y, z: ~x,
    "v_lshlrev_b32_e32 v3, v0, v1": lambda x, y, z: y << x % 32,
    "v_lshrrev_b32_e32 v3, v0, v1": lambda x, y, z: y >> x % 32,
    "v_ashrrev_i32_e32 v3, v0, v1": lambda x, y, z: signed(y) >> x % 32,
    "v_lshlrev_b16_e32 v3, v0, v1": lambda x, y, z: (y << x % 16) % 65536,
    "v_lshrrev_b16_e32 v3, v0, v1": lambda x, y, z: y % 65536 >> x % 16,
    "v_mul_lo_u32 v3, v0, v1": lambda x, y, z: x * y,
    "v_mul_hi_u32 v3, v0, v1": lambda x, y, z: x * y >> 32,
    "v_mul_hi_i32 v3, v0, v1": lambda x, y, z: signed(x) * signed(y) >> 32,
    "v_mul_u32_u24_e32 v3, v0, v1": lambda x, y, z: x % 2**24 * (y % 2**24),
    "v_mul_i32_i24_e32 v3, v0, v1": lambda x, y, z: signed(x % 2**24, 24) * signed(y % 2**24, 24),
    "v_mul_hi_u32_u24_e32 v3, v0, v1": lambda x, y, z: x % 2**24 * (y % 2**24) >> 32,
    "v_max_u32_e32 v3, v0, v1": lambda x, y, z: max(x, y),
    "v_min_i32_e32 v3, v0, v1": lambda x, y, z: min(signed(x), signed(y)),
    "v_max_i32_e32 v3, v0, v1": lambda x, y, z: max(signed(x), signed(y)),
    "v_bfrev_b32_e32 v3, v0": lambda x, y, z: int(f"{x:032b}"[::-1], 2),
    "v_ffbh_u32_e32 v3, v0": lambda x, y, z: 32 - x.bit_length() if x else -1,
    "v_ffbl_b32_e32 v3, v0": lambda x, y, z: (x & -x).bit_length() - 1,
    "v_bcnt_u32_b32 v3, v0, v1": lambda x, y, z: bin(x).count("1") + y,
    "v_bfm_b32 v3, v0, v1": lambda x, y, z: (1 << x % 32) - 1 << y % 32,
    "v_lshl_add_u32 v3, v0, v1, v2": lambda x, y, z: (x << y % 32) + z,
    "v_add_lshl_u32 v3, v0, v1, v2": lambda x, y, z: (x + y) % 2**32 << z % 32,
    "v_add3_u32 v3, v0, v1, v2": lambda x, y, z: x + y + z,
    "v_lshl_or_b32 v3, v0, v1, v2": lambda x, y, z: x << y % 32 | z,
    "v_and_or_b32 v3, v0, v1, v2": lambda x, y, z: x & y | z,
    "v_or3_b32 v3, v0, v1, v2": lambda x, y, z: x | y | z,
    "v_xad_u32 v3, v0, v1, v2": lambda x, y, z: (x ^ y) + z,
    "v_bfe_u32 v3, v0, v1, v2": field,
    "v_bfe_i32 v3, v0, v1, v2": lambda x, y, z: signed(field(x, y, z), z % 32) if z % 32 else 0,
    "v_bfi_b32 v3, v0, v1, v2": lambda x, y, z: x & y | ~x & z,
    "v_mad_u32_u24 v3, v0, v1, v2": lambda x, y, z: x % 2**24 * (y % 2**24) + z,
    "v_alignbit_b32 v3, v0, v1, v2": lambda x, y, z: (x << 32 | y) >> z % 32,
    "v_alignbyte_b32 v3, v0, v1, v2": lambda x, y, z: (x << 32 | y) >> 8 * (z % 4),
    "v_perm_b32 v3, v0, v1, v2": permuted,
    "v_max3_u32 v3, v0, v1, v2": lambda x, y, z: max(x, y, z),
    "v_med3_u32 v3, v0, v1, v2": lambda x, y, z: sorted((x, y, z))[1],
    "v_med3_i32 v3, v0, v1, v2": lambda x, y, z: sorted(map(signed, (x, y, z)))[1],
    "v_bitop3_b32 v3, v0, v1, v2 bitop3:0xca": lambda x, y, z: x & y | ~x & z,
    "v_bitop3_b32 v3, v0, v1, v2 bitop3:0x14": lambda x, y, z: ~x & y & ~z | x & ~y & ~z,
    "v_cvt_f32_ubyte2_e32 v3, v0": lambda x, y, z: struct.unpack("<I", struct.pack("<f", x >> 16 & 255))[0],
    "v_pk_add_u16 v3, v0, v1": lambda x, y, z: (x + y) % 65536 | ((x >> 16) + (y >> 16)) % 65536 << 16,
    "v_pk_mul_lo_u16 v3, v0, v1 op_sel_hi:[1,0]": lambda x, y, z: (x * y) % 65536 | ((x >> 16) * y) % 65536 << 16,
    "v_pk_lshlrev_b16 v3, v0, v1": lambda x, y, z: (y << x % 16) % 65536 | ((y >> 16) << (x >> 16) % 16) % 65536 << 16,
    "v_pk_max_i16 v3, v0, v1": lambda x, y, z: max(signed(x % 65536, 16), signed(y % 65536, 16)) % 65536
    | max(signed(x >> 16, 16), signed(y >> 16, 16)) % 65536 << 16,
}


@pytest.mark.parametrize("text", INTEGERS)
def test_integers(text):
    for seed in range(4):
        x, y, z = integers(seed)
        w = run(text, v={0: x, 1: y, 2: z})
        expected = [INTEGERS[text](int(p), int(q), int(r)) & M32 for p, q, r in zip(x, y, z, strict=True)]
        np.testing.assert_array_equal(w.v[3], np.array(expected, U))


def test_constants_scalars_and_inactive_lanes():
    x = np.arange(64, dtype=U)
    w = run("v_add_u32_e32 v3, -16, v0", v={0: x, 3: np.zeros(64, U)}, exec_mask=0b1010)
    assert list(np.flatnonzero(w.v[3])) == [1, 3] and w.v[3][3] == U(3 - 16 & M32)
    assert (run("v_mul_lo_u32 v3, v0, s7", v={0: x}, s={7: 5}).v[3] == 5 * x).all()
    assert (run("v_or_b32_e32 v3, 0x3f000000, v0", v={0: x}).v[3] == (x | 0x3F00_0000)).all()
    assert (run("v_add_f32_e32 v3, 0.5, v0", v={0: x.astype(F)}).vf[3] == x.astype(F) + F(0.5)).all()
    assert (run("v_mov_b32_e32 v3, 0.15915494").v[3] == 0x3E22F983).all()
    assert (run("v_accvgpr_write_b32 a9, v0", v={0: x}).a[9] == x).all()
    assert (run("v_accvgpr_read_b32 v3, a9", a={9: x}).v[3] == x).all()


FLOAT = {
    "v_add_f32_e32 v3, v0, v1": lambda x, y, z: x + y,
    "v_sub_f32_e32 v3, v0, v1": lambda x, y, z: x - y,
    "v_mul_f32_e32 v3, v0, v1": lambda x, y, z: x * y,
    "v_add_f32_e64 v3, -|v0|, v1": lambda x, y, z: -np.abs(x) + y,
    "v_mul_f32_e64 v3, v0, -v1 mul:2": lambda x, y, z: F(2) * (x * -y),
    "v_mul_f32_e64 v3, v0, v1 clamp": lambda x, y, z: np.where(np.isnan(x * y), F(0), np.clip(x * y, F(0), F(1))),
    "v_max_f32_e32 v3, v0, v1": lambda x, y, z: np.fmax(x, y),
    "v_min_f32_e32 v3, v0, v1": lambda x, y, z: np.fmin(x, y),
    "v_max3_f32 v3, v0, v1, v2": lambda x, y, z: np.fmax(np.fmax(x, y), z),
    "v_sqrt_f32_e32 v3, v0": lambda x, y, z: np.sqrt(x),
    "v_rndne_f32_e32 v3, v0": lambda x, y, z: np.rint(x),
    "v_floor_f32_e32 v3, v0": lambda x, y, z: np.floor(x),
    "v_trunc_f32_e32 v3, v0": lambda x, y, z: np.trunc(x),
    "v_rcp_f32_e32 v3, v0": lambda x, y, z: (1 / x.astype(float)).astype(F),
    "v_rsq_f32_e32 v3, v0": lambda x, y, z: (1 / np.sqrt(x.astype(float))).astype(F),
    "v_exp_f32_e32 v3, v0": lambda x, y, z: (2.0 ** x.astype(float)).astype(F),
    "v_log_f32_e32 v3, v0": lambda x, y, z: (np.log(x.astype(float)) / math.log(2)).astype(F),
    "v_cvt_f32_i32_e32 v3, v0": lambda x, y, z: x.view(np.int32).astype(F),
    "v_cvt_f32_u32_e32 v3, v0": lambda x, y, z: x.view(U).astype(F),
    "v_ldexp_f32 v3, v0, 3": lambda x, y, z: x * F(8),
}


@pytest.mark.parametrize("text", FLOAT)
def test_floats(text):
    with np.errstate(all="ignore"):
        for seed in range(4):
            x, y, z = floats(seed)
            result = run(text, v={0: x, 1: y, 2: z}).vf[3]
            expected = FLOAT[text](x, y, z)
            if text.startswith(("v_exp", "v_log")):  # the oracle's own last bit is its own
                np.testing.assert_allclose(result, expected, rtol=2**-23)
            else:
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("v_fma_f32 v3, v0, v1, v2", "xyz"),
        ("v_fmac_f32_e32 v2, v0, v1", "xyz"),
        ("v_fmamk_f32 v3, v0, 0x40490fdb, v2", "xcz"),
        ("v_fmaak_f32 v3, v0, v1, 0x40490fdb", "xyc"),
    ],
)
def test_fused_products_round_once(text, order):
    """Oracle: exact fractions, rounded to the nearer of the two neighbouring f32."""
    source = np.random.default_rng(3)
    x, y, z = (source.standard_normal(64).astype(F) for _ in range(3))
    z[:32] = -(x * y)[:32] * F(1 + 2**-22)  # what a product rounded first would lose
    w = run(text, v={0: x, 1: y, 2: z.copy()})
    result = w.vf[2 if "fmac" in text else 3]
    named = {"x": x, "y": y, "z": z, "c": np.full(64, 0x40490FDB, U).view(F)}
    for lane in range(64):
        a, b, c = (Fraction(float(named[name][lane])) for name in order)
        near = [result[lane], np.nextafter(result[lane], F(np.inf)), np.nextafter(result[lane], F(-np.inf))]
        assert min(near, key=lambda value: abs(Fraction(float(value)) - (a * b + c))) == result[lane]


def test_division_is_correctly_rounded():
    """clang's sequence for a / b, as it stands in code objects."""
    source = np.random.default_rng(4)
    a, b = source.standard_normal(64).astype(F), source.standard_normal(64).astype(F)
    w = run(
        ["v_div_scale_f32 v2, s[2:3], v1, v1, v0", "v_rcp_f32_e32 v3, v2", "v_fma_f32 v4, -v2, v3, 1.0", "v_fmac_f32_e32 v3, v4, v3"]
        + ["v_div_scale_f32 v4, vcc, v0, v1, v0", "v_mul_f32_e32 v5, v4, v3", "v_fma_f32 v6, -v2, v5, v4", "v_fmac_f32_e32 v5, v6, v3"]
        + ["v_fma_f32 v2, -v2, v5, v4", "v_div_fmas_f32 v2, v2, v3, v5", "v_div_fixup_f32 v0, v2, v1, v0"],
        v={0: a, 1: b},
    )
    np.testing.assert_array_equal(w.vf[0], a / b)


def test_conversions_to_integers_saturate():
    x = np.resize(np.array([0.9, -0.9, 3e9, -3e9, 5e9, np.nan, -7.5, np.inf], F), 64)
    signed_values = run("v_cvt_i32_f32_e32 v3, v0", v={0: x}).v[3].view(np.int32)[:8]
    assert list(signed_values) == [0, 0, 2**31 - 1, -(2**31), 2**31 - 1, 0, -7, 2**31 - 1]
    assert list(run("v_cvt_u32_f32_e32 v3, v0", v={0: x}).v[3][:8]) == [0, 0, 3_000_000_000, 0, M32, 0, 0, M32]


def test_bf16_and_f16_conversions():
    """Oracle: torch's rounding for bf16, numpy's for f16."""
    torch = pytest.importorskip("torch")
    x = np.concatenate([f for f in floats(7, 1)])
    packed = run("v_cvt_pk_bf16_f32 v3, v0, v1", v={0: x, 1: -x}).v[3]
    expected = torch.from_numpy(x.copy()).bfloat16()
    number = ~np.isnan(x)
    np.testing.assert_array_equal((packed & U(0xFFFF))[number], expected.view(torch.int16).numpy().view(np.uint16)[number])
    np.testing.assert_array_equal((packed >> U(16))[number], (-expected).view(torch.int16).numpy().view(np.uint16)[number])
    assert np.isnan((packed << U(16)).view(F)[~number]).all()
    with np.errstate(all="ignore"):
        halves = x.astype(np.float16)
    assert (run("v_cvt_f16_f32_e32 v3, v0", v={0: x}).v[3].astype(np.uint16)[number] == halves.view(np.uint16)[number]).all()


@pytest.mark.parametrize("relation", ["eq", "lt", "le", "gt", "ge", "lg", "neq", "nlt", "nle", "ngt", "nge", "u", "o"])
def test_comparisons_of_floats(relation):
    x, y, _ = floats(5)
    tests = {
        "eq": x == y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y, "lg": (x < y) | (x > y), "neq": ~(x == y),
        "nlt": ~(x < y), "nle": ~(x <= y), "ngt": ~(x > y), "nge": ~(x >= y), "u": np.isnan(x) | np.isnan(y),
    }  # fmt: skip
    tests["o"] = ~tests["u"]
    w = run(f"v_cmp_{relation}_f32_e32 vcc, v0, v1", v={0: x, 1: y}, exec_mask=M64 >> 8)
    assert w.vcc == sum(1 << lane for lane in range(56) if tests[relation][lane])


def test_comparisons_of_integers():
    x, y, z = integers(6)
    for kind, convert in (("u32", int), ("i32", lambda value: signed(int(value)))):
        w = run(f"v_cmp_lt_{kind}_e64 s[6:7], v0, v1", v={0: x, 1: y})
        assert w.s[6] | w.s[7] << 32 == sum(1 << n for n in range(64) if convert(x[n]) < convert(y[n]))
    w = run("v_cmp_gt_u64_e32 vcc, v[0:1], v[2:3]", v={0: x, 1: y, 2: z, 3: y})
    assert w.vcc == sum(1 << n for n in range(64) if x[n] > z[n])
    w = run("v_cmpx_ge_u32_e32 vcc, v0, v1", v={0: x, 1: y})
    assert w.exec == w.vcc == sum(1 << n for n in range(64) if x[n] >= y[n])


def test_classes_of_floats():
    x = np.resize(np.array([np.nan, -np.inf, -1, -1e-40, -0.0, 0.0, 1e-40, 1, np.inf], F), 64)
    for bit, lane in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6), (8, 7), (9, 8)):
        w = run("v_cmp_class_f32_e32 vcc, v0, v1", v={0: x, 1: np.full(64, 1 << bit, U)}, exec_mask=(1 << 9) - 1)
        assert w.vcc == 1 << lane


def test_selection_by_a_mask():
    x, y, _ = integers(8)
    mask = 0x0F0F_3333_5555_AAAA
    expected = [y[n] if mask >> n & 1 else x[n] for n in range(64)]
    assert (run("v_cndmask_b32_e32 v3, v0, v1, vcc", v={0: x, 1: y}, vcc=mask).v[3] == expected).all()
    w = run("v_cndmask_b32_e64 v3, 0, 1, s[2:3]", s={2: mask & M32, 3: mask >> 32})
    assert (w.v[3] == [mask >> n & 1 for n in range(64)]).all()


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("v_lshl_add_u64 v[4:5], v[0:1], 3, v[2:3]", lambda x, z: (x << 3) + z),
        ("v_lshlrev_b64 v[4:5], 7, v[0:1]", lambda x, z: x << 7),
        ("v_lshrrev_b64 v[4:5], 7, v[0:1]", lambda x, z: x >> 7),
        ("v_ashrrev_i64 v[4:5], 7, v[0:1]", lambda x, z: signed(x, 64) >> 7),
        ("v_mov_b64_e32 v[4:5], v[2:3]", lambda x, z: z),
        ("v_mad_u64_u32 v[4:5], s[6:7], v0, v1, v[2:3]", lambda x, z: x % 2**32 * (x >> 32) + z),
        ("v_mad_i64_i32 v[4:5], s[6:7], v0, v1, v[2:3]", lambda x, z: signed(x % 2**32) * signed(x >> 32) + z),
    ],
)
def test_64_bits_a_lane(text, function):
    low, high, other = integers(9)
    w = run(text, v={0: low, 1: high, 2: other, 3: low})
    for lane in range(64):
        x, z = int(low[lane]) | int(high[lane]) << 32, int(other[lane]) | int(low[lane]) << 32
        assert int(w.v[4][lane]) | int(w.v[5][lane]) << 32 == function(x, z) & M64


def test_carries_make_64_bit_sums():
    low, high, other = integers(10)
    w = run(["v_add_co_u32_e32 v4, vcc, v0, v2", "v_addc_co_u32_e32 v5, vcc, v1, v1, vcc"], v={0: low, 1: high, 2: other})
    for lane in range(64):
        total = (int(low[lane]) | int(high[lane]) << 32) + (int(other[lane]) | int(high[lane]) << 32)
        assert int(w.v[4][lane]) | int(w.v[5][lane]) << 32 == total & M64
        assert w.vcc >> lane & 1 == total >> 64
    w = run(["v_sub_co_u32_e32 v4, vcc, v0, v2", "v_subb_co_u32_e32 v5, vcc, v1, v0, vcc"], v={0: low, 1: high, 2: other})
    for lane in range(64):
        total = (int(low[lane]) | int(high[lane]) << 32) - (int(other[lane]) | int(low[lane]) << 32)
        assert int(w.v[4][lane]) | int(w.v[5][lane]) << 32 == total & M64
        assert w.vcc >> lane & 1 == int(total < 0)


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("v_pk_add_f32 v[6:7], v[0:1], v[2:3]", lambda x, y, z: (x[0] + y[0], x[1] + y[1])),
        ("v_pk_mul_f32 v[6:7], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1]", lambda x, y, z: (x[1] * y[0], x[0] * y[1])),
        ("v_pk_mul_f32 v[6:7], v[0:1], v[2:3] op_sel_hi:[1,0]", lambda x, y, z: (x[0] * y[0], x[1] * y[0])),
        ("v_pk_add_f32 v[6:7], v[0:1], v[2:3] neg_lo:[0,1] neg_hi:[0,1]", lambda x, y, z: (x[0] - y[0], x[1] - y[1])),
        ("v_pk_mul_f32 v[6:7], v[0:1], s[2:3] op_sel_hi:[1,0]", lambda x, y, z: (x[0] * F(3), x[1] * F(3))),
        ("v_pk_mul_f32 v[6:7], v[0:1], 0.5 op_sel_hi:[1,0]", lambda x, y, z: (x[0] * F(0.5), x[1] * F(0.5))),
        ("v_pk_mov_b32 v[6:7], v[0:1], v[2:3] op_sel:[1,0]", lambda x, y, z: (x[1], y[0])),
        ("v_pk_fma_f32 v[6:7], v[0:1], v[2:3], v[4:5]", lambda x, y, z: [(p.astype(float) * q + r).astype(F) for p, q, r in zip(x, y, z)]),
    ],
)
def test_pairs_of_floats(text, function):
    source = np.random.default_rng(11)
    rows = [source.standard_normal(64).astype(F) for _ in range(6)]
    w = run(text, v=dict(enumerate(rows)), s={2: 0x40400000, 3: 0x7FC00000})
    low, high = function(rows[0:2], rows[2:4], rows[4:6])
    np.testing.assert_array_equal(w.vf[6], low)
    np.testing.assert_array_equal(w.vf[7], high)


def test_dot_products_of_bf16():
    source = np.random.default_rng(12)
    values = source.standard_normal((4, 64)).astype(F).view(U) & U(0xFFFF0000)
    x, y = values[0] >> U(16) | values[1], values[2] >> U(16) | values[3]
    z = source.standard_normal(64).astype(F)
    a, b, c, d = (row.view(F).astype(float) for row in values)
    expected = (a * c + b * d + z).astype(F)
    np.testing.assert_array_equal(run("v_dot2_f32_bf16 v3, v0, v1, v2", v={0: x, 1: y, 2: z}).vf[3], expected)
    np.testing.assert_array_equal(run("v_dot2c_f32_bf16_e32 v2, v0, v1", v={0: x, 1: y, 2: z}).vf[2], expected)


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("v_lshlrev_b32_sdwa v3, v1, v0 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_1", lambda x, o: (x >> 8 & 255) << 4),
        (
            "v_or_b32_sdwa v3, v0, v1 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0 src1_sel:DWORD",
            lambda x, o: ((x | 4) % 65536) << 16 | o % 65536,
        ),
        ("v_add_u32_sdwa v3, sext(v0), v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD", lambda x, o: signed(x >> 16, 16) + 4),
        ("v_and_b32_sdwa v3, v0, v0 dst_sel:BYTE_2 dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:BYTE_0", lambda x, o: (x >> 24 & x & 255) << 16),
    ],
)
def test_parts_of_registers(text, function):
    x, old, _ = integers(13)
    w = run(text, v={0: x, 1: np.full(64, 4, U), 3: old})
    assert (w.v[3] == [function(int(a), int(o)) & M32 for a, o in zip(x, old, strict=True)]).all()
