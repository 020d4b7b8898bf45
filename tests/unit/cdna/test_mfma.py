"""Matrix products. Oracle: numpy's product in f64 of matrices that are put into lanes, and taken out of them, by formulas written out here."""

import numpy as np
import pytest

from cdna import formats
from cdna.errors import UnknownInstruction
from cdna.single import run

U, F = np.uint32, np.float32


def bf16(x):
    """f32 with the upper half alone, and its uint16 codes."""
    code = (x.astype(F).view(U) >> U(16)).astype(np.uint16)
    return formats.bf16_to_f32(code), code


def into_lanes(codes, groups):
    """[n, K] codes to one register list: lane l holds row l % n, columns K / groups * (l // n) …."""
    n, depth = codes.shape
    per_lane = np.stack([codes[lane % n, depth // groups * (lane // n) :][: depth // groups] for lane in range(64)])
    return np.ascontiguousarray(per_lane).view(U).reshape(64, -1).T


def out_of_lanes(rows, n):
    """f32 [registers, 64] to [n, n]."""
    matrix = np.full((n, n), np.nan, F)
    for register in range(len(rows)):
        for lane in range(64):
            row = 4 * (lane // 16) + register if n == 16 else 8 * (register // 4) + 4 * (lane // 32) + register % 4
            matrix[row, lane % n] = rows[register, lane]
    return matrix


@pytest.mark.parametrize("files", ["v", "a"])
@pytest.mark.parametrize(
    ("mnemonic", "n", "depth", "kind"),
    [
        ("v_mfma_f32_16x16x32_bf16", 16, 32, "bf16"),
        ("v_mfma_f32_32x32x16_bf16", 32, 16, "bf16"),
        ("v_mfma_f32_16x16x16_bf16", 16, 16, "bf16"),
        ("v_mfma_f32_32x32x8_bf16", 32, 8, "bf16"),
        ("v_mfma_f32_16x16x16_f16", 16, 16, "f16"),
        ("v_mfma_f32_16x16x32_fp8_bf8", 16, 32, "8"),
    ],
)
def test_products(mnemonic, n, depth, kind, files):
    source = np.random.default_rng(n + depth)
    a, b, c = source.standard_normal((n, depth)), source.standard_normal((n, depth)), source.standard_normal((n, n)).astype(F)
    if kind == "bf16":
        (a, a_code), (b, b_code) = bf16(a), bf16(b)
    elif kind == "f16":
        a, b = a.astype(np.float16), b.astype(np.float16)
        a_code, b_code = a.view(np.uint16), b.view(np.uint16)
    else:
        a_code, b_code = (source.integers(0, 0x70, (n, depth)).astype(np.uint8) for _ in range(2))
        a, b = formats.E4M3[a_code], formats.E5M2[b_code]
    groups = 64 // n
    a_rows, b_rows = into_lanes(a_code, groups), into_lanes(b_code, groups)
    count, width = n * n // 64, len(a_rows)
    old = np.zeros((count, 64), F)
    for register in range(count):
        for lane in range(64):
            row = 4 * (lane // 16) + register if n == 16 else 8 * (register // 4) + 4 * (lane // 32) + register % 4
            old[register, lane] = c[row, lane % n]
    v = {i: row for i, row in enumerate(a_rows)} | {8 + i: row for i, row in enumerate(b_rows)}
    accumulators = {32 + i: row for i, row in enumerate(old)}

    def span(file, first, length):
        return f"{file}[{first}:{first + length - 1}]"

    text = f"{mnemonic} {span(files, 64, count)}, {span('v', 0, width)}, {span('v', 8, width)}, {span(files, 32, count)}"
    w = run(text, v=v | (accumulators if files == "v" else {}), a=accumulators if files == "a" else {}, exec_mask=1)
    result = out_of_lanes((w.v if files == "v" else w.a)[64 : 64 + count].view(F), n)
    expected = a.astype(float) @ b.astype(float).T
    np.testing.assert_array_equal(result, c + expected.astype(F))


def test_a_constant_accumulator():
    codes = np.full((16, 32), 0x3F80, np.uint16)  # ones
    rows = into_lanes(codes, 4)
    v = {i: row for i, row in enumerate(rows)} | {8 + i: row for i, row in enumerate(rows)}
    assert (run("v_mfma_f32_16x16x32_bf16 v[16:19], v[0:3], v[8:11], 0", v=v).vf[16:20] == 32).all()
    assert (run("v_mfma_f32_16x16x32_bf16 v[16:19], v[0:3], v[8:11], 1.0", v=v).vf[16:20] == 33).all()


def test_the_destination_may_be_an_operand():
    codes = np.random.default_rng(3).integers(0x3F00, 0x3FFF, (16, 32)).astype(np.uint16)
    rows = into_lanes(codes, 4)
    w = run("v_mfma_f32_16x16x32_bf16 v[0:3], v[0:3], v[0:3], 0", v=dict(enumerate(rows)))
    values = formats.bf16_to_f32(codes).astype(float)
    np.testing.assert_array_equal(out_of_lanes(w.vf[0:4], 16), (values @ values.T).astype(F))


@pytest.mark.parametrize(("number", "table", "registers"), [(0, formats.E4M3, 8), (1, formats.E5M2, 8), (4, formats.E2M1, 4)])
def test_scaled_products(number, table, registers):
    source = np.random.default_rng(number)
    codes = source.integers(0, len(table) // 2 - 8 if number == 1 else len(table) // 2 - 1, (2, 16, 128)).astype(np.uint8)
    exponents = source.integers(120, 134, (2, 16, 4)).astype(U)
    v = {}
    for side in (0, 1):
        for lane in range(64):
            row, group = lane % 16, lane // 16
            if number == 4:
                nibbles = codes[side, row, 32 * group : 32 * group + 32]
                data = nibbles[0::2] | nibbles[1::2] << 4
            else:
                data = np.concatenate([codes[side, row, 16 * group :][:16], codes[side, row, 64 + 16 * group :][:16]])
            for i, word in enumerate(np.ascontiguousarray(data).view(U)):
                v.setdefault(16 * side + i, np.zeros(64, U))[lane] = word
            v.setdefault(40 + side, np.zeros(64, U))[lane] = exponents[side, row, group] << U(8)  # byte 1: op_sel picks it
    formats = f" cbsz:{number} blgp:{number}" if number else ""
    last = registers - 1
    text = f"v_mfma_scale_f32_16x16x128_f8f6f4 v[50:53], v[0:{last}], v[16:{16 + last}], 0, v40, v41 op_sel:[1,1,0] op_sel_hi:[0,0,0]{formats}"
    w = run(text, v=v)
    scaled = [table[codes[side]] * np.repeat(2.0 ** (exponents[side].astype(float) - 127), 32, axis=1) for side in (0, 1)]
    np.testing.assert_array_equal(out_of_lanes(w.vf[50:54], 16), (scaled[0] @ scaled[1].T).astype(F))


def test_formats_that_are_not_modelled_are_named():
    with pytest.raises(UnknownInstruction, match="operand format 2"):
        run("v_mfma_scale_f32_16x16x128_f8f6f4 v[50:53], v[0:5], v[16:21], 0, v40, v41 op_sel_hi:[0,0,0] cbsz:2 blgp:2")
    with pytest.raises(UnknownInstruction, match="broadcasts and negations"):
        run("v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], 0 cbsz:1")
    with pytest.raises(UnknownInstruction, match="v_mfma_f64_16x16x4_f64 .* has no entry"):
        run("v_mfma_f64_16x16x4_f64 a[0:7], v[0:1], v[2:3], a[0:7]")
