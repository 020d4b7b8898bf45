"""The plan interpreter computes what the oracle does, stops where it is told, and goes wrong where a plan is wrong."""

import dataclasses

import pytest
import torch

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.reference import dense_decode, standard_path
from sgl_lowlatency.reference.gate import compare
from sgl_lowlatency.reference.inputs import random_step, random_weights
from sgl_lowlatency.reference.plan_interpreter import PlanInterpreter, attention_items, merge_order

GEOMETRY = Geometry(2, 640, 12, 2, 64, 1152, 512, 8192, 1e-6, False)
LENGTHS = [1, 65, 1000, 64, 300]
WEIGHTS = random_weights(GEOMETRY, 3)
INPUTS = random_step(GEOMETRY, LENGTHS, 3)
PLAN = make_plan(GEOMETRY, len(LENGTHS), 7, panel_budget_bytes=abi.panel_bytes(len(LENGTHS), abi.stage_k(2)))


def run(plan, **options):
    interpreter = PlanInterpreter(plan, WEIGHTS, INPUTS.clone())
    return interpreter, interpreter.run(**options)


def test_a_step_passes_the_gate():
    _, ours = run(PLAN)
    assert min(op.num_panels for op in PLAN.ops if op.k_extent > abi.stage_k(2)) > 1
    report = compare(ours, standard_path.decode_step(GEOMETRY, WEIGHTS, INPUTS), dense_decode.decode_step(GEOMETRY, WEIGHTS, INPUTS))
    assert report.passed, str(report)


def test_stop_after_leaves_the_rest_unwritten():
    interpreter, outputs = run(PLAN, stop_after=(0, "out_proj"))
    assert outputs is None
    for name in ("attention_out", "mid_x", "mid_scaled", "mid_squares"):
        assert bool(interpreter.buffer(name, 0).isfinite().all()), name
    assert bool((interpreter.buffer("activation", 0).view(torch.int16) == -1).all())
    assert bool((interpreter.buffer("end_x", 0).view(torch.int16) == -1).all())
    interpreter, _ = run(PLAN, stop_after=(0, "gate_up"))
    assert bool(interpreter.buffer("activation", 0).isfinite().all())


@pytest.mark.parametrize("captured", [[0], [1], [0, 1]], ids=str)
def test_captured_layers_pass_the_gate_and_one_that_nobody_fills_does_not(captured):
    interpreter = PlanInterpreter(PLAN, WEIGHTS, INPUTS.clone(), captured)
    ours = interpreter.run()
    standard, oracle = (module.decode_step(GEOMETRY, WEIGHTS, INPUTS, captured=captured) for module in (standard_path, dense_decode))
    report = compare(ours, standard, oracle)
    assert report.passed, str(report)
    assert [figure.output for figure in report.figures if figure.output.startswith("aux")] == [f"aux[{i}]" for i in range(len(captured))]
    down = dataclasses.replace(PLAN.op("down"), tiles=tuple((begin, max(count - 1, 0)) for begin, count in PLAN.op("down").tiles))
    plan = dataclasses.replace(PLAN, ops=tuple(down if op.name == "down" else op for op in PLAN.ops))
    lost = PlanInterpreter(plan, WEIGHTS, INPUTS.clone(), captured).run()
    assert all(bool(layer.isnan().any()) for layer in lost.aux) and not compare(lost, standard, oracle).passed


def test_the_embedding_is_handed_over_as_layer_minus_one():
    interpreter, _ = run(PLAN, stop_after=(0, "qkv"))
    embedded = WEIGHTS.embedding[INPUTS.input_ids]
    assert torch.equal(interpreter.buffer("end_x", -1), embedded)
    assert torch.equal(interpreter.buffer("end_scaled", -1), embedded * WEIGHTS.layers[0].input_norm)
    squares = embedded.double().pow(2).view(len(LENGTHS), -1, abi.TILE_ROWS).sum(-1)
    torch.testing.assert_close(interpreter.buffer("end_squares", -1).double(), squares, rtol=1e-6, atol=0.0)


def test_stop_after_the_first_op_is_the_qkv_product():
    interpreter, _ = run(PLAN, stop_after=(0, "qkv"))
    layer = WEIGHTS.layers[0]
    x = dense_decode.rms_norm(WEIGHTS.embedding[INPUTS.input_ids].double(), layer.input_norm, GEOMETRY.rms_eps)
    expected = x @ layer.qkv.double().T
    assert float((interpreter.buffer("qkv", 0).double() - expected).norm() / expected.norm()) < 5e-3


def test_partials_of_the_longest_row_are_its_splits_in_merge_order():
    """Oracle: softmax over each split's tokens in float64."""
    interpreter, _ = run(PLAN, stop_after=(0, "attention"))
    row, head = LENGTHS.index(1000), 7
    splits = [item for item in interpreter.items if item.row == row and item.head_begin <= head < item.head_begin + item.num_heads]
    assert len(splits) > 1
    qkv = interpreter.buffer("qkv", 0)[row].double().view(-1, GEOMETRY.head_dim)
    cos_sin = WEIGHTS.cos_sin[INPUTS.positions[row]][None]
    q = dense_decode.rope(dense_decode.rms_norm(qkv[None, head : head + 1], WEIGHTS.layers[0].q_norm, GEOMETRY.rms_eps), cos_sin)[0, 0]
    for item in splits[:-1]:  # old tokens only
        slots = INPUTS.old_slots(row)[item.begin : item.end]
        scores = INPUTS.k_buffers[0][slots, item.kv_head].double() @ q / GEOMETRY.head_dim**0.5
        weights = (scores - scores.max()).exp()
        expected = weights @ INPUTS.v_buffers[0][slots, item.kv_head].double()
        slot, h = item.first_slot + item.split * item.slot_stride, head - item.head_begin
        positions = interpreter.buffer("partial_out", 0)[slot, h].double()
        ours = torch.stack([positions[16 * (d % 8 // 2) + 2 * (d // 8) + d % 2] for d in range(64)])  # head_dim 64: d = 8 g + 2 i + j
        assert float((ours - expected).norm() / expected.norm()) < 2e-2
        top, total = interpreter.buffer("partial_max_sum", 0)[slot, h].double()
        torch.testing.assert_close(top, scores.max() / torch.log(torch.tensor(2.0, dtype=torch.float64)), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(total, weights.sum(), rtol=2e-2, atol=0.0)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_merge_order_takes_every_element_once(head_dim):
    assert sorted(merge_order(head_dim).tolist()) == list(range(head_dim))


def test_a_plan_for_other_rows_is_refused():
    with pytest.raises(ValueError, match="the plan is for 5 rows, the inputs have 2"):
        PlanInterpreter(PLAN, WEIGHTS, random_step(GEOMETRY, [3, 4], 1))


def test_a_plan_for_other_rows_per_request_is_refused():
    with pytest.raises(ValueError, match="the plan is for 1 rows_per_request, the inputs have 5"):
        PlanInterpreter(PLAN, WEIGHTS, random_step(GEOMETRY, [3], 1, rows_per_request=5, lengths_are_prefix=True))


@pytest.mark.parametrize("rows_per_request", [2, 3, 7])
def test_a_verify_step_passes_the_gate(rows_per_request):
    inputs = random_step(GEOMETRY, [0, 700], 4, rows_per_request=rows_per_request, lengths_are_prefix=True)
    plan = make_plan(GEOMETRY, inputs.rows, 60, rows_per_request=rows_per_request)
    interpreter = PlanInterpreter(plan, WEIGHTS, inputs.clone())
    ours = interpreter.run()
    assert any(item.num_splits > 1 for item in interpreter.items)
    report = compare(ours, standard_path.decode_step(GEOMETRY, WEIGHTS, inputs), dense_decode.decode_step(GEOMETRY, WEIGHTS, inputs))
    assert report.passed, str(report)


@pytest.mark.parametrize("name", ["qkv", "out_proj", "gate_up", "down"])
def test_a_tile_that_nobody_owns_shows(name):
    op = PLAN.op(name)
    tiles = list(op.tiles)
    tiles[3] = (tiles[3][0], tiles[3][1] - 1)
    ops = tuple(dataclasses.replace(o, tiles=tuple(tiles)) if o.name == name else o for o in PLAN.ops)
    _, ours = run(dataclasses.replace(PLAN, ops=ops))
    assert bool(ours.hidden.isnan().any())


def misses_the_gate(plan, geometry=GEOMETRY, weights=WEIGHTS, inputs=INPUTS):
    ours = PlanInterpreter(plan, weights, inputs.clone()).run()
    return not compare(ours, standard_path.decode_step(geometry, weights, inputs), dense_decode.decode_step(geometry, weights, inputs)).passed


@pytest.mark.parametrize(("name", "onto"), [("activation", "mid_x"), ("mid_scaled", "mid_x"), ("attention_out", "mid_x"), ("end_squares", "end_scaled")])
def test_overlapping_buffers_show(name, onto):
    offset = PLAN.buffer(onto).offset
    buffers = tuple(dataclasses.replace(b, offset=offset) if b.name == name else b for b in PLAN.buffers)
    assert misses_the_gate(dataclasses.replace(PLAN, buffers=buffers))


def test_generations_go_round():
    """Nine layers in eight generations pass; a generation cleared while it is used, or not cleared when it is filled, does not."""
    geometry = dataclasses.replace(GEOMETRY, num_layers=9, hidden=128, num_q_heads=4, num_kv_heads=1, intermediate=128)
    weights, inputs = random_weights(geometry, 5), random_step(geometry, [70, 3], 5)
    plan = make_plan(geometry, 2, 3)
    assert not misses_the_gate(plan, geometry, weights, inputs)
    assert misses_the_gate(dataclasses.replace(plan, generations=4), geometry, weights, inputs), "layer l clears its own"
    assert misses_the_gate(dataclasses.replace(plan, clear_ahead=8), geometry, weights, inputs), "layer l clears its own"
    interpreter = PlanInterpreter(plan, weights, inputs.clone())
    interpreter.run()
    for layer in range(9, 9 + 4):
        assert bool((interpreter.generation(layer) == 0xFF).all()), f"generation of layer {layer}"
    assert not bool((interpreter.generation(8) == 0xFF).all())


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


@pytest.mark.parametrize("grid", [1, 7, 132])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("rows_per_request", [2, 3, 5, 8, 16])
def test_items_of_a_verify_step_cover_what_each_row_sees_once(rows_per_request, group, grid):
    geometry = dataclasses.replace(GEOMETRY, num_q_heads=2 * group)
    lengths = [rows_per_request, rows_per_request + 1000, 64, 0, 5000][: 16 // rows_per_request]
    items = list(attention_items(geometry, lengths, grid, rows_per_request))
    seen = {(row, head): 0 for row in range(len(lengths) * rows_per_request) for head in range(geometry.num_q_heads)}
    slots = set()
    for item in items:
        request, first = divmod(item.row, rows_per_request)
        num_old = lengths[request] - rows_per_request
        assert first + item.num_rows <= rows_per_request, "rows of one request"
        assert item.num_rows * item.num_heads <= abi.item_columns(geometry, rows_per_request) <= abi.MAX_HEADS_PER_ITEM
        assert item.kv_head * group <= item.head_begin and item.head_begin + item.num_heads <= (item.kv_head + 1) * group
        assert item.begin % abi.ITEM_TOKEN_MULTIPLE == 0
        is_last = item.split + 1 == item.num_splits
        assert is_last or item.end <= num_old, "all new tokens are in the last split"
        slot = item.first_slot + item.split * item.slot_stride
        assert slot not in slots and slot < len(items), "every item has a partial of its own"
        slots.add(slot)
        for i in range(item.num_rows):
            for head in range(item.head_begin, item.head_begin + item.num_heads):
                assert seen[item.row + i, head] == item.begin, "splits follow one another"
                seen[item.row + i, head] = item.end - (item.num_rows - 1 - i if is_last and lengths[request] else 0)
    for (row, _), end in seen.items():
        request, t = divmod(row, rows_per_request)
        assert end == (lengths[request] - rows_per_request + t + 1 if lengths[request] else 0)
    assert len(items) <= grid + len(lengths) * abi.request_units(geometry, rows_per_request), "partial_out has that many"
    widest = max((item.num_rows for item in items), default=0)
    assert widest == min(rows_per_request, max(1, 8 // group)), "K and V are read once for as many rows as the MMA has columns"
