"""Plans of MoE layers: every model and width is planned and valid, and each defect is reported by its own message."""

import dataclasses

import pytest

from sgl_lowlatency.kernels import abi, geometry
from sgl_lowlatency.kernels.bitmap_routing import MAX_EXPERTS, MAX_TOP_K
from sgl_lowlatency.plan import validate as validator
from sgl_lowlatency.plan.generations import check_generations
from sgl_lowlatency.plan.presets import MOE_GEOMETRIES
from sgl_lowlatency.plan.static_plan import PlanError, make_plan
from sgl_lowlatency.plan.tiles import grid_for
from sgl_lowlatency.plan.validate import validate

GEOMETRY = MOE_GEOMETRIES["qwen3-30b-a3b"]
PLAN = make_plan(GEOMETRY, 8, 128)


def with_op(name, **changes):
    return dataclasses.replace(PLAN, ops=tuple(dataclasses.replace(o, **changes) if o.name == name else o for o in PLAN.ops))


def test_limits_of_the_geometry_are_the_kernels():
    assert (geometry.TILE_ROWS, geometry.MAX_EXPERTS, geometry.MAX_TOP_K) == (abi.TILE_ROWS, MAX_EXPERTS, MAX_TOP_K)


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("name", MOE_GEOMETRIES)
def test_models_are_planned_on_an_h200(name, rows, has_head):
    """132 SMs: as many blocks as every one may own a tile of down."""
    model = MOE_GEOMETRIES[name]
    grid = grid_for(model, 132)
    assert grid == min(132, model.hidden // 16)
    plan = make_plan(model, rows, grid, has_head=has_head)
    assert validate(plan, 132) == []
    assert plan.num_stages >= 4
    assert min(count for _, count in plan.op("down").tiles) >= 1 and plan.op("gate_up").owners == []


def test_buffers_hold_every_pair_and_logit():
    assert PLAN.buffer("activation").shape == (64, 768) and PLAN.buffer("router_logits").shape == (8, 128)
    assert PLAN.edge("router").consumers == (("routing", 0),) and PLAN.edge("router").index == 6
    assert PLAN.panel_pairs == 43 and make_plan(GEOMETRY, 1, 128).panel_pairs == 8  # of 66 KiB, pairs of 768 bf16 and their padding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 120}, "config.num_experts 120 is not a multiple of 16 up to 384"),
        ({"num_experts": 400}, "config.num_experts 400 is not a multiple of 16 up to 384"),
        ({"top_k": 33}, "config.num_experts_per_tok 33 is outside 1..32"),
        ({"top_k": 0}, "config.num_experts_per_tok 0 is outside 1..32"),
        ({"moe_intermediate": 96}, "config.moe_intermediate_size 96 is not a multiple of 64"),
    ],
)
def test_a_geometry_that_the_kernel_cannot_run_is_refused_by_its_field(changes, message):
    with pytest.raises(PlanError, match=message):
        make_plan(dataclasses.replace(GEOMETRY, **changes), 1, 128)


@pytest.mark.parametrize("rows", [1, 16])
def test_fp8_experts_beside_a_bf16_router(rows):
    plan = make_plan(GEOMETRY, rows, 128, element_bytes=1)
    assert validate(plan) == []
    assert {op.name: op.element_bytes for op in plan.ops} == {"qkv": 1, "out_proj": 1, "router": 2, "gate_up": 1, "down": 1}
    with pytest.raises(PlanError, match="config.moe_intermediate_size 192 is not a multiple of 128"):
        make_plan(dataclasses.replace(GEOMETRY, moe_intermediate=192), rows, 128, element_bytes=1)


def test_blocks_without_tiles_of_down_are_refused():
    with pytest.raises(PlanError, match="grid 132 leaves blocks without tiles of down: hidden 2048 has 128"):
        make_plan(GEOMETRY, 1, 132)


def test_a_block_that_hands_over_nothing_for_all_is_ordered_with_nobody():
    """What it reads is cleared by others who cannot know: the reason for the rule above. Its tiles of gate_up, which it may have, do not count; one
    of out_proj would do, since every block reads that stream."""
    block = next(b for b in range(128) if PLAN.op("router").tiles[b][1] == 0)
    without = {}
    for name in ("out_proj", "down"):
        tiles = list(PLAN.op(name).tiles)
        tiles[block], tiles[block + 1] = (block, 0), (block, 2)
        without[name] = tuple(tiles)
    assert check_generations(with_op("down", tiles=without["down"])) == []
    ops = tuple(dataclasses.replace(op, tiles=without.get(op.name, op.tiles)) for op in PLAN.ops)
    errors = check_generations(dataclasses.replace(PLAN, ops=ops))
    assert errors and all(error.startswith("generations: layer") and f"in block {block} uses them" in error for error in errors), errors


def test_gate_up_that_blocks_own_is_refused():
    assert any("blocks [0] own tiles that routing shares out" in error for error in validate(with_op("gate_up", tiles=((0, 1), *((1, 0),) * 127))))
    assert "op gate_up: is_shared False is not the kernel's" in validate(with_op("gate_up", is_shared=False))


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (lambda total, block, grid: (total // grid * block, total // grid), "tiles are taken"),  # the rest of the division is nobody's
        (lambda total, block, grid: (0, total) if block == 0 else (total, 0), "with 8 active experts block 0 takes tiles 0..768 of 768, 0 are taken"),
    ],
    ids=["remainder lost", "one block has all"],
)
def test_shares_that_lose_tiles_or_are_uneven_are_found(monkeypatch, share, message):
    monkeypatch.setattr(validator.abi, "even_share", share)
    assert any(message in error for error in validate(PLAN)), validate(PLAN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"panel_pairs": 7}, "panel_pairs 7 does not hold the 8 pairs that an expert may have"),
        ({"panel_pairs": 64}, "op down: a panel of 99328 bytes exceeds max_panel_bytes 66816"),
        ({"shared_memory_bytes": PLAN.shared_memory_bytes - 128}, f"shared_memory_bytes {PLAN.shared_memory_bytes - 128} is not the layout's {PLAN.shared_memory_bytes}"),
    ],
)
def test_a_plan_whose_shared_memory_does_not_hold_its_pairs_is_refused(changes, message):
    assert message in validate(dataclasses.replace(PLAN, **changes))


def test_router_tiles_that_nobody_owns_are_found():
    tiles = tuple((begin, 0) if begin == 0 else (begin, count) for begin, count in PLAN.op("router").tiles)
    assert "op router: tile 0 is produced 0 times" in validate(with_op("router", tiles=tiles))


def test_panels_in_parts_are_refused():
    assert any("op gate_up: 2 panels, the kernel takes all of K in a MoE layer" in error for error in validate(with_op("gate_up", k_panel=1024)))
