"""Bugs planted in attention_out: each turns the comparison that must catch it red, and leaves the others as they are."""

import pytest
from attention_out_cases import Layer

from sgl_lowlatency.kernels.decode_step import EmulationOptions

SKIPPED_NORM, WRONG_ROPE, WRONG_SCALE_BLOCK, TRANSPOSED_MIX, SHORT_SINKHORN = 6, 7, 13, 42, 43  # dialect::Planted


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize(("planted", "missed"), [
    (0, []), (SKIPPED_NORM, ["out"]), (WRONG_ROPE, ["streams", "out"]), (WRONG_SCALE_BLOCK, ["streams", "out"]),
    (TRANSPOSED_MIX, ["streams", "out"]), (SHORT_SINKHORN, ["coefficients", "streams", "out"]),
])  # fmt: skip
def test_the_gates(planted, missed, rows):
    layer = Layer(max_rows=12, emulation=EmulationOptions(planted=planted))
    inputs = layer.inputs(rows)
    layer.run(*inputs)
    found = layer.problems(*inputs)
    assert [problem.removeprefix("MISS ").split(":")[0].split(" ")[0] for problem in found] == missed, found
