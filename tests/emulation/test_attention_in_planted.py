"""Bugs planted in attention_in: each turns the comparison that must catch it red, and leaves the others as they are."""

import pytest
from attention_in_cases import Layer

from sgl_lowlatency.kernels.decode_step import EmulationOptions

OFF_BY_ONE_PAGE, SKIPPED_NORM, WRONG_ROPE, WRONG_SCALE_BLOCK = 4, 6, 7, 13  # dialect::Planted


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize(("planted", "missed"), [
    (0, []), (OFF_BY_ONE_PAGE, ["kv", "bytes of other slots, or between pages, were written"]),
    (SKIPPED_NORM, ["x", "q_lora", "q"]), (WRONG_ROPE, ["q", "kv"]), (WRONG_SCALE_BLOCK, ["q_lora", "q", "kv"]),
])  # fmt: skip
def test_the_gates(planted, missed, rows):
    """A row of keys is normed by itself, so that x's factor is no matter to it."""
    layer = Layer(max_rows=12, emulation=EmulationOptions(planted=planted))
    inputs = layer.inputs(rows)
    layer.run(*inputs)
    found = layer.problems(*inputs)
    assert [problem.removeprefix("MISS ").split(":")[0] for problem in found] == missed, found
