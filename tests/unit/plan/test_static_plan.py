"""make_plan: every dense Qwen3 geometry, width and grid is planned and valid, or refused by name."""

import dataclasses
import hashlib
import json

import pytest

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.plan.edges import edge_names
from sgl_lowlatency.plan.panels import k_panel_for
from sgl_lowlatency.plan.presets import GEOMETRIES
from sgl_lowlatency.plan.static_plan import PlanError, make_plan
from sgl_lowlatency.plan.validate import validate

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 24, 32)
SMALL_GRID_REFUSED = {  # (geometry, grid, rows) whose accumulators across panels exceed one block's shared memory
    ("qwen3-1.7b", 1, 16), ("qwen3-4b", 1, 16), ("qwen3-8b", 1, 8), ("qwen3-8b", 1, 16), ("qwen3-14b", 1, 8),
    ("qwen3-14b", 1, 16), ("qwen3-14b", 8, 16), ("qwen3-32b", 1, 8), ("qwen3-32b", 1, 16),
    ("qwen3-32b", 8, 16), ("llama-3.2-1b", 1, 16), ("llama-3.1-8b", 1, 8), ("llama-3.1-8b", 1, 16), ("qwen2.5-7b", 1, 16),
    *({(name, grid, 32) for name in GEOMETRIES for grid in (8, 1)} - {("qwen3-0.6b", 8, 32)}),
}


@pytest.mark.parametrize("grid", [132, 148, 160])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_width_on_a_real_grid_is_valid(name, grid):
    for rows in ROWS:
        plan = make_plan(GEOMETRIES[name], rows, grid, has_head=True)
        assert validate(plan, num_sms=grid) == []
        assert plan.num_stages >= (7 if rows <= 16 else 4), "the ring holds at least 116 KB; where many rows take it, more than is in flight"


@pytest.mark.parametrize("grid", [8, 1])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_small_grids_are_valid_or_refused(name, grid):
    for rows in (1, 2, 4, 8, 16, 32):
        if (name, grid, rows) in SMALL_GRID_REFUSED:
            with pytest.raises(PlanError, match=f"shared_memory_bytes 232448 is too little for rows {rows} on grid {grid}"):
                make_plan(GEOMETRIES[name], rows, grid)
        else:
            assert validate(make_plan(GEOMETRIES[name], rows, grid), num_sms=grid) == []


def test_qwen3_8b_is_balanced_on_an_h200():
    loads = make_plan(GEOMETRIES["qwen3-8b"], 1, 132).block_weight_bytes()
    assert sum(loads) == 2 * 4096 * (6144 + 4096 + 3 * 12288)
    assert max(loads) / (sum(loads) / len(loads)) < 1.05


@pytest.mark.parametrize("name", GEOMETRIES)
def test_each_op_is_as_even_as_whole_tiles_allow(name):
    for op in make_plan(GEOMETRIES[name], 1, 132).ops:
        counts = [count for _, count in op.tiles]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == op.num_tiles


def test_widths_share_one_workspace():
    plans = [make_plan(GEOMETRIES["qwen3-8b"], rows, 132) for rows in ROWS]
    assert len({(plan.generation_bytes, plan.generations, plan.workspace_bytes) for plan in plans}) == 1
    assert len({tuple(op.tiles for op in plan.ops) for plan in plans}) == 1
    ends = [max(buffer.offset + buffer.bytes for buffer in plan.buffers) for plan in plans]
    assert ends == sorted(ends), "a narrower step uses less of a generation"
    assert plans[-1].rows == abi.MAX_ROWS
    assert plans[0].workspace_bytes == 8 * plans[0].generation_bytes


@pytest.mark.parametrize("name", GEOMETRIES)
def test_verify_steps_share_the_workspace_of_decode_and_are_valid(name):
    decode = make_plan(GEOMETRIES[name], 1, 132)
    ends = []
    for rows_per_request in range(1, abi.MAX_ROWS + 1):
        for rows in {rows_per_request, abi.MAX_ROWS // rows_per_request * rows_per_request}:
            plan = make_plan(GEOMETRIES[name], rows, 132, rows_per_request=rows_per_request)
            assert validate(plan, num_sms=132) == []
            assert plan.workspace_bytes == decode.workspace_bytes and plan.num_requests * rows_per_request == rows
            assert plan.num_stages >= 4 and plan.shared_memory_bytes == make_plan(GEOMETRIES[name], rows, 132).shared_memory_bytes
            ends.append(max(buffer.offset + buffer.bytes for buffer in plan.buffers))
    assert max(ends) <= decode.generation_bytes < max(ends) + 128


def test_items_of_a_verify_step_have_rows_beside_heads():
    """Qwen3-8B has four query heads a kv head: an item takes two rows of a request, the last one what is left."""
    geometry = GEOMETRIES["qwen3-8b"]
    plan = make_plan(geometry, 15, 132, rows_per_request=5)
    assert plan.buffer("partial_out").shape == (132 + 3 * 8 * 3, 8, 128)
    assert (abi.item_rows(geometry, 5), abi.item_columns(geometry, 5), abi.request_units(geometry, 5)) == (2, 8, 8 * 3)
    assert make_plan(geometry, 15, 132).buffer("partial_out").shape == (132 + 15 * 8, 4, 128)
    twelve = dataclasses.replace(geometry, num_q_heads=12 * 8)
    assert (abi.item_rows(twelve, 5), abi.item_columns(twelve, 5), abi.request_units(twelve, 5)) == (1, 8, 8 * 2 * 5)
    assert plan.hash != make_plan(geometry, 15, 132, rows_per_request=3).hash


def test_the_buffers_hold_the_widest_step():
    geometry = dataclasses.replace(GEOMETRIES["qwen3-8b"], num_q_heads=12 * 8)  # 12 query heads a kv head: two items share one
    assert abi.head_subgroups(12, 1) == 2
    plan = make_plan(geometry, 16, 132)
    items = 132 + 16 * 8 * 2
    shapes = {
        "qkv": ("f32", (16, (96 + 16) * 128)), "attention_out": ("bf16", (16, 96 * 128)), "activation": ("bf16", (16, 12288)),
        "mid_x": ("bf16", (16, 4096)), "mid_scaled": ("bf16", (16, 4096)), "mid_squares": ("f32", (16, 256)),
        "end_x": ("bf16", (16, 4096)), "end_scaled": ("bf16", (16, 4096)), "end_squares": ("f32", (16, 256)),
        "partial_out": ("f32", (items, 8, 128)), "partial_max_sum": ("f32", (items, 8, 2)),
    }
    assert {buffer.name: (buffer.dtype, buffer.shape) for buffer in plan.buffers} == shapes
    assert plan.buffer("activation").bytes == 16 * 12288 * 2
    four_heads = make_plan(GEOMETRIES["qwen3-8b"], 2, 132)  # an item has no more than a kv head's query heads
    assert four_heads.buffer("partial_out").shape == (132 + 2 * 8, 4, 128)


def test_edges_say_what_is_handed_over():
    plan = make_plan(GEOMETRIES["qwen3-8b"], 2, 132)
    assert tuple(edge.name for edge in plan.edges) == edge_names(plan.geometry)
    stream = 2 * (4096 // 2 + 4096 // 2 + 256)
    items = 132 + 2 * 8
    assert {edge.name: edge.words for edge in plan.edges} == {
        "qkv": 2 * 6144, "partial": items * 4 * (128 + 2), "attention": 2 * 4096 // 2, "out_proj": stream, "gate_up": 2 * 12288 // 2, "down": stream,
    }
    assert plan.edge("down").consumers == (("qkv", 1), ("out_proj", 1), ("final_norm", 0))


def test_a_panel_is_all_of_k_where_that_fits():
    budget = abi.panel_bytes(2, 12288)
    assert k_panel_for(1, 12288, budget) == k_panel_for(2, 12288, budget) == 12288
    assert k_panel_for(2, 12288, budget - 1) == 6144  # two equal panels
    assert k_panel_for(3, 12288, budget) == 6144


@pytest.mark.parametrize("rows", [3, 5, 8, 16])
@pytest.mark.parametrize("k_extent", [2560, 4096, 9728, 25600])
def test_several_panels_are_as_few_and_as_equal_as_stages_allow(rows, k_extent):
    budget = 64 * 1024
    k_panel = k_panel_for(rows, k_extent, budget)
    if k_panel == k_extent:
        assert abi.panel_bytes(rows, k_extent) <= budget
        return
    assert k_panel % abi.stage_k(2) == 0 and abi.panel_bytes(rows, k_panel) <= budget
    fewest = next(n for n in range(1, 100) if abi.panel_bytes(rows, -(-k_extent // (n * abi.stage_k(2))) * abi.stage_k(2)) <= budget)
    assert -(-k_extent // k_panel) <= fewest
    assert k_panel == abi.stage_k(2) or -(-k_extent // (k_panel - abi.stage_k(2))) > fewest, "a smaller panel would do"


def test_a_stage_of_k_is_the_least_panel():
    least = abi.panel_bytes(16, abi.stage_k(2))
    assert k_panel_for(16, 4096, least) == abi.stage_k(2)
    assert k_panel_for(16, 4096, least - 1) == 0


@pytest.mark.parametrize("name", GEOMETRIES)
def test_fp8_weights_halve_a_blocks_bytes_and_double_a_stages_k(name):
    for rows in ROWS:
        bf16, fp8 = (make_plan(GEOMETRIES[name], rows, 132, element_bytes=element_bytes) for element_bytes in (2, 1))
        assert validate(fp8, num_sms=132) == [] and fp8.num_stages >= (7 if rows <= 16 else 4)
        assert [2 * one for one in fp8.block_weight_bytes()] == bf16.block_weight_bytes()
        assert all(op.k_panel == op.k_extent or op.k_panel % 1024 == 0 for op in fp8.ops)
        assert fp8.hash != bf16.hash


def test_a_panel_has_no_more_fp8_stages_than_a_warp_keeps_scales():
    budget = abi.panel_bytes(1, 65536)
    assert k_panel_for(1, 32768, budget, 1) == 32768 == abi.MAX_SCALED_PANEL_K
    assert k_panel_for(1, 33792, budget, 1) == 17408  # two panels, in stages of 1024
    assert k_panel_for(1, 33792, budget, 2) == 33792
    plan = make_plan(GEOMETRIES["qwen3-8b"], 1, 132, element_bytes=1)
    wide = [dataclasses.replace(op, k_panel=33792, k_extent=33792) for op in plan.ops]
    errors = validate(dataclasses.replace(plan, ops=tuple(wide)))
    assert any("k_panel 33792 is above 32768" in error for error in errors)


def test_ring_takes_what_the_panel_leaves():
    for rows in (1, 8):
        plan = make_plan(GEOMETRIES["qwen3-8b"], rows, 132)
        assert plan.shared_memory_bytes <= 232448 < plan.shared_memory_bytes + abi.STAGE_BYTES
    wide, narrow = (make_plan(GEOMETRIES["qwen3-8b"], 8, 132, panel_budget_bytes=kib * 1024) for kib in (128, 66))
    assert narrow.max_panel_bytes < wide.max_panel_bytes
    assert narrow.num_stages > wide.num_stages


def test_attention_needs_its_panel_whatever_the_operations_do():
    plan = make_plan(GEOMETRIES["qwen3-8b"], 1, 132, panel_budget_bytes=26 * 1024)
    assert max(abi.panel_bytes(1, op.k_panel) for op in plan.ops) < plan.max_panel_bytes
    assert plan.max_panel_bytes >= 8 * 2 * abi.WARP_TOKENS * 128 * 2, "every consumer warp has its tokens' K and V there"


def test_hash_is_sha256_of_canonical_json_and_tells_plans_apart():
    one, same = (make_plan(GEOMETRIES["qwen3-8b"], 2, 132) for _ in range(2))
    assert one.hash == same.hash == hashlib.sha256(one.to_json().encode()).hexdigest()
    assert json.loads(one.to_json())["ops"][3]["name"] == "down"
    others = [make_plan(GEOMETRIES["qwen3-8b"], 3, 132), make_plan(GEOMETRIES["qwen3-8b"], 2, 148), make_plan(GEOMETRIES["qwen3-14b"], 2, 132)]
    assert len({one.hash, *(other.hash for other in others)}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.rows = 3


@pytest.mark.parametrize(
    ("changes", "rows", "grid", "message"),
    [
        ({}, 33, 132, "rows 33 is outside 1..32"),
        ({}, 0, 132, "rows 0 is outside 1..32"),
        ({}, 1, 0, "grid 0 is not positive"),
        ({"rows_per_request": 3}, 4, 132, "rows 4 is not a multiple of rows_per_request 3"),
        ({"rows_per_request": 0}, 4, 132, "rows_per_request 0 is not positive"),
        ({"head_dim": 96}, 1, 132, "head_dim 96 is not one of 64, 128"),
        ({"hidden": 4100}, 1, 132, "hidden_size 4100 is not a multiple of 64"),
        ({"intermediate": 12300}, 1, 132, "intermediate_size 12300 is not a multiple of 64"),
        ({"num_q_heads": 33}, 1, 132, "num_attention_heads 33 is not a multiple"),
        ({"num_layers": 0}, 1, 132, "num_layers 0 is not positive"),
    ],
)
def test_unsupported_arguments_are_named(changes, rows, grid, message):
    with pytest.raises(PlanError, match=message):
        chain = changes.pop("rows_per_request", 1)
        make_plan(dataclasses.replace(GEOMETRIES["qwen3-8b"], **changes), rows, grid, rows_per_request=chain)


def test_too_little_shared_memory_is_named():
    with pytest.raises(PlanError, match="shared_memory_bytes 49152 is too little for rows 1 on grid 132"):
        make_plan(GEOMETRIES["qwen3-8b"], 1, 132, shared_memory_bytes=49152)


@pytest.mark.parametrize("rows", [1, 8, 16, 32])
@pytest.mark.parametrize("element_bytes", [2, 1])
def test_a_head_takes_nothing_from_the_layers(rows, element_bytes):
    """Of a bf16 model; behind FP8 layers, whose panels are shorter, it may take panels of its own."""
    plan, bare = (make_plan(GEOMETRIES["qwen3-8b"], rows, 132, element_bytes=element_bytes, has_head=has_head) for has_head in (True, False))
    assert validate(plan) == [] and plan.head.element_bytes == 2 and bare.head is None
    assert (plan.ops, plan.num_stages, plan.generation_bytes) == (bare.ops, bare.num_stages, bare.generation_bytes)
    assert plan.hash != bare.hash


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_heads_surplus_goes_to_blocks_with_less_to_do_in_the_layer_before(name):
    plan = make_plan(GEOMETRIES[name], 1, 132, has_head=True)
    counts, loads = [count for _, count in plan.head.tiles], plan.block_weight_bytes()
    assert sum(counts) == -(-GEOMETRIES[name].vocab // abi.TILE_ROWS) and max(counts) - min(counts) <= 1
    more, fewer = ([load for load, count in zip(loads, counts) if (count == max(counts)) == is_more] for is_more in (True, False))
    assert not fewer or max(more) <= min(fewer)
