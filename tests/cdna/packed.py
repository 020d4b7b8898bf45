"""Two operations in one instruction: pairs of f32 in two registers, pairs of 16 bits in one, dot products of pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cdna.formats import bf16_to_f32, fused
from cdna.operands import F, U, Operands
from cdna.tables import entry


def _halves(o: Operands, sources: int) -> list[tuple[Callable, Callable]]:
    """Readers (low, high) of packed f32 sources 1…: op_sel picks the register of the low result, op_sel_hi that of the high one."""
    low, high = o.numbers("op_sel", [0] * sources), o.numbers("op_sel_hi", [1] * sources)
    negative_low, negative_high = o.numbers("neg_lo", [0] * sources), o.numbers("neg_hi", [0] * sources)
    found = []
    for k in range(sources):
        pair = _pair(o, k + 1)
        found.append((_signed(pair[low[k]], negative_low[k]), _signed(pair[high[k]], negative_high[k])))
    return found


def _signed(read: Callable, negative: int) -> Callable:
    return (lambda w: -read(w)) if negative else read


def _pair(o: Operands, k: int) -> tuple[Callable, Callable]:
    registers, i = o.registers(k), o.scalar_index(k)
    if registers is not None:
        both = o.rows(k, 2)
        return (lambda w: both(w)[0].view(F)), (lambda w: both(w)[1].view(F))
    if i is not None:
        return (lambda w: np.array([w.s[i]], U).view(F)), (lambda w: np.array([w.s[i + 1]], U).view(F))
    read = o.f32(k)  # a constant: in both halves
    return read, read


def _packed_f32(name: str, function: Callable, sources: int) -> None:
    @entry(name)
    def make(o: Operands):
        reads, (file, first, count) = _halves(o, sources), o.registers(0)
        if count != 2:
            raise o.unknown("the destination is not a pair")
        lows, highs = [low for low, _ in reads], [high for _, high in reads]

        def step(w):
            low, high = function(*(read(w) for read in lows)), function(*(read(w) for read in highs))
            rows, where = w.v if file == "v" else w.a, True if w.full else w.mask
            np.copyto(rows[first], low.view(U), where=where)
            np.copyto(rows[first + 1], high.view(U), where=where)

        return step


_packed_f32("v_pk_add_f32", lambda x, y: x + y, 2)
_packed_f32("v_pk_mul_f32", lambda x, y: x * y, 2)
_packed_f32("v_pk_fma_f32", fused, 3)


@entry("v_pk_mov_b32")
def _packed_move(o: Operands):
    """Two registers, each from either half of its own source: low of operand 1, high of operand 2."""
    low, high = o.numbers("op_sel", [0, 0]), o.numbers("op_sel_hi", [1, 1])
    if high != [1, 1] and high != [0, 0]:
        raise o.unknown(f"op_sel_hi {high}")
    first, second = _pair(o, 1)[low[0]], _pair(o, 2)[low[1]]
    file, i, count = o.registers(0)
    if count != 2:
        raise o.unknown("the destination is not a pair")

    def step(w):
        x, y = np.array(first(w)).view(U), np.array(second(w)).view(U)
        rows, where = w.v if file == "v" else w.a, True if w.full else w.mask
        np.copyto(rows[i], x, where=where)
        np.copyto(rows[i + 1], y, where=where)

    return step


def _words(o: Operands, k: int, low: int, high: int) -> Callable:
    read = o.u32(k)
    shifts = U(16 * low), U(16 * high)
    return lambda w: ((read(w) >> shifts[0] & U(0xFFFF)), (read(w) >> shifts[1] & U(0xFFFF)))


def _packed_u16(name: str, function: Callable, view: type) -> None:
    @entry(name)
    def make(o: Operands):
        sources = len(o) - 1
        low, high = o.numbers("op_sel", [0] * sources), o.numbers("op_sel_hi", [1] * sources)
        reads, write = [_words(o, k + 1, low[k], high[k]) for k in range(sources)], o.to_u32()

        def step(w):
            values = [read(w) for read in reads]
            halves = [function(*(value[half].astype(np.uint16).view(view) for value in values)) for half in (0, 1)]
            lower, upper = (half.astype(view).view(np.uint16).astype(U) for half in halves)
            write(w, lower | upper << U(16))

        return step


_packed_u16("v_pk_add_u16", lambda x, y: x + y, np.uint16)
_packed_u16("v_pk_sub_i16", lambda x, y: x - y, np.int16)
_packed_u16("v_pk_mul_lo_u16", lambda x, y: x * y, np.uint16)
_packed_u16("v_pk_max_i16", np.maximum, np.int16)
_packed_u16("v_pk_min_i16", np.minimum, np.int16)
_packed_u16("v_pk_max_u16", np.maximum, np.uint16)
_packed_u16("v_pk_min_u16", np.minimum, np.uint16)
_packed_u16("v_pk_lshlrev_b16", lambda x, y: y << (x & np.uint16(15)), np.uint16)
_packed_u16("v_pk_lshrrev_b16", lambda x, y: y >> (x & np.uint16(15)), np.uint16)
_packed_u16("v_pk_add_f16", lambda x, y: x + y, np.float16)
_packed_u16("v_pk_mul_f16", lambda x, y: x * y, np.float16)


@entry("v_dot2_f32_bf16", "v_dot2c_f32_bf16")
def _dot2(o: Operands):
    """Sum of two products of bf16 and an f32: in f64, rounded once. The c form adds to its destination."""
    accumulates = "dot2c" in o.instruction.mnemonic
    write, x, y = o.to_f32(), o.u32(1), o.u32(2)
    z = o.f32(0) if accumulates else o.f32(3)

    def step(w):
        a, b = x(w), y(w)
        total = z(w).astype(np.float64)
        for shift in (U(0), U(16)):
            total = total + bf16_to_f32(a >> shift & U(0xFFFF)).astype(np.float64) * bf16_to_f32(b >> shift & U(0xFFFF))
        write(w, total.astype(F))

    return step
