"""Every defect planted in a plan is reported by its own message, and nothing else is."""

import dataclasses

import pytest

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.plan.presets import GEOMETRIES
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.plan.validate import validate

PLAN = make_plan(GEOMETRIES["qwen3-0.6b"], 16, 132)  # 64 of 132 blocks own tiles of out_proj and of down


def with_op(name, **changes):
    return dataclasses.replace(PLAN, ops=tuple(dataclasses.replace(o, **changes) if o.name == name else o for o in PLAN.ops))


def with_edge(name, **changes):
    edges = tuple(dataclasses.replace(e, **changes) if e.name == name else e for e in PLAN.edges)
    return dataclasses.replace(PLAN, edges=edges)


def with_buffer(name, **changes):
    buffers = tuple(dataclasses.replace(b, **changes) if b.name == name else b for b in PLAN.buffers)
    return dataclasses.replace(PLAN, buffers=buffers)


def moved_tiles(name, block, begin, count):
    tiles = list(PLAN.op(name).tiles)
    tiles[block] = (begin, count)
    return with_op(name, tiles=tuple(tiles))


def without_edge(name):
    return dataclasses.replace(PLAN, edges=tuple(e for e in PLAN.edges if e.name != name))


def test_the_plan_itself_is_valid():
    assert validate(PLAN, num_sms=132) == []
    assert {op.name: op.producers for op in PLAN.ops} == {"qkv": 132, "out_proj": 64, "gate_up": 132, "down": 64}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qkv", "buffer qkv: attention of layer 0 in block 0 may run before qkv of layer 0 in block 131 has written it"),
        ("attention", "buffer attention_out: out_proj of layer 0 in block"),
        ("out_proj", "buffer residual: gate_up of layer 0 in block 0 may run before out_proj of layer 0 in block"),
        ("gate_up", "buffer activation: down of layer 0 in block"),
        ("down", "buffer residual: qkv of layer 1 in block 0 may run before down of layer 0 in block"),
    ],
)
def test_missing_edge_is_an_early_read(name, message):
    errors = validate(without_edge(name))
    assert any(error.startswith(message) for error in errors), errors


def test_missing_edge_is_also_an_overwrite():
    errors = validate(without_edge("gate_up"))
    assert any("may overwrite it while" in error for error in errors), errors


def test_a_phase_that_waits_for_nothing_is_named():
    assert "phase attention waits for no edge" in validate(without_edge("qkv"))


def test_an_edge_to_the_wrong_layer_is_an_early_read():
    errors = validate(with_edge("attention", consumers=(("out_proj", 1),)))
    assert any(e.startswith("buffer attention_out: out_proj of layer 0") and "may run before" in e for e in errors), errors


def test_cyclic_edge():
    errors = validate(with_edge("down", consumers=(("qkv", 0), ("final_norm", 0))))
    assert len(errors) == 1
    assert errors[0].startswith("cycle: ")
    for step in ("edge down of layer 0", "qkv of layer 0", "down of layer 0"):
        assert step in errors[0]


def test_layers_that_a_counter_cannot_tell_apart():
    edges = tuple(dataclasses.replace(edge, consumers=()) for edge in PLAN.edges)
    errors = validate(dataclasses.replace(PLAN, edges=edges))
    assert "edge qkv: block 0 may signal layer 1 before every signal of layer 0 is counted" in errors


@pytest.mark.parametrize(("change", "message"), [
    (1, "edge out_proj: waits for 65 signals a layer, only 64 are given: it would hang"),
    (-1, "edge out_proj: waits for 63 signals a layer, 64 are given: the wait opens early"),
])
def test_wrong_signals_of_an_edge(change, message):
    errors = validate(with_edge("out_proj", producers=64 + change))
    assert len(errors) == 1 and errors[0].startswith(message)


def test_attention_signals_once_a_unit_not_once_a_block():
    assert PLAN.edge("attention").producers == 16 * 8 * 1  # rows, kv heads, subgroups of two query heads
    errors = validate(with_edge("attention", producers=PLAN.grid))
    assert errors == ["edge attention: waits for 132 signals a layer, only 128 are given: it would hang"]


def test_wrong_producers_of_an_op():
    assert validate(with_op("down", producers=132)) == ["op down: producers 132, but 64 blocks own tiles"]


def test_counter_overflow():
    plan = dataclasses.replace(PLAN, geometry=dataclasses.replace(PLAN.geometry, num_layers=2**25))
    assert "edge out_proj: 64 signals a layer overflow the counter within a launch" in validate(plan)


def test_duplicated_tile():
    begin, count = PLAN.op("qkv").tiles[5]
    errors = validate(moved_tiles("qkv", 5, begin - 1, count + 1))
    assert errors == [f"op qkv: tile {begin - 1} is produced 2 times"]


def test_forgotten_tile():
    begin, count = PLAN.op("gate_up").tiles[7]
    assert validate(moved_tiles("gate_up", 7, begin, count - 1)) == [f"op gate_up: tile {begin + count - 1} is produced 0 times"]


def test_tiles_out_of_bounds():
    last = PLAN.grid - 1
    begin, count = PLAN.op("qkv").tiles[last]
    errors = validate(moved_tiles("qkv", last, begin, count + 1))
    assert f"op qkv: block {last} owns tiles {begin}..{begin + count + 1} of 256" in errors


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qkv", {"k_extent": 2048}, "op qkv: k_extent 2048 is not the matrix's K 1024"),
        ("down", {"num_tiles": 63}, "op down: 63 tiles do not cover 1024 output rows"),
        ("down", {"k_panel": 1500}, "op down: k_panel 1500 is neither all of K nor a multiple of 512"),
        ("down", {"k_panel": 3072}, f"op down: a panel of 98560 bytes exceeds max_panel_bytes {PLAN.max_panel_bytes}"),
        ("qkv", {"tiles": PLAN.op("qkv").tiles[:-1]}, "op qkv: tile ranges for 131 blocks on a grid of 132"),
    ],
)
def test_wrong_op(name, changes, message):
    assert message in validate(with_op(name, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tiles_multi_panel": 0}, "op down: 1 tiles of one block across panels, accumulators for 0"),
        ({"max_panel_bytes": 1024}, f"attention merge of {abi.merge_scratch_bytes(128)} bytes exceeds max_panel_bytes 1024"),
        ({"num_stages": 17}, "num_stages 17 is outside 2..16"),
        ({"num_stages": PLAN.num_stages - 1}, "is not the layout's"),
        ({"shared_memory_limit_bytes": 100 * 1024}, "exceeds the limit 102400"),
        ({"rows": 17}, "rows 17 is outside 1..16"),
    ],
)
def test_wrong_shared_memory(changes, message):
    assert any(message in error for error in validate(dataclasses.replace(PLAN, **changes)))


def test_grid_beyond_the_device():
    assert validate(PLAN, num_sms=114) == [
        "grid 132 is more than the device's 114 SMs: blocks that wait would not be co-resident"
    ]


def test_shrunken_buffer():
    assert validate(with_buffer("activation", bytes=1024)) == [
        "buffer activation: 1024 bytes, its tensor [16, 3072] needs 98304"
    ]


def test_overlapping_buffers():
    residual = PLAN.buffer("residual")
    assert validate(with_buffer("qkv", offset=residual.offset + 256)) == [
        "buffers residual and qkv overlap at offset 256",
    ]


def test_unaligned_buffer():
    last = PLAN.buffer("split_tickets")
    plan = dataclasses.replace(with_buffer("split_tickets", offset=last.offset + 16), workspace_bytes=PLAN.workspace_bytes + 256)
    assert validate(plan) == [f"buffer split_tickets: offset {last.offset + 16} is not a multiple of 256"]


def test_buffer_outside_the_workspace():
    last = PLAN.buffer("split_tickets")
    assert validate(dataclasses.replace(PLAN, workspace_bytes=last.offset)) == [
        f"buffer split_tickets ends at {last.offset + last.bytes}, the workspace at {last.offset}"
    ]


def test_missing_buffer():
    plan = dataclasses.replace(PLAN, buffers=tuple(b for b in PLAN.buffers if b.name != "split_tickets"))
    assert validate(plan) == ["buffer split_tickets is missing"]


def test_blocks_that_write_one_anothers_parts():
    assert "buffer attention_out: blocks of attention write parts they do not own" in validate(with_buffer("attention_out", own_part=()))
