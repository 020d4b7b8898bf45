"""Every defect planted in a plan is reported by its own message, and nothing else is."""

import dataclasses
import re

import pytest

from sgl_lowlatency.plan.edges import edge_names
from sgl_lowlatency.plan.presets import GEOMETRIES
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.plan.validate import validate

PLAN = make_plan(GEOMETRIES["qwen3-0.6b"], 16, 132)  # 64 of 132 blocks own tiles of out_proj and of down
HEAD_PLAN = make_plan(GEOMETRIES["qwen3-8b"], 16, 132, has_head=True)  # K of the head in two panels


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


def test_the_plan_itself_is_valid():
    assert validate(PLAN, num_sms=132) == []
    assert {op.name: len(op.owners) for op in PLAN.ops} == {"qkv": 132, "out_proj": 64, "gate_up": 132, "down": 64}


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("qkv", ["phase attention waits for no edge", "buffer qkv: there is no edge qkv that attention could wait for"]),
        ("partial", ["phase combine waits for no edge", "buffer partial_out: there is no edge partial that combine could wait for"]),
        ("attention", ["buffer attention_out: there is no edge attention that out_proj could wait for"]),
        ("out_proj", ["phase gate_up waits for no edge", "buffer mid_squares: there is no edge out_proj that gate_up could wait for"]),
        ("gate_up", ["buffer activation: there is no edge gate_up that down could wait for"]),
        ("down", ["phase qkv waits for no edge", "phase final_norm waits for no edge",
                  "buffer end_squares: there is no edge down that qkv, final_norm could wait for"]),
    ],
)
def test_missing_edge(name, messages):
    errors = validate(dataclasses.replace(PLAN, edges=tuple(e for e in PLAN.edges if e.name != name)))
    assert set(messages) <= set(errors)
    assert any(error.startswith("edges are [") for error in errors)


def test_edges_in_another_order_than_the_kernels():
    plan = dataclasses.replace(PLAN, edges=(PLAN.edges[1], PLAN.edges[0], *PLAN.edges[2:]))
    (error,) = validate(plan)
    assert error.startswith("edges are [('partial', 1), ('qkv', 0), ") and error.endswith(f"the kernel's are {list(edge_names(plan.geometry))} in this order")
    assert len(validate(with_edge("down", index=4))) == 1


def test_a_reader_that_waits_for_another_edge():
    assert validate(with_edge("out_proj", consumers=(("gate_up", 0),))) == ["buffer mid_x: down reads it without waiting for edge out_proj"]


def test_an_edge_to_the_wrong_layer():
    assert validate(with_edge("attention", consumers=(("out_proj", 1),))) == [
        "buffer attention_out: out_proj reads it without waiting for edge attention",
        "edge attention: out_proj of the next layer waits for it and reads none of its words",
    ]


def test_an_edge_of_another_phase():
    assert "buffer attention_out: combine writes it, its edge attention is attention's" in validate(with_edge("attention", producer="attention"))


def test_a_wait_for_words_that_are_not_read():
    errors = validate(with_edge("gate_up", consumers=(("down", 0), ("final_norm", 0))))
    assert errors == ["edge gate_up: final_norm waits for it and reads none of its words"]


def test_cyclic_edge():
    errors = validate(with_edge("down", consumers=(("qkv", 0), ("out_proj", 1), ("final_norm", 0))))
    (cycle,) = [error for error in errors if error.startswith("cycle: ")]
    for step in ("edge down of layer 0", "qkv of layer 0", "down of layer 0"):
        assert step in cycle


def test_splits_that_combine_before_they_hand_over_would_wait_in_a_circle():
    """Why a block publishes all of its items before it waits for another's: as one phase they may wait for each other."""
    errors = validate(with_edge("partial", producer="combine"))
    (cycle,) = [error for error in errors if error.startswith("cycle: ")]
    assert "edge partial of layer 0" in cycle and "combine of layer 0 in block" in cycle


@pytest.mark.parametrize("change", [1, -1])
def test_wrong_words_of_an_edge(change):
    words = 16 * (1024 // 2 + 1024 // 2 + 1024 // 16)  # of every row x, x scaled and a sum of squares a tile
    assert PLAN.edge("out_proj").words == words
    assert validate(with_edge("out_proj", words=words + change)) == [f"edge out_proj: {words + change} words a layer, its buffers have {words}"]


@pytest.mark.parametrize(("name", "reader"), [("activation", "down"), ("qkv", "attention"), ("attention_out", "out_proj")])
def test_a_buffer_that_nobody_writes(name, reader):
    errors = validate(with_buffer(name, writer="nobody"))
    assert f"buffer {name}: nobody writes it, {reader} would hang" in errors


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("mid_scaled", 8, "buffer mid_scaled: tiles write 512 of its 1024 columns, gate_up would hang"),
        ("end_squares", 0, "buffer end_squares: tiles write 0 of its 64 columns, qkv, final_norm would hang"),
        ("activation", 16, "buffer activation: tiles write 6144 columns, it has 3072"),
        ("partial_out", 16, "buffer partial_out: attention has no tiles that fill 16 columns"),
    ],
)
def test_words_that_tiles_do_not_cover(name, columns, message):
    assert message in validate(with_buffer(name, tile_columns=columns))


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
        ({"max_panel_bytes": 1024}, r"attention of \d+ bytes exceeds max_panel_bytes 1024"),
        ({"num_stages": 17}, "num_stages 17 is outside 2..16"),
        ({"num_stages": PLAN.num_stages - 1}, "is not the layout's"),
        ({"shared_memory_limit_bytes": 100 * 1024}, "exceeds the limit 102400"),
        ({"rows": 33}, "rows 33 is outside 1..32"),
    ],
)
def test_wrong_shared_memory(changes, message):
    assert any(re.search(message, error) for error in validate(dataclasses.replace(PLAN, **changes)))


def test_grid_beyond_the_device():
    assert validate(PLAN, num_sms=114) == [
        "grid 132 is more than the device's 114 SMs: blocks that wait would not be co-resident"
    ]


def test_shrunken_buffer():
    assert "buffer activation: 1024 bytes, its tensor [16, 3072] needs 98304" in validate(with_buffer("activation", bytes=1024))


def test_overlapping_buffers():
    qkv, out = PLAN.buffer("qkv"), PLAN.buffer("attention_out")
    assert validate(with_buffer("attention_out", offset=out.offset - 128)) == [
        f"buffer attention_out: offset {out.offset - 128}, the kernel has it at {qkv.bytes}",
        f"buffers qkv and attention_out overlap at offset {out.offset - 128}",
    ]


def test_unaligned_buffer():
    last = PLAN.buffer("partial_max_sum")
    plan = dataclasses.replace(with_buffer("partial_max_sum", offset=last.offset + 16), generation_bytes=PLAN.generation_bytes + 128)
    assert f"buffer partial_max_sum: offset {last.offset + 16} is not a multiple of 128" in validate(plan)


def test_buffer_outside_its_generation():
    last = PLAN.buffer("partial_max_sum")
    assert validate(dataclasses.replace(PLAN, generation_bytes=last.offset)) == [
        f"buffer partial_max_sum ends at {last.offset + last.bytes}, its generation at {last.offset}",
        f"generation_bytes {last.offset}: the widest step, which shares them, needs {PLAN.generation_bytes}",
    ]


def test_a_narrow_plan_leaves_room_for_the_widest_step():
    narrow = make_plan(GEOMETRIES["qwen3-0.6b"], 1, 132)
    last = narrow.buffer("partial_max_sum")
    end = last.offset + last.bytes + 128
    assert end < PLAN.generation_bytes == narrow.generation_bytes
    assert any(
        error.startswith(f"generation_bytes {end}: the widest step") for error in validate(dataclasses.replace(narrow, generation_bytes=end))
    )
    odd = dataclasses.replace(narrow, generation_bytes=narrow.generation_bytes + 64)
    assert validate(odd) == [f"generation_bytes {narrow.generation_bytes + 64} is not a multiple of 128"]


def test_missing_buffer():
    plan = dataclasses.replace(PLAN, buffers=tuple(b for b in PLAN.buffers if b.name != "partial_max_sum"))
    assert "buffer partial_max_sum is missing" in validate(plan)


@pytest.mark.parametrize("rows_per_request", [0, -1, 3])
def test_rows_that_are_no_whole_requests(rows_per_request):
    (error,) = validate(dataclasses.replace(PLAN, rows_per_request=rows_per_request))
    assert error == f"rows 16 is not a multiple of rows_per_request {rows_per_request}"


def test_buffers_of_another_number_of_rows_per_request():
    """16 query heads on 8 kv heads: items of a verify step have up to four rows' columns, a decode plan's partials hold one."""
    errors = validate(dataclasses.replace(PLAN, rows_per_request=4))
    assert any(error.startswith("buffer partial_out: ") and "needs" in error for error in errors)


def with_head(**changes):
    return dataclasses.replace(HEAD_PLAN, head=dataclasses.replace(HEAD_PLAN.head, **changes))


def head_tiles(block, begin, count):
    tiles = list(HEAD_PLAN.head.tiles)
    tiles[block] = (begin, count)
    return with_head(tiles=tuple(tiles))


def test_a_plan_with_a_head_is_valid():
    assert validate(HEAD_PLAN, num_sms=132) == []
    assert HEAD_PLAN.head.num_panels == 2 and HEAD_PLAN.max_tiles_multi_panel < HEAD_PLAN.head.max_tiles


def test_a_head_tile_that_is_produced_twice_or_never():
    begin, count = HEAD_PLAN.head.tiles[5]
    assert validate(head_tiles(5, begin - 1, count + 1)) == [f"op head: tile {begin - 1} is produced 2 times"]
    assert validate(head_tiles(5, begin, count - 1)) == [f"op head: tile {begin + count - 1} is produced 0 times"]
    begin, count = HEAD_PLAN.head.tiles[-1]
    assert f"op head: block 131 owns tiles {begin}..{begin + count + 1} of 9496" in validate(head_tiles(131, begin, count + 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tiles": 9495}, "op head: 9495 tiles do not cover 151936 output rows"),
        ({"k_extent": 2048}, "op head: k_extent 2048 is not the matrix's K 4096"),
        ({"k_panel": 1000}, "op head: k_panel 1000 is neither all of K nor a multiple of 512"),
        ({"k_panel": 4096}, f"op head: a panel of 131328 bytes exceeds max_panel_bytes {HEAD_PLAN.max_panel_bytes}"),
        ({"tiles": HEAD_PLAN.head.tiles[:-1]}, "op head: tile ranges for 131 blocks on a grid of 132"),
        ({"element_bytes": 1}, "head is op head of 1 bytes a weight, not head of 2"),
    ],
)
def test_a_wrong_head(changes, message):
    assert message in validate(with_head(**changes))


def test_a_head_of_several_panels_needs_an_accumulator():
    plan = dataclasses.replace(HEAD_PLAN, max_tiles_multi_panel=0)
    assert "op head: 1 tiles of one block across panels, accumulators for 0" in validate(plan)


def test_a_head_that_waits_for_nothing():
    others = tuple(consumer for consumer in HEAD_PLAN.edge("down").consumers if consumer[0] != "head")
    edges = tuple(dataclasses.replace(e, consumers=others) if e.name == "down" else e for e in HEAD_PLAN.edges)
    errors = validate(dataclasses.replace(HEAD_PLAN, edges=edges))
    assert errors == [
        "phase head waits for no edge", *(f"buffer {name}: head reads it without waiting for edge down" for name in ("end_scaled", "end_squares"))
    ]
