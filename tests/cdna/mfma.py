"""Matrix products of a wave: D = A B + C with A [n, K] and B [K, n], n of 16 or 32.

Lane l holds row (of A) or column (of B) l % n; lane group l // n holds K / (64 / n) consecutive k. Register i of D and C holds row
8 * (i // 4) + 4 * (l // 32) + i % 4 for n = 32 and 4 * (l // 16) + i for n = 16, column l % n. EXEC is ignored. Products are summed in f64 and
rounded to f32 once, then added to C.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cdna import formats
from cdna.formats import bf16_to_f32
from cdna.operands import F, U, Operands, constant
from cdna.tables import entry

_LANE = np.arange(64)
_BYTES = {"bf16": 2, "f16": 2, "fp8": 1, "bf8": 1}


def _decoder(kind: str, isa: str) -> Callable[[np.ndarray], np.ndarray]:
    """uint8 [..., bytes] of one lane's operand to f64 values."""
    if kind == "bf16":
        return lambda raw: bf16_to_f32(raw.view(np.uint16)).astype(np.float64)
    if kind == "f16":
        return lambda raw: raw.view(np.float16).astype(np.float64)
    ocp = {"fp8": formats.E4M3, "bf8": formats.E5M2}
    fnuz = {"fp8": formats.E4M3_FNUZ, "bf8": formats.E5M2_FNUZ}
    table = (ocp if isa == "gfx950" else fnuz)[kind]
    return lambda raw: table[raw]


def _accumulator(o: Operands, count: int) -> Callable:
    """Reads C as f32 [count, 64]: registers, or one constant everywhere."""
    if o.registers(3) is not None:
        rows = o.rows(3, count)
        return lambda w: rows(w).view(F).copy()
    value = constant(o.texts[3])
    if value is None:
        raise o.unknown(f"accumulator {o.texts[3]!r}")
    fixed = np.full((count, 64), value, U).view(F)
    return lambda w: fixed


def _places(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of D [registers, 64]."""
    register = np.arange(n * n // 64)[:, None]
    groups = 64 // n
    return 4 * groups * (register // 4) + 4 * (_LANE // n) + register % 4, np.broadcast_to(_LANE % n, (n * n // 64, 64))


def _product(n: int, depth: int, first: str, second: str) -> Callable:
    groups = 64 // n
    a_lane = depth // groups
    places = _places(n)

    def make(o: Operands):
        if o.modifiers:
            raise o.unknown("broadcasts and negations of MFMA are not modelled")
        isa = o.program.isa
        sides = []
        for k, kind in ((1, first), (2, second)):
            sides.append((o.rows(k, a_lane * _BYTES[kind] // 4), _decoder(kind, isa)))
        result, old = o.rows(0, n * n // 64), _accumulator(o, n * n // 64)

        def matrix(w, rows, decode):
            raw = np.ascontiguousarray(rows(w).T).view(np.uint8)
            return decode(raw).reshape(groups, n, a_lane).transpose(1, 0, 2).reshape(n, depth)

        def step(w):
            a, b = (matrix(w, rows, decode) for rows, decode in sides)
            product = (a @ b.T).astype(F)
            result(w)[:] = (old(w) + product[places]).view(U)

        return step

    return make


for _n, _depth in ((16, 32), (32, 16), (16, 16), (32, 8)):
    for _kind in ("bf16", "f16"):
        _suffixes = [f"{_n}x{_n}x{_depth}_{_kind}", f"{_n}x{_n}x{_depth}{_kind}"]
        entry(f"v_mfma_f32_{_suffixes[0]}")(_product(_n, _depth, _kind, _kind))
        if _depth in (16, 8) and _kind == "bf16" and (_n, _depth) != (32, 16):
            entry(f"v_mfma_f32_{_suffixes[1]}_1k", f"v_mfma_f32_{_suffixes[0]}_1k")(_product(_n, _depth, _kind, _kind))
for _n, _depth in ((16, 32), (32, 16)):
    for _first in ("fp8", "bf8"):
        for _second in ("fp8", "bf8"):
            entry(f"v_mfma_f32_{_n}x{_n}x{_depth}_{_first}_{_second}")(_product(_n, _depth, _first, _second))


# Scaled products of 128 deep: format numbers as cbsz and blgp give them, registers of one lane's operand.
_FORMATS = {0: ("fp8", 8), 1: ("bf8", 8), 4: ("fp4", 4)}


def _deep_side(o: Operands, k: int, number: int, scale: int, byte: int) -> Callable:
    """Reads [16, 128] f64, scaled by 2^(e - 127) a row and block of 32; lane group g has block g.

    8-bit operands: group g holds k = 16g … 16g+15 and 64+16g … 64+16g+15; 4-bit ones k = 32g … 32g+31.
    """
    if number not in _FORMATS:
        raise o.unknown(f"operand format {number}")
    kind, registers = _FORMATS[number]
    file, first, _ = o.registers(k)
    exponent = o.lanes(scale)

    def read(w):
        rows = (w.v if file == "v" else w.a)[first : first + registers]
        raw = np.ascontiguousarray(rows.T).view(np.uint8)
        if kind == "fp4":
            values = formats.E2M1[np.stack([raw & 15, raw >> 4], 2).reshape(64, 32)]
        else:
            values = (formats.E4M3 if kind == "fp8" else formats.E5M2)[raw]
        matrix = np.empty((16, 128))
        for group in range(4):
            if kind == "fp4":
                columns = 32 * group + np.arange(32)
            else:
                columns = np.concatenate([16 * group + np.arange(16), 64 + 16 * group + np.arange(16)])
            matrix[:, columns] = values[16 * group : 16 * group + 16]
        powers = 2.0 ** ((exponent(w) >> U(8 * byte) & U(255)).astype(np.float64) - 127)
        return matrix * np.repeat(powers.reshape(4, 16).T, 32, axis=1)

    return read


@entry("v_mfma_scale_f32_16x16x128_f8f6f4", "v_mfma_f32_16x16x128_f8f6f4")
def _scaled(o: Operands):
    low, high = o.numbers("op_sel", [0, 0, 0]), o.numbers("op_sel_hi", [0, 0, 0])
    formats = o.number("cbsz"), o.number("blgp")
    if "scale" not in o.instruction.mnemonic:
        o.texts = (*o.texts, "0x7f", "0x7f")  # the scale 1
        low = high = [0, 0, 0]
    a, b = (_deep_side(o, k + 1, formats[k], k + 4, low[k] + 2 * high[k]) for k in (0, 1))
    result, old, places = o.rows(0, 4), _accumulator(o, 4), _places(16)

    def step(w):
        product = (a(w) @ b(w).T).astype(F)
        result(w)[:] = (old(w) + product[places]).view(U)

    return step


