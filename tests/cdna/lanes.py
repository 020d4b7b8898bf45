"""Data that crosses lanes without DPP: to and from scalars, counts of lower lanes, permutations."""

from __future__ import annotations

import re

import numpy as np

from cdna.operands import U, Operands
from cdna.tables import entry
from cdna.wave import bits

_LANE = np.arange(64)


@entry("v_readfirstlane_b32")
def _read_first(o: Operands):
    """Of the first active lane, or lane 0 where none is."""
    write, x = o.to_scalar(0), o.lanes(1)
    return lambda w: write(w, int(x(w)[w.lanes[0] if len(w.lanes) else 0]))


@entry("v_readlane_b32")
def _read_lane(o: Operands):
    write, x, lane = o.to_scalar(0), o.lanes(1), o.scalar(2)
    return lambda w: write(w, int(x(w)[lane(w) & 63]))


@entry("v_writelane_b32")
def _write_lane(o: Operands):
    (file, i, _), x, lane = o.registers(0), o.scalar(1), o.scalar(2)

    def step(w):
        (w.v if file == "v" else w.a)[i, lane(w) & 63] = x(w)

    return step


@entry("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def _count_below(o: Operands):
    """Bits of a mask, lanes 0 to 31 or 32 to 63, that belong to lanes below each one, added to operand 2."""
    write, mask, x = o.to_u32(), o.lanes(1), o.u32(2)
    shift = 32 if "_hi_" in o.instruction.mnemonic else 0

    def step(w):
        words = mask(w)
        if (words == words[0]).all():
            below = np.concatenate([[0], np.cumsum(bits(int(words[0]) << shift))[:-1]]).astype(U)
        else:
            limits = np.clip(_LANE - shift, 0, 32)
            below = np.bitwise_count(words.astype(np.uint64) & ((np.uint64(1) << limits.astype(np.uint64)) - np.uint64(1))).astype(U)
        write(w, below + x(w))

    return step


@entry("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def _swap_rows(o: Operands):
    """Exchanges odd rows of operand 0, of 16 or 32 lanes, with the even rows before them of operand 1."""
    width = 32 if "32_swap" in o.instruction.mnemonic else 16
    (first_file, i, _), (second_file, j, _) = o.registers(0), o.registers(1)
    odd = _LANE[_LANE // width % 2 == 1]

    def step(w):
        x, y = (w.v if first_file == "v" else w.a)[i], (w.v if second_file == "v" else w.a)[j]
        moved = odd[w.mask[odd] & w.mask[odd - width]]
        x[moved], y[moved - width] = y[moved - width].copy(), x[moved].copy()

    return step


@entry("v_swap_b32")
def _swap(o: Operands):
    x, y, to_x, to_y = o.u32(0), o.u32(1), o.to_u32(0), o.to_u32(1)

    def step(w):
        first, second = x(w).copy(), y(w).copy()
        to_x(w, second)
        to_y(w, first)

    return step


@entry("ds_bpermute_b32", "ds_permute_b32")
def _permute(o: Operands):
    """Addresses are 4 times a lane. bpermute reads from that lane (0 where it is inactive), permute writes to it; the last writer wins."""
    write, where, x, offset = o.to_u32(), o.lanes(1), o.lanes(2), o.number("offset")
    pulls = "bpermute" in o.instruction.mnemonic

    def step(w):
        other = (where(w) + U(offset)) >> U(2) & U(63)
        values = np.where(w.mask, x(w), U(0))
        if pulls:
            return write(w, values[other])
        result = np.zeros(64, U)
        for lane in w.lanes:
            result[other[lane]] = values[lane]
        write(w, result)

    return step


@entry("ds_swizzle_b32")
def _swizzle(o: Operands):
    """A fixed exchange: within quads, or in groups of 32 by lane' = ((lane & and) | or) ^ xor."""
    write, x = o.to_u32(), o.lanes(1)
    text = o.modifiers.pop("offset", "0")
    quads = re.match(r"^swizzle\(QUAD_PERM,\s*(\d),(\d),(\d),(\d)\)$", text)
    swap, reverse = re.match(r"^swizzle\(SWAP,\s*(\d+)\)$", text), re.match(r"^swizzle\(REVERSE,\s*(\d+)\)$", text)
    masks = re.match(r'^swizzle\(BITMASK_PERM,\s*"([01pi]{5})"\)$', text)
    broadcast = re.match(r"^swizzle\(BROADCAST,\s*(\d+),(\d+)\)$", text)
    if quads:
        source = (_LANE & ~3) + np.array([int(n) for n in quads.groups()])[_LANE & 3]
    elif swap:
        source = _LANE ^ int(swap[1])
    elif reverse:
        source = _LANE ^ (int(reverse[1]) - 1)
    elif broadcast:
        source = _LANE // int(broadcast[1]) * int(broadcast[1]) + int(broadcast[2])
    elif masks:
        source = _LANE.copy()
        for place, action in enumerate(masks[1]):  # the first letter is bit 4
            bit = 1 << (4 - place)
            source = {"0": source & ~bit, "1": source | bit, "p": source, "i": source ^ bit}[action]
    else:
        raise o.unknown(f"swizzle {text!r}")
    return lambda w: write(w, np.where(w.mask[source], x(w)[source], U(0)))
