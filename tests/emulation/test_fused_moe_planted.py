"""Bugs planted in fused_moe: each turns the comparison that must catch it red, and leaves the others as they are."""

import pytest
from fused_moe_cases import Moe

from sgl_lowlatency.kernels.decode_step import EmulationOptions

WRONG_SCALE_BLOCK, GATE_SCALE_FOR_UP, TIE_TO_HIGHER_ID, UNWEIGHTED_EXPERT, NEXT_EXPERT = 13, 14, 15, 24, 26  # dialect::Planted


def moe_of(planted):
    return Moe(256, 128, 32, 3, max_rows=12, emulation=EmulationOptions(planted=planted))


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("planted", [0, WRONG_SCALE_BLOCK, GATE_SCALE_FOR_UP, UNWEIGHTED_EXPERT, NEXT_EXPERT])
def test_the_gate_of_the_output(planted, rows):
    moe = moe_of(planted)
    x, _ = moe.inputs(rows)
    moe.run(x)
    found = moe.problems(x)
    assert (found == []) is (planted == 0)
    assert all(problem.startswith("MISS out") for problem in found)


def test_ties():
    for planted, ids in ((0, [0, 1, 2]), (TIE_TO_HIGHER_ID, [31, 30, 29])):
        moe = moe_of(planted)
        moe.weights.router.copy_(moe.weights.router[:1].expand(32, -1).clone())
        moe.weights.bias.zero_()
        moe.run(moe.inputs(2)[0])
        assert moe.record.ids.tolist() == [ids] * 2
