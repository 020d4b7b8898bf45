"""k1 and k2 as the compiler made them, executed: whole layers, on memory that reorders nothing and on weak memory, one rank and two.

Oracle: the float64 decoder (reference/), with SGLang's bf16 rounding as the measure, as in tests/emulation/test_monokernel_*.py, whose bugs are
compiled in here. Needs clang with the AMDGPU target; emulation runs the same sources everywhere.
"""

import pytest
from cdna import toolchain

if reason := toolchain.missing("clang", "llvm-objdump"):
    pytest.skip(reason, allow_module_level=True)

from code_object_cases import Interpreted  # noqa: E402
from monokernel_cases import Group, gate, moe_gate, tiny, tiny_moe  # noqa: E402

from sgl_lowlatency.kernels.fault import MonokernelFault  # noqa: E402
from sgl_lowlatency.reference.inputs import random_step, random_weights  # noqa: E402

DENSE = tiny(1, 128, 4, 2, 64, 128)
DEEP = tiny(4, 96, 4, 2, 64, 64)
MOE = tiny_moe(1, 128, 4, 2, 64, 16, 4, 64)
LENGTHS = {  # by rows
    1: [333],
    6: [1, 31, 32, 33, 64, 200],
    8: [65, 1, 128, 129, 2, 63, 96, 200],
    16: [65, 1, 130, 64, 2, 63, 3, 31, 32, 33, 15, 16, 17, 1, 7, 128],
}
MISSING_AWAIT, WITHHELD, RING_NO_WAIT, FIRST_WORD_IS_FLAG, LOST_TILE = 2, 3, 9, 37, 39  # dialect::Planted


def run(group, step, **interpreted):
    with Interpreted(group.ranks[0].isa, **interpreted).in_place_of_emulation():
        return group.run(step, check_order=False)


def check(g, step, isa, *, num_ranks=1, **interpreted):
    group = Group(g, random_weights(g, seed=1), [step], isa=isa, num_ranks=num_ranks)
    ours = run(group, step, **interpreted)
    report = moe_gate(g, group.weights, step, ours, group.logits(step.rows)) if g.is_moe else gate(g, group.weights, step, ours)
    assert report.passed, str(report)
    assert group.ranks[0].executed() == {step.rows: 1}


@pytest.mark.parametrize(("rows", "isa"), [(1, "gfx950"), (6, "gfx942"), (8, "gfx950"), (16, "gfx942")])
def test_dense_decode(rows, isa):
    check(DENSE, random_step(DENSE, LENGTHS[rows], seed=rows), isa)


def test_dense_verify():
    check(DENSE, random_step(DENSE, [63, 1], seed=1, rows_per_request=6, lengths_are_prefix=True), "gfx950")


@pytest.mark.parametrize(("rows", "isa"), [(6, "gfx950"), (1, "gfx942")])
def test_moe_decode(rows, isa):
    check(MOE, random_step(MOE, LENGTHS[rows], seed=rows), isa)


@pytest.mark.parametrize(("g", "rows", "isa", "num_ranks"), [(DENSE, 6, "gfx950", 2), (DENSE, 8, "gfx942", 1), (MOE, 6, "gfx942", 2)])
def test_weak_memory_and_an_adversary(g, rows, isa, num_ranks):
    check(g, random_step(g, LENGTHS[rows], seed=rows), isa, num_ranks=num_ranks, weak={"seed": rows}, seed=rows)


def test_four_layers_of_two_ranks_that_run_apart():
    """Launches of a rank follow one another, whatever the other rank is at: parities and clears go round."""
    check(DEEP, random_step(DEEP, [20, 3], seed=4), "gfx950", num_ranks=2, weak={"seed": 4}, seed=4)


def test_words_that_are_taken_as_they_are_found():
    step = random_step(DENSE, [5, 70], seed=2)
    group = Group(DENSE, random_weights(DENSE, seed=2), [step])
    assert not gate(DENSE, group.weights, step, run(group, step, weak={"seed": 1}, seed=1, planted=MISSING_AWAIT)).passed


@pytest.mark.parametrize(("planted", "is_right"), [(0, True), (RING_NO_WAIT, False)])
def test_weights_that_are_taken_before_they_land(planted, is_right):
    """A wave's share of K has to be more tiles than its ring has slots: loads of the activations wait for every copy in front of them."""
    g = tiny(1, 2304, 1, 1, 64, 64)
    step = random_step(g, [5], seed=4)
    group = Group(g, random_weights(g, seed=4), [step])
    assert gate(g, group.weights, step, run(group, step, weak={"seed": 1, "landing": "late"}, seed=1, planted=planted)).passed == is_right


def test_a_flag_before_its_data_gives_wrong_streams():
    """A vector of 16 bytes arrives in parts."""
    step = random_step(DENSE, [20, 3], seed=6)
    group = Group(DENSE, random_weights(DENSE, seed=6), [step], num_ranks=2)
    try:
        ours = run(group, step, weak={"seed": 1}, seed=1, planted=FIRST_WORD_IS_FLAG)
    except AssertionError as error:
        assert "has another stream" in str(error)
    else:
        assert not gate(DENSE, group.weights, step, ours).passed


def test_a_withheld_word_ends_in_a_record_that_names_it():
    step = random_step(DENSE, [5, 70], seed=3)
    group = Group(DENSE, random_weights(DENSE, seed=3), [step], deadline_s=0.0005)
    with pytest.raises(MonokernelFault, match=r"monokernel stopped: rank 0, SM \d+, block \d waited 0\.00 s for word \d+ of edge 'qkv' of layer 0"):
        run(group, step, weak={"seed": 1}, seed=1, planted=WITHHELD)


def test_a_lost_tile_stops_every_rank_with_a_record():
    step = random_step(DENSE, [20, 3], seed=7)
    group = Group(DENSE, random_weights(DENSE, seed=7), [step], num_ranks=2, deadline_s=0.002)
    with pytest.raises(MonokernelFault, match=r"rank 0's part of tile 0 of layer 0"):
        run(group, step, weak={"seed": 1}, seed=1, planted=LOST_TILE)
    assert all(rank.fault() is not None and rank.executed() == {} for rank in group.ranks)
