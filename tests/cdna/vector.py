"""Vector arithmetic of 32 and 64 bits a lane: integers, f32, conversions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cdna.formats import f32_to_bf16, fused, to_i32, to_u32
from cdna.operands import F, I32, I64, M32, Q, U, Operands
from cdna.tables import entry
from cdna.wave import bits

D = np.float64


def _shift(amount: np.ndarray) -> np.ndarray:
    return amount & U(31)


def _signed(function: Callable) -> Callable:
    return lambda *x: function(*(value.view(I32) for value in x)).view(U)


def _integer(name: str, function: Callable, sources: int) -> None:
    @entry(name)
    def make(o: Operands):
        write, reads = o.to_u32(), [o.u32(k) for k in range(1, sources + 1)]
        if sources == 1:
            (x,) = reads
            return lambda w: write(w, function(x(w)))
        if sources == 2:
            x, y = reads
            return lambda w: write(w, function(x(w), y(w)))
        x, y, z = reads
        return lambda w: write(w, function(x(w), y(w), z(w)))


def _field(x, offset, width):
    return x >> _shift(offset) & ((U(1) << _shift(width)) - U(1))


def _field_signed(x, offset, width):
    width = _shift(width)
    up = _shift(U(32) - width)
    return np.where(width == 0, U(0), (((x >> _shift(offset)) << up).view(I32) >> up.view(I32)).view(U))


def _24(x):
    return x & U(0xFFFFFF)


def _signed24(x):
    return (x << U(8)).view(I32) >> I32(8)


def _bytes_picked(x, y, selector):
    """v_perm_b32: byte n of the result is byte selector[n] of {x, y}; 12 is 0x00, above it 0xFF, 8 to 11 are signs."""
    pool = np.broadcast_to(y.astype(Q), 64) | np.broadcast_to(x.astype(Q), 64) << Q(32)
    result = np.zeros(64, U)
    for n in range(4):
        pick = np.broadcast_to(selector >> U(8 * n) & U(0xFF), 64)
        plain = (pool >> (np.minimum(pick, U(7)).astype(Q) * Q(8)) & Q(0xFF)).astype(U)
        sign = (pool >> ((np.clip(pick, 8, 11).astype(Q) - Q(8)) * Q(16) + Q(15)) & Q(1)).astype(U) * U(0xFF)
        byte = np.where(pick < 8, plain, np.where(pick < 12, sign, np.where(pick == 12, U(0), U(0xFF))))
        result |= byte << U(8 * n)
    return result


def _reversed(x):
    """The bits of each lane in the other order."""
    flags = np.unpackbits(np.ascontiguousarray(x).view(np.uint8), bitorder="little").reshape(-1, 32)
    return np.packbits(flags[:, ::-1].copy(), bitorder="little").view(U)


def _middle(x, y, z):
    return np.maximum(np.minimum(x, y), np.minimum(np.maximum(x, y), z))


def _wide(x, y):
    return x.astype(Q) * y.astype(Q)


_ONE = {
    "v_mov_b32": lambda x: x,
    "v_not_b32": lambda x: ~x,
    "v_accvgpr_read_b32": lambda x: x,
    "v_accvgpr_write_b32": lambda x: x,
    "v_accvgpr_mov_b32": lambda x: x,
    "v_bfrev_b32": _reversed,
    "v_ffbh_u32": lambda x: np.where(x == 0, U(M32), U(31) - np.log2(np.maximum(x, 1).astype(D)).astype(U)),
    "v_ffbl_b32": lambda x: np.where(x == 0, U(M32), np.log2(np.maximum(x & -x.view(I32).view(U), 1).astype(D)).astype(U)),
}
_TWO = {
    "v_add_u32": lambda x, y: x + y,
    "v_sub_u32": lambda x, y: x - y,
    "v_subrev_u32": lambda x, y: y - x,
    "v_and_b32": lambda x, y: x & y,
    "v_or_b32": lambda x, y: x | y,
    "v_xor_b32": lambda x, y: x ^ y,
    "v_xnor_b32": lambda x, y: ~(x ^ y),
    "v_lshlrev_b32": lambda x, y: y << _shift(x),
    "v_lshrrev_b32": lambda x, y: y >> _shift(x),
    "v_ashrrev_i32": lambda x, y: (y.view(I32) >> _shift(x).view(I32)).view(U),
    "v_lshlrev_b16": lambda x, y: y << (x & U(15)) & U(0xFFFF),
    "v_lshrrev_b16": lambda x, y: (y & U(0xFFFF)) >> (x & U(15)),
    "v_mul_lo_u32": lambda x, y: x * y,
    "v_mul_lo_u16": lambda x, y: x * y & U(0xFFFF),
    "v_add_u16": lambda x, y: x + y & U(0xFFFF),
    "v_sub_u16": lambda x, y: x - y & U(0xFFFF),
    "v_mul_hi_u32": lambda x, y: (_wide(x, y) >> Q(32)).astype(U),
    "v_mul_hi_i32": lambda x, y: (x.view(I32).astype(I64) * y.view(I32).astype(I64) >> I64(32)).astype(I32).view(U),
    "v_mul_u32_u24": lambda x, y: _24(x) * _24(y),
    "v_mul_hi_u32_u24": lambda x, y: (_wide(_24(x), _24(y)) >> Q(32)).astype(U),
    "v_mul_i32_i24": lambda x, y: (_signed24(x) * _signed24(y)).view(U),
    "v_max_u32": np.maximum,
    "v_min_u32": np.minimum,
    "v_max_i32": _signed(np.maximum),
    "v_min_i32": _signed(np.minimum),
    "v_bcnt_u32_b32": lambda x, y: np.bitwise_count(x).astype(U) + y,
    "v_bfm_b32": lambda x, y: ((U(1) << _shift(x)) - U(1)) << _shift(y),
    "v_pack_b32_f16": lambda x, y: x & U(0xFFFF) | y << U(16),
}
_THREE = {
    "v_lshl_add_u32": lambda x, y, z: (x << _shift(y)) + z,
    "v_add_lshl_u32": lambda x, y, z: (x + y) << _shift(z),
    "v_add3_u32": lambda x, y, z: x + y + z,
    "v_lshl_or_b32": lambda x, y, z: x << _shift(y) | z,
    "v_and_or_b32": lambda x, y, z: x & y | z,
    "v_or3_b32": lambda x, y, z: x | y | z,
    "v_xad_u32": lambda x, y, z: (x ^ y) + z,
    "v_bfe_u32": _field,
    "v_bfe_i32": _field_signed,
    "v_bfi_b32": lambda x, y, z: x & y | ~x & z,
    "v_mad_u32_u24": lambda x, y, z: _24(x) * _24(y) + z,
    "v_mad_i32_i24": lambda x, y, z: _TWO["v_mul_i32_i24"](x, y) + z,
    "v_mad_u16": lambda x, y, z: x * y + z & U(0xFFFF),
    "v_alignbit_b32": lambda x, y, z: ((x.astype(Q) << Q(32) | y) >> (z & U(31)).astype(Q)).astype(U),
    "v_alignbyte_b32": lambda x, y, z: ((x.astype(Q) << Q(32) | y) >> ((z & U(3)).astype(Q) * Q(8))).astype(U),
    "v_perm_b32": _bytes_picked,
    "v_max3_u32": lambda x, y, z: np.maximum(np.maximum(x, y), z),
    "v_min3_u32": lambda x, y, z: np.minimum(np.minimum(x, y), z),
    "v_med3_u32": _middle,
    "v_max3_i32": _signed(lambda x, y, z: np.maximum(np.maximum(x, y), z)),
    "v_min3_i32": _signed(lambda x, y, z: np.minimum(np.minimum(x, y), z)),
    "v_med3_i32": _signed(_middle),
}
for _table, _sources in ((_ONE, 1), (_TWO, 2), (_THREE, 3)):
    for _name, _function in _table.items():
        _integer(_name, _function, _sources)


def _float(name: str, function: Callable, sources: int) -> None:
    @entry(name)
    def make(o: Operands):
        write, reads = o.to_f32(), [o.f32(k) for k in range(1, sources + 1)]
        if sources == 1:
            (x,) = reads
            return lambda w: write(w, function(x(w)))
        if sources == 2:
            x, y = reads
            return lambda w: write(w, function(x(w), y(w)))
        x, y, z = reads
        return lambda w: write(w, function(x(w), y(w), z(w)))


def _exact(function: Callable) -> Callable:
    """function in f64, rounded once."""
    return lambda *x: function(*(value.astype(D) for value in x)).astype(F)


def _median(x, y, z):
    return np.where(np.isnan(x) | np.isnan(y) | np.isnan(z), np.fmin(np.fmin(x, y), z), _middle(x, y, z))


_FLOAT_ONE = {
    "v_rcp_f32": _exact(lambda x: 1 / x),
    "v_rcp_iflag_f32": _exact(lambda x: 1 / x),
    "v_rsq_f32": _exact(lambda x: 1 / np.sqrt(x)),
    "v_sqrt_f32": np.sqrt,
    "v_exp_f32": _exact(np.exp2),
    "v_log_f32": _exact(np.log2),
    "v_sin_f32": _exact(lambda x: np.sin(2 * np.pi * x)),  # of revolutions
    "v_cos_f32": _exact(lambda x: np.cos(2 * np.pi * x)),
    "v_rndne_f32": np.rint,
    "v_floor_f32": np.floor,
    "v_ceil_f32": np.ceil,
    "v_trunc_f32": np.trunc,
    "v_fract_f32": lambda x: np.minimum(x - np.floor(x), np.nextafter(F(1), F(0))),
}
_FLOAT_TWO = {
    "v_add_f32": lambda x, y: x + y,
    "v_sub_f32": lambda x, y: x - y,
    "v_subrev_f32": lambda x, y: y - x,
    "v_mul_f32": lambda x, y: x * y,
    "v_mul_legacy_f32": lambda x, y: np.where((x == 0) | (y == 0), F(0), x * y),
    "v_max_f32": np.fmax,
    "v_min_f32": np.fmin,
}
_FLOAT_THREE = {
    "v_fma_f32": fused,
    "v_fmamk_f32": fused,  # factor, constant, addend: in the operands' order already
    "v_fmaak_f32": fused,
    "v_max3_f32": lambda x, y, z: np.fmax(np.fmax(x, y), z),
    "v_min3_f32": lambda x, y, z: np.fmin(np.fmin(x, y), z),
    "v_maximum3_f32": lambda x, y, z: np.maximum(np.maximum(x, y), z),
    "v_minimum3_f32": lambda x, y, z: np.minimum(np.minimum(x, y), z),
    "v_med3_f32": _median,
}
for _table, _sources in ((_FLOAT_ONE, 1), (_FLOAT_TWO, 2), (_FLOAT_THREE, 3)):
    for _name, _function in _table.items():
        _float(_name, _function, _sources)


@entry("v_fmac_f32")
def _fmac(o: Operands):
    write, x, y, z = o.to_f32(), o.f32(1), o.f32(2), o.registers(0)[1]
    if o.registers(0)[0] != "v":
        raise o.unknown("an accumulation register as addend")
    return lambda w: write(w, fused(x(w), y(w), w.vf[z]))


@entry("v_ldexp_f32")
def _ldexp(o: Operands):
    write, x, y = o.to_f32(), o.f32(1), o.i32(2)
    return lambda w: write(w, np.ldexp(x(w).astype(D), np.clip(y(w), -1000, 1000)).astype(F))


# Division: the three helpers around clang's Newton steps. Without the scaling of extreme operands, div_fixup gives the quotient itself, rounded
# once, so that what is between them does not matter.
@entry("v_div_scale_f32")
def _div_scale(o: Operands):
    write, flags, x = o.to_f32(), o.to_mask(1), o.f32(2)

    def step(w):
        write(w, x(w))
        flags(w, np.zeros(64, bool))

    return step


@entry("v_div_fmas_f32")
def _div_fmas(o: Operands):
    write, x, y, z = o.to_f32(), o.f32(1), o.f32(2), o.f32(3)
    return lambda w: write(w, fused(x(w), y(w), z(w)))


@entry("v_div_fixup_f32")
def _div_fixup(o: Operands):
    write, denominator, numerator = o.to_f32(), o.f32(2), o.f32(3)
    o.f32(1)
    return lambda w: write(w, (numerator(w).astype(D) / denominator(w).astype(D)).astype(F))


@entry("v_cndmask_b32")
def _choose(o: Operands):
    """Operand 3, or vcc in the short encodings, has one bit a lane."""
    write, x, y = o.to_u32(), o.u32(1), o.u32(2)
    if len(o) == 3:
        o.texts = (*o.texts, "vcc")
    mask = o.scalar(3, 2)
    return lambda w: write(w, np.where(bits(mask(w)), y(w), x(w)))


@entry("v_mov_b64")
def _mov64(o: Operands):
    write, x = o.to_u64(), o.u64(1)
    return lambda w: write(w, x(w))


@entry("v_lshl_add_u64")
def _shift_add64(o: Operands):
    write, x, y, z = o.to_u64(), o.u64(1), o.u32(2), o.u64(3)
    return lambda w: write(w, (x(w) << (y(w) & U(7)).astype(Q)) + z(w))


@entry("v_lshlrev_b64", "v_lshrrev_b64", "v_ashrrev_i64")
def _shift64(o: Operands):
    write, x, y, name = o.to_u64(), o.u32(1), o.u64(2), o.instruction.mnemonic
    amount = lambda w: (x(w) & U(63)).astype(Q)  # noqa: E731
    if "lshl" in name:
        return lambda w: write(w, y(w) << amount(w))
    if "lshr" in name:
        return lambda w: write(w, y(w) >> amount(w))
    return lambda w: write(w, (y(w).view(I64) >> amount(w).view(I64)).view(Q))


@entry("v_mad_u64_u32", "v_mad_i64_i32")
def _mad64(o: Operands):
    """The carry out goes to operand 1."""
    write, carry, x, y, z = o.to_u64(), o.to_mask(1), o.u32(2), o.u32(3), o.u64(4)
    signed = "i64" in o.instruction.mnemonic

    def step(w):
        if signed:
            product = (x(w).view(I32).astype(I64) * y(w).view(I32).astype(I64)).view(Q)
        else:
            product = _wide(x(w), y(w))
        total = product + z(w)
        overflow = np.broadcast_to(total < product, 64)
        write(w, total)
        carry(w, overflow)

    return step


@entry("v_add_co_u32", "v_addc_co_u32", "v_sub_co_u32", "v_subb_co_u32", "v_subrev_co_u32", "v_subbrev_co_u32")
def _carry(o: Operands):
    """Operand 1 receives the carry or borrow; operand 4 is the carry in of the c and b forms."""
    if o.permutation is not None or o.selection is not None:
        raise o.unknown("carries with DPP or SDWA are not modelled")
    write, out, x, y, name = o.to_u32(), o.to_mask(1), o.u32(2), o.u32(3), o.instruction.mnemonic
    has_in = name.startswith(("v_addc", "v_subb"))
    carry_in = o.scalar(4, 2) if has_in else lambda w: 0
    reverse, minus = "rev" in name, "sub" in name

    def step(w):
        a, b = x(w).astype(I64), y(w).astype(I64)
        if reverse:
            a, b = b, a
        c = bits(carry_in(w)).astype(I64)
        total = a - b - c if minus else a + b + c
        write(w, (total & I64(M32)).astype(U))
        out(w, (total < 0) | (total > M32))

    return step


def _convert(name: str, read: str, write: str, function: Callable) -> None:
    @entry(name)
    def make(o: Operands):
        to, x = getattr(o, f"to_{write}")(), getattr(o, read)(1)
        return lambda w: to(w, function(x(w)))


_convert("v_cvt_f32_u32", "u32", "f32", lambda x: x.astype(F))
_convert("v_cvt_f32_i32", "i32", "f32", lambda x: x.astype(F))
_convert("v_cvt_u32_f32", "f32", "u32", lambda x: to_u32(np.trunc(x)))
_convert("v_cvt_i32_f32", "f32", "u32", lambda x: to_i32(np.trunc(x)).view(U))
_convert("v_cvt_f32_f16", "u32", "f32", lambda x: (x & U(0xFFFF)).astype(np.uint16).view(np.float16).astype(F))
_convert("v_cvt_f16_f32", "f32", "u32", lambda x: x.astype(np.float16).view(np.uint16).astype(U))
_convert("v_cvt_f32_bf16", "u32", "f32", lambda x: (x << U(16)).view(F))
for _byte in range(4):
    _convert(f"v_cvt_f32_ubyte{_byte}", "u32", "f32", lambda x, s=U(8 * _byte): (x >> s & U(0xFF)).astype(F))


@entry("v_cvt_pk_bf16_f32")
def _pack_bf16(o: Operands):
    write, x, y = o.to_u32(), o.f32(1), o.f32(2)
    return lambda w: write(w, f32_to_bf16(x(w)) | f32_to_bf16(y(w)) << U(16))


@entry("v_bitop3_b32")
def _truth_table(o: Operands):
    """Any function of three bits: bit 4x + 2y + z of the table."""
    write, reads = o.to_u32(), (o.u32(1), o.u32(2), o.u32(3))
    table = o.number("bitop3")

    def step(w):
        x, y, z = (read(w) for read in reads)
        result = np.zeros(64, U)
        for row in range(8):
            if table >> row & 1:
                result |= (x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z)
        write(w, result)

    return step
