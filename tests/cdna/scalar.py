"""Scalar arithmetic: integers of one wave, and scc, the bit that comparisons and carries leave."""

from __future__ import annotations

import operator
from collections.abc import Callable

from cdna.operands import M32, M64, Operands
from cdna.tables import entry


def _signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _dwords(name: str) -> int:
    return 2 if name.endswith("64") else 1


def _plain(name: str, function: Callable[[int], int], *, scc: bool = False) -> None:
    """destination = function(source); scc = result is not 0."""
    dwords = _dwords(name)
    limit = M64 if dwords == 2 else M32

    @entry(name)
    def make(o: Operands):
        read, write = o.scalar(1, dwords), o.to_scalar(0, dwords)

        def step(w):
            value = function(read(w)) & limit
            write(w, value)
            if scc:
                w.scc = int(value != 0)

        return step


def _two(name: str, function: Callable[[int, int], int], *, dwords: tuple[int, int, int] = (), scc: bool = True) -> None:
    """destination = function(first, second); scc = result is not 0. dwords: of destination, first, second."""
    to, first, second = dwords or (_dwords(name),) * 3
    limit = M64 if to == 2 else M32

    @entry(name)
    def make(o: Operands):
        x, y, write = o.scalar(1, first, signed=False), o.scalar(2, second, signed=False), o.to_scalar(0, to)

        def step(w):
            value = function(x(w), y(w)) & limit
            write(w, value)
            if scc:
                w.scc = int(value != 0)

        return step


_plain("s_mov_b32", lambda x: x)
_plain("s_mov_b64", lambda x: x)
_plain("s_not_b32", lambda x: ~x, scc=True)
_plain("s_not_b64", lambda x: ~x, scc=True)
_plain("s_abs_i32", lambda x: abs(_signed(x)), scc=True)
_plain("s_brev_b32", lambda x: int(f"{x:032b}"[::-1], 2))
_plain("s_brev_b64", lambda x: int(f"{x:064b}"[::-1], 2))
_plain("s_sext_i32_i8", lambda x: _signed(x & 0xFF, 8))
_plain("s_sext_i32_i16", lambda x: _signed(x & 0xFFFF, 16))
_plain("s_ff1_i32_b32", lambda x: (x & -x).bit_length() - 1)
_plain("s_flbit_i32_b32", lambda x: 32 - x.bit_length() if x else -1)

for _bits in (32, 64):
    _full = (1 << _bits) - 1
    _two(f"s_and_b{_bits}", operator.and_)
    _two(f"s_or_b{_bits}", operator.or_)
    _two(f"s_xor_b{_bits}", operator.xor)
    _two(f"s_andn2_b{_bits}", lambda x, y: x & ~y)
    _two(f"s_orn2_b{_bits}", lambda x, y: x | ~y)
    _two(f"s_nand_b{_bits}", lambda x, y: ~(x & y))
    _two(f"s_nor_b{_bits}", lambda x, y: ~(x | y))
    _two(f"s_xnor_b{_bits}", lambda x, y: ~(x ^ y))
    _n = _bits // 32
    _two(f"s_lshl_b{_bits}", lambda x, y, m=_bits - 1: x << (y & m), dwords=(_n, _n, 1))
    _two(f"s_lshr_b{_bits}", lambda x, y, m=_bits - 1: x >> (y & m), dwords=(_n, _n, 1))
    _two(f"s_ashr_i{_bits}", lambda x, y, b=_bits: _signed(x, b) >> (y & (b - 1)), dwords=(_n, _n, 1))
    _two(f"s_bfm_b{_bits}", lambda x, y, m=_bits - 1: ((1 << (x & m)) - 1) << (y & m), dwords=(_n, 1, 1), scc=False)


def _field(bits: int, signed: bool) -> Callable[[int, int], int]:
    """Bits offset… of the first source; the second has the offset in its low bits and the width from bit 16."""

    def extract(x: int, y: int) -> int:
        width = y >> 16 & 0x7F
        value = (x >> (y & (bits - 1))) & ((1 << width) - 1)
        return _signed(value, width) if signed and width else value

    return extract


_two("s_bfe_u32", _field(32, False))
_two("s_bfe_i32", _field(32, True))
_two("s_bfe_u64", _field(64, False), dwords=(2, 2, 1))
_two("s_bfe_i64", _field(64, True), dwords=(2, 2, 1))
_two("s_mul_i32", operator.mul, scc=False)
_two("s_mul_hi_u32", lambda x, y: x * y >> 32, scc=False)
_two("s_mul_hi_i32", lambda x, y: _signed(x) * _signed(y) >> 32, scc=False)
_two("s_pack_ll_b32_b16", lambda x, y: x & 0xFFFF | y << 16, scc=False)
_two("s_pack_lh_b32_b16", lambda x, y: x & 0xFFFF | y & 0xFFFF0000, scc=False)
_two("s_pack_hh_b32_b16", lambda x, y: x >> 16 | y & 0xFFFF0000, scc=False)


def _sum(name: str, function: Callable[[int, int, int], int], carry: Callable[[int, int, int], bool]) -> None:
    """destination = low 32 bits of function(first, second, scc); scc = carry(first, second, function's result)."""

    @entry(name)
    def make(o: Operands):
        x, y, write = o.scalar(1), o.scalar(2), o.to_scalar(0)

        def step(w):
            a, b = x(w), y(w)
            value = function(a, b, w.scc)
            write(w, value & M32)
            w.scc = int(carry(a, b, value))

        return step


def _overflows(sign: int) -> Callable[[int, int, int], bool]:
    return lambda a, b, _: not -(1 << 31) <= _signed(a) + sign * _signed(b) < 1 << 31


_sum("s_add_u32", lambda a, b, c: a + b, lambda a, b, r: r > M32)
_sum("s_addc_u32", lambda a, b, c: a + b + c, lambda a, b, r: r > M32)
_sum("s_add_i32", lambda a, b, c: a + b, _overflows(1))
_sum("s_sub_u32", lambda a, b, c: a - b, lambda a, b, r: r < 0)
_sum("s_subb_u32", lambda a, b, c: a - b - c, lambda a, b, r: r < 0)
_sum("s_sub_i32", lambda a, b, c: a - b, _overflows(-1))
_sum("s_min_u32", lambda a, b, c: min(a, b), lambda a, b, r: r == a)
_sum("s_max_u32", lambda a, b, c: max(a, b), lambda a, b, r: r == a)
_sum("s_min_i32", lambda a, b, c: min(a, b, key=_signed), lambda a, b, r: r == a)
_sum("s_max_i32", lambda a, b, c: max(a, b, key=_signed), lambda a, b, r: r == a)
_sum("s_absdiff_i32", lambda a, b, c: abs(_signed(a) - _signed(b)), lambda a, b, r: r & M32 != 0)
for _shift in (1, 2, 3, 4):
    _sum(f"s_lshl{_shift}_add_u32", lambda a, b, c, n=_shift: (a << n) + b, lambda a, b, r: r > M32)


def _immediate(o: Operands, k: int) -> int:
    """A 16-bit operand, extended by its sign."""
    return _signed(int(o.texts[k], 0) & 0xFFFF, 16)


@entry("s_movk_i32")
def _movk(o: Operands):
    value, write = _immediate(o, 1), o.to_scalar(0)
    return lambda w: write(w, value & M32)


@entry("s_cmovk_i32")
def _cmovk(o: Operands):
    value, write = _immediate(o, 1), o.to_scalar(0)
    return lambda w: write(w, value & M32) if w.scc else None


@entry("s_mulk_i32")
def _mulk(o: Operands):
    value, read, write = _immediate(o, 1), o.scalar(0), o.to_scalar(0)
    return lambda w: write(w, read(w) * value & M32)


@entry("s_addk_i32")
def _addk(o: Operands):
    value, read, write = _immediate(o, 1), o.scalar(0), o.to_scalar(0)

    def step(w):
        total = _signed(read(w)) + value
        write(w, total & M32)
        w.scc = int(not -(1 << 31) <= total < 1 << 31)

    return step


_RELATIONS = {"eq": operator.eq, "lg": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


def _compare(relation: str, kind: str) -> None:
    test, dwords, convert = _RELATIONS[relation], _dwords(kind), _signed if kind == "i32" else lambda x: x

    @entry(f"s_cmp_{relation}_{kind}")
    def make(o: Operands):
        x, y = o.scalar(0, dwords), o.scalar(1, dwords)

        def step(w):
            w.scc = int(test(convert(x(w)), convert(y(w))))

        return step


def _compare_immediate(relation: str, kind: str) -> None:
    test = _RELATIONS[relation]

    @entry(f"s_cmpk_{relation}_{kind}")
    def make(o: Operands):
        x, value = o.scalar(0), int(o.texts[1], 0) & 0xFFFF
        if kind == "i32":
            signed = _signed(value, 16)

            def step(w):
                w.scc = int(test(_signed(x(w)), signed))
        else:

            def step(w):
                w.scc = int(test(x(w), value))

        return step


for _relation in _RELATIONS:
    for _kind in ("i32", "u32"):
        _compare(_relation, _kind)
        _compare_immediate(_relation, _kind)
_compare("eq", "u64")
_compare("lg", "u64")


def _bit_test(name: str, dwords: int, wanted: int) -> None:
    @entry(name)
    def make(o: Operands):
        x, y = o.scalar(0, dwords), o.scalar(1)

        def step(w):
            w.scc = int((x(w) >> (y(w) & (32 * dwords - 1)) & 1) == wanted)

        return step


for _dword in (1, 2):
    for _wanted in (0, 1):
        _bit_test(f"s_bitcmp{_wanted}_b{32 * _dword}", _dword, _wanted)


@entry("s_bitset0_b32", "s_bitset1_b32")
def _bit_set(o: Operands):
    read, bit, write, one = o.scalar(0), o.scalar(1), o.to_scalar(0), "bitset1" in o.instruction.mnemonic

    def step(w):
        mask = 1 << (bit(w) & 31)
        write(w, read(w) | mask if one else read(w) & ~mask)

    return step


@entry("s_cselect_b32", "s_cselect_b64")
def _select(o: Operands):
    dwords = _dwords(o.instruction.mnemonic)
    x, y, write = o.scalar(1, dwords), o.scalar(2, dwords), o.to_scalar(0, dwords)
    return lambda w: write(w, x(w) if w.scc else y(w))


@entry("s_cmov_b32", "s_cmov_b64")
def _conditional_move(o: Operands):
    dwords = _dwords(o.instruction.mnemonic)
    read, write = o.scalar(1, dwords), o.to_scalar(0, dwords)
    return lambda w: write(w, read(w)) if w.scc else None


def _count(name: str, dwords: int, function: Callable[[int], int], *, scc: bool) -> None:
    """A 32-bit count of 32 or 64 bits."""

    @entry(name)
    def make(o: Operands):
        read, write = o.scalar(1, dwords), o.to_scalar(0)

        def step(w):
            value = function(read(w))
            write(w, value & M32)
            if scc:
                w.scc = int(value != 0)

        return step


_count("s_bcnt1_i32_b32", 1, int.bit_count, scc=True)
_count("s_bcnt1_i32_b64", 2, int.bit_count, scc=True)
_count("s_ff1_i32_b64", 2, lambda x: (x & -x).bit_length() - 1, scc=False)
_count("s_flbit_i32_b64", 2, lambda x: 64 - x.bit_length() if x else -1, scc=False)

_SAVE = {
    "and": lambda x, e: x & e,
    "or": lambda x, e: x | e,
    "xor": lambda x, e: x ^ e,
    "andn1": lambda x, e: ~x & e,
    "andn2": lambda x, e: x & ~e,
    "orn1": lambda x, e: ~x | e,
    "orn2": lambda x, e: x | ~e,
}


def _save_exec(name: str, function: Callable[[int, int], int], *, keep_new: bool) -> None:
    """exec = function(source, exec); the destination gets the old exec, or the new one (…_wrexec)."""

    @entry(name)
    def make(o: Operands):
        read, write = o.scalar(1, 2), o.to_scalar(0, 2)

        def step(w):
            old = w.exec
            new = function(read(w), old) & M64
            write(w, new if keep_new else old)
            w.set_exec(new)
            w.scc = int(new != 0)

        return step


for _name, _function in _SAVE.items():
    _save_exec(f"s_{_name}_saveexec_b64", _function, keep_new=False)
for _name in ("andn1", "andn2"):
    _save_exec(f"s_{_name}_wrexec_b64", _SAVE[_name], keep_new=True)
