"""What orders clears and uses of the hand-over buffers: numbers of generations that are too small, and missing arrows, are found.

Oracle: the kernel's fences worked out by hand. A clear in layer l is released by the fence of layer l, its word arrives in qkv of
layer l + 1 and is received by the fence there; so uses are safe from layer l + 2 on, and from layer 2 on behind the clears that
precede layer 0, which have their first fence in it: clear_ahead 3 is the least. A use of layer u's words ends in out_proj of layer
u + 1; the fence there releases it, words of down carry it to qkv of layer u + 2, whose fence receives it: layer u + 3 may clear.
"""

import dataclasses

import pytest

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.plan.generations import check_generations
from sgl_lowlatency.plan.presets import GEOMETRIES
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.plan.tiles import distribute, max_grid, op_shapes
from sgl_lowlatency.plan.validate import validate

PLAN = make_plan(GEOMETRIES["qwen3-8b"], 1, 132)
SMALL = make_plan(GEOMETRIES["qwen3-0.6b"], 1, 132)  # 64 of 132 blocks own down tiles
LEAST_AHEAD, LEAST_BEHIND = 3, 3


def with_generations(generations, clear_ahead, plan=PLAN):
    return dataclasses.replace(plan, generations=generations, clear_ahead=clear_ahead)


def test_the_kernels_numbers_are_checked():
    assert (PLAN.generations, PLAN.clear_ahead) == (abi.GENERATIONS, abi.CLEAR_AHEAD)
    assert "clear_ahead 3 is not the kernel's 4" in validate(with_generations(8, 3))
    assert "generations 9 is not the kernel's 8" in validate(with_generations(9, 4))


@pytest.mark.parametrize("clear_ahead", range(1, 6))
@pytest.mark.parametrize("generations", range(4, 10))
def test_the_least_distances_and_no_others(generations, clear_ahead):
    errors = check_generations(with_generations(generations, clear_ahead))
    before = [error for error in errors if "before layer" in error]
    while_read = [error for error in errors if "while" in error]
    assert len(before) + len(while_read) == len(errors)
    assert bool(before) == (clear_ahead < LEAST_AHEAD)
    assert bool(while_read) == (generations - clear_ahead < LEAST_BEHIND)


def test_clear_ahead_of_one_is_named():
    errors = validate(with_generations(8, 1))
    assert "generations: qkv of layer 0 in block 0 may use words of layer 0 before layer -1 in block 131 has cleared them" in errors
    assert {error.split()[1] for error in errors if "before layer" in error} == {
        "qkv", "attention", "combine", "out_proj", "gate_up", "later", "down"
    }


def test_five_generations_are_named():
    errors = validate(with_generations(5, 4))
    assert "generations: layer 0 in block 0 may clear words of layer -1 while qkv of layer 0 in block 131 uses them" in errors
    assert "generations: layer 1 in block 0 may clear words of layer 0 while down of layer 0 in block 131 uses them" in errors


def test_a_clear_of_the_generation_in_use_conflicts_even_in_one_block():
    alone = make_plan(GEOMETRIES["qwen3-0.6b"], 1, 1)
    assert validate(alone) == []
    errors = check_generations(with_generations(4, 4, alone))
    assert "generations: layer 0 in block 0 may clear words of layer 0 while down of layer 0 in block 0 uses them" in errors
    assert check_generations(with_generations(5, 4, alone)) == [], "a block is in order with itself"


def test_launches_of_few_layers_meet_no_generation_twice():
    short = dataclasses.replace(PLAN, geometry=dataclasses.replace(PLAN.geometry, num_layers=2), generations=5)
    assert check_generations(short) == [
        error for error in check_generations(dataclasses.replace(PLAN, generations=5)) if "layer 2" not in error and "layer 3" not in error
    ]
    shortest = dataclasses.replace(PLAN, geometry=dataclasses.replace(PLAN.geometry, num_layers=2))
    assert check_generations(shortest) == []


def moved(plan, name, to_block):
    """The plan with all tiles of an op in one block."""
    ops = []
    for op in plan.ops:
        ranges = tuple((0, op.num_tiles) if block == to_block else (0, 0) for block in range(plan.grid))
        ops.append(dataclasses.replace(op, tiles=ranges) if op.name == name else op)
    return dataclasses.replace(plan, ops=tuple(ops))


def test_blocks_that_receive_nothing_from_the_clearers_are_not_known_to_be_behind_them():
    """With qkv in one block, owners of neither qkv nor down read no word that a clearer has stored behind its fence."""
    plan = moved(SMALL, "qkv", 3)
    errors = check_generations(plan)
    named = {int(error.split("in block ")[1].split()[0]) for error in errors}
    assert named and named <= set(range(132)) - {*plan.op("down").owners, 3}
    assert all("may use words of layer" in error for error in errors)
    assert check_generations(moved(PLAN, "qkv", 3)) == [], "there every block owns down tiles, and the clearers' late tiles of gate_up"


def test_blocks_whose_words_no_clearer_reads_are_not_known_to_have_finished():
    """With gate_up in one block, what others read is over for the clearers only if those own down tiles too."""
    plan = moved(SMALL, "gate_up", 3)
    errors = check_generations(plan)
    others = set(range(132)) - {*plan.op("down").owners, 3}
    named = {int(error.split("in block ")[2].split()[0]) for error in errors if "while" in error}
    assert named and named <= others


def test_a_step_whose_blocks_own_few_tiles_is_refused_when_generations_go_round():
    """On a grid larger than an op's tiles some blocks have attention items and nothing else: what they read gives no order."""
    geometry = dataclasses.replace(GEOMETRIES["qwen3-0.6b"], hidden=256, intermediate=256, num_q_heads=8, num_kv_heads=2, head_dim=64)
    assert max(rows // 16 for rows, _ in op_shapes(geometry).values()) < 132 == len(distribute(op_shapes(geometry), 132)["down"])
    errors = check_generations(make_plan(geometry, 1, 132))
    assert any("attention of layer" in error for error in errors)
    two_layers = dataclasses.replace(geometry, num_layers=2)
    assert check_generations(make_plan(two_layers, 1, 132)) == []


def test_a_small_model_uses_a_grid_that_is_safe():
    """Whatever GPU: max_grid blocks or fewer, each with tiles of qkv and gate_up, pass; more need not."""
    small = dataclasses.replace(GEOMETRIES["qwen3-0.6b"], num_layers=12, hidden=128, num_q_heads=2, num_kv_heads=2, head_dim=64, intermediate=256)
    assert max_grid(small) == 24
    for grid in (1, 7, 24):
        assert validate(make_plan(small, 4, grid=grid)) == []
    assert validate(make_plan(small, 4, grid=132)) != []
