"""The plan interpreter computes what the oracle does, stops where it is told, and goes wrong where a plan is wrong."""

import dataclasses

import pytest
import torch

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.reference import qwen3_decode, standard_path
from sgl_lowlatency.reference.gate import compare
from sgl_lowlatency.reference.inputs import random_step, random_weights
from sgl_lowlatency.reference.plan_interpreter import PlanInterpreter, attention_items

GEOMETRY = Geometry(2, 640, 12, 2, 64, 1152, 512, 8192, 1e-6, False)
LENGTHS = [1, 65, 1000, 64, 300]
WEIGHTS = random_weights(GEOMETRY, 3)
INPUTS = random_step(GEOMETRY, LENGTHS, 3)
PLAN = make_plan(GEOMETRY, len(LENGTHS), 7, panel_budget_bytes=abi.panel_bytes(len(LENGTHS), abi.STAGE_K))


def run(plan, **options):
    interpreter = PlanInterpreter(plan, WEIGHTS, INPUTS.clone())
    return interpreter, interpreter.run(**options)


def test_a_step_passes_the_gate():
    _, ours = run(PLAN)
    assert min(op.num_panels for op in PLAN.ops if op.k_extent > abi.STAGE_K) > 1
    report = compare(ours, standard_path.decode_step(GEOMETRY, WEIGHTS, INPUTS), qwen3_decode.decode_step(GEOMETRY, WEIGHTS, INPUTS))
    assert report.passed, str(report)


def test_stop_after_leaves_the_rest_unwritten():
    interpreter, outputs = run(PLAN, stop_after=(0, "out_proj"))
    assert outputs is None
    assert bool(interpreter.buffer("attention_out").isfinite().all()) and bool(interpreter.buffer("residual").isfinite().all())
    assert bool(interpreter.buffer("activation").isnan().all())
    interpreter, _ = run(PLAN, stop_after=(0, "gate_up"))
    assert bool(interpreter.buffer("activation").isfinite().all())


def test_stop_after_the_first_op_is_the_qkv_product():
    interpreter, _ = run(PLAN, stop_after=(0, "qkv"))
    layer = WEIGHTS.layers[0]
    x = qwen3_decode.rms_norm(WEIGHTS.embedding[INPUTS.input_ids].double(), layer.input_norm, GEOMETRY.rms_eps)
    expected = x @ layer.qkv.double().T
    assert float((interpreter.buffer("qkv").double() - expected).norm() / expected.norm()) < 5e-3


def test_a_plan_for_other_rows_is_refused():
    with pytest.raises(ValueError, match="the plan is for 5 rows, the inputs have 2"):
        PlanInterpreter(PLAN, WEIGHTS, random_step(GEOMETRY, [3, 4], 1))


@pytest.mark.parametrize("name", ["qkv", "out_proj", "gate_up", "down"])
def test_a_tile_that_nobody_owns_shows(name):
    op = PLAN.op(name)
    tiles = list(op.tiles)
    tiles[3] = (tiles[3][0], tiles[3][1] - 1)
    ops = tuple(dataclasses.replace(o, tiles=tuple(tiles)) if o.name == name else o for o in PLAN.ops)
    _, ours = run(dataclasses.replace(PLAN, ops=ops))
    if name in ("out_proj", "down"):  # the residual keeps an older value or poison
        report = compare(ours, standard_path.decode_step(GEOMETRY, WEIGHTS, INPUTS), qwen3_decode.decode_step(GEOMETRY, WEIGHTS, INPUTS))
        assert not report.passed
    else:
        assert bool(ours.hidden.isnan().any())


def test_overlapping_buffers_show():
    qkv, residual = PLAN.buffer("qkv"), PLAN.buffer("residual")
    buffers = tuple(dataclasses.replace(b, offset=qkv.offset) if b is residual else b for b in PLAN.buffers)
    _, ours = run(dataclasses.replace(PLAN, buffers=buffers))
    report = compare(ours, standard_path.decode_step(GEOMETRY, WEIGHTS, INPUTS), qwen3_decode.decode_step(GEOMETRY, WEIGHTS, INPUTS))
    assert not report.passed


@pytest.mark.parametrize("grid", [1, 7, 132])
@pytest.mark.parametrize("lengths", [[1], [0, 1], [64, 65], [1000, 1, 8000], [33] * 16])
def test_items_cover_every_token_of_every_head_once(lengths, grid):
    items = list(attention_items(GEOMETRY, lengths, grid))
    seen = {(row, head): 0 for row in range(len(lengths)) for head in range(GEOMETRY.num_q_heads)}
    slots = set()
    for item in items:
        assert item.kv_head * 6 <= item.head_begin and item.head_begin + item.num_heads <= (item.kv_head + 1) * 6
        assert item.num_heads <= abi.MAX_HEADS_PER_ITEM
        assert item.begin % abi.ITEM_TOKEN_MULTIPLE == 0
        slot = item.first_slot + item.split * item.slot_stride
        assert slot not in slots and slot < len(items), "every item has a partial of its own"
        slots.add(slot)
        for head in range(item.head_begin, item.head_begin + item.num_heads):
            assert seen[item.row, head] == item.begin, "splits follow one another"
            seen[item.row, head] = item.end
    assert all(end == lengths[row] for (row, _), end in seen.items())
    units = len(lengths) * GEOMETRY.num_kv_heads * abi.head_subgroups(GEOMETRY.num_q_heads, GEOMETRY.num_kv_heads)
    assert len(items) <= grid + units, "partial_out has that many"
