"""A static plan as a picture: the flow of a layer, the work of every block, the shared memory of one block."""

from __future__ import annotations

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.plan.canvas import Canvas
from sgl_lowlatency.plan.dump import FLOOR_TB_S, balance, describe_rows, floor_ms, weight_bytes
from sgl_lowlatency.plan.edges import attention_units
from sgl_lowlatency.plan.static_plan import StaticPlan

WIDTH = 1180
LEFT = 60
COLOURS = {"qkv": "#4c78a8", "attention": "#b279a2", "out_proj": "#72b7b2", "router": "#e45756", "gate_up": "#f58518", "down": "#54a24b"}
INK, GREY, PALE = "#1f2933", "#7b8794", "#e4e7eb"
HAND_OVER = {"qkv": "q k v", "attention": "attention out", "out_proj": "residual", "router": "logits", "gate_up": "activation", "down": "residual"}


def draw(plan: StaticPlan) -> Canvas:
    canvas = Canvas(WIDTH, 640)
    g = plan.geometry
    canvas.text(LEFT, 34, f"decode_step: {describe_rows(plan)}, {g.num_layers} layers, {plan.grid} blocks (one an SM)", 20)
    canvas.text(
        LEFT, 56,
        f"hidden {g.hidden}, {g.num_q_heads} q / {g.num_kv_heads} kv heads of {g.head_dim}, {g.mlp_words}; "
        f"plan {plan.hash[:12]}; weights {weight_bytes(plan) / 1e9:.2f} GB a step, floor "
        f"{floor_ms(weight_bytes(plan)):.2f} ms at {FLOOR_TB_S} TB/s", 13, GREY,
    )
    draw_flow(canvas, plan, 84)
    draw_blocks(canvas, plan, 262)
    draw_shared_memory(canvas, plan, 538)
    return canvas


def phases(plan: StaticPlan) -> list[str]:
    """Of a layer, in order; attention with the combination of its splits, and the router of a MoE layer with the routing."""
    return [phase for phase in COLOURS if phase != "router" or plan.geometry.is_moe]


def draw_flow(canvas: Canvas, plan: StaticPlan, top: int) -> None:
    """One layer from left to right; an arrow is an edge: what is handed over, in how many words."""
    canvas.text(LEFT, top + 12, "1  One layer. An arrow is an edge: what it hands over, in words that are their own flags and that consumers poll.", 14)
    boxes = phases(plan)
    box, y = 116, top + 30
    gap = (WIDTH - 2 * LEFT - len(boxes) * box) // (len(boxes) - 1)
    for i, phase in enumerate(boxes):
        x = LEFT + i * (box + gap)
        canvas.rect(x, y, box, 62, COLOURS[phase])
        canvas.text(x + box / 2, y + 25, phase, 16, "#ffffff", "middle")
        if phase == "attention":
            detail = f"split KV, {attention_units(plan.geometry, plan.rows, plan.rows_per_request)} units"
        else:
            op = plan.op(phase)
            detail = f"{op.num_tiles} tiles, K {op.k_extent}"
        canvas.text(x + box / 2, y + 46, detail, 11, "#ffffff", "middle")
        edge = plan.edge(phase)
        if i + 1 < len(boxes):
            canvas.arrow(x + box + 4, y + 31, x + box + gap - 4, INK)
            canvas.text(x + box + gap / 2, y + 22, HAND_OVER[phase], 11, INK, "middle")
            canvas.text(x + box + gap / 2, y + 48, f"{edge.words:,} words", 11, GREY, "middle")
    end = LEFT + (len(boxes) - 1) * (box + gap) + box / 2
    start = LEFT + box / 2
    for x1, y1, x2, y2 in ((end, y + 62, end, y + 92), (end, y + 92, start, y + 92), (start, y + 92, start, y + 64)):
        canvas.line(x1, y1, x2, y2, INK, 2)
    canvas.line(start - 5, y + 71, start, y + 64, INK, 2)
    canvas.line(start + 5, y + 71, start, y + 64, INK, 2)
    down = plan.edge("down")
    caption = f"{HAND_OVER['down']} to the next layer, {down.words:,} words; after the last layer: {describe_end(plan)}"
    canvas.text((start + end) / 2, y + 87, caption, 11, INK, "middle")


def describe_end(plan: StaticPlan) -> str:
    """What follows the last layer."""
    head = "" if plan.head is None else f"LM head, {plan.head.num_tiles:,} tiles, logits out; "
    return f"{head}final norm, hidden out"


def draw_blocks(canvas: Canvas, plan: StaticPlan, top: int) -> None:
    """A bar per block: weight bytes of one layer, by op, with the mean."""
    loads = plan.block_weight_bytes()
    canvas.text(
        LEFT, top + 12,
        f"2  Weight bytes that each block streams per layer, by op. The busiest block has {balance(plan):.3f} of the mean.", 14,
    )
    base, height, width = top + 236, 190, WIDTH - 2 * LEFT
    peak = max(loads)
    step = width / plan.grid
    for block in range(plan.grid):
        y = float(base)
        for op in plan.ops:
            h = op.tiles[block][1] * op.tile_weight_bytes / peak * height
            y -= h
            if h:
                canvas.rect(LEFT + block * step, y, max(step - 1, 1), h, COLOURS[op.name])
    mean_y = base - sum(loads) / len(loads) / peak * height
    canvas.line(LEFT, mean_y, LEFT + width, mean_y, INK)
    canvas.text(LEFT + width + 4, mean_y + 4, "mean", 11, INK)
    canvas.line(LEFT, base, LEFT + width, base, GREY)
    canvas.text(LEFT - 6, base, "0", 11, GREY, "end")
    canvas.text(LEFT - 6, base - height + 8, f"{peak / 1e6:.2f} MB", 11, GREY, "end")
    for block in sorted({0, plan.grid // 4, plan.grid // 2, 3 * plan.grid // 4, plan.grid - 1}):
        canvas.text(LEFT + (block + 0.5) * step, base + 15, f"block {block}", 11, GREY, "middle")
    for i, op in enumerate(plan.ops):
        canvas.rect(LEFT + i * 150, top + 22, 11, 11, COLOURS[op.name])
        counts = " or ".join(map(str, sorted({count for _, count in op.tiles})))
        canvas.text(LEFT + i * 150 + 16, top + 32, f"{op.name}: {'shared out by routing' if op.is_shared else f'{counts} tiles'}", 11)


def draw_shared_memory(canvas: Canvas, plan: StaticPlan, top: int) -> None:
    """The dynamic shared memory of a block, to scale."""
    canvas.text(
        LEFT, top + 12,
        f"3  Shared memory of a block: {plan.shared_memory_bytes / 1024:.0f} of {plan.shared_memory_limit_bytes / 1024:.0f} KiB. "
        "The ring is filled ahead of every wait, across ops and layers.", 14,
    )
    routing_bytes = abi.routing_bytes(plan.geometry, plan.rows)
    layout = abi.smem_layout(plan.rows, plan.max_panel_bytes, plan.max_tiles_multi_panel, plan.num_stages, routing_bytes)
    scale = (WIDTH - 2 * LEFT) / plan.shared_memory_limit_bytes
    y, height = top + 26, 34
    canvas.rect(LEFT, y, WIDTH - 2 * LEFT, height, "#ffffff", GREY)
    parts = (
        (0, layout.accumulators, PALE, "sums"),
        (layout.accumulators, layout.panel, "#cbd2d9", "routing" if plan.geometry.is_moe else "accumulators"),
        (layout.panel, layout.ring, "#f2cf5b", f"panel {plan.max_panel_bytes / 1024:.0f} KiB"),
    )
    for begin, end, fill, label in parts:
        canvas.rect(LEFT + begin * scale, y, (end - begin) * scale, height, fill)
        if (end - begin) * scale > 7 * len(label):
            canvas.text(LEFT + (begin + end) / 2 * scale, y + 22, label, 11, INK, "middle")
    for stage in range(plan.num_stages):
        x = LEFT + (layout.ring + stage * abi.STAGE_BYTES) * scale
        canvas.rect(x, y, abi.STAGE_BYTES * scale, height, "#9ecae9", "#ffffff")
        canvas.text(x + abi.STAGE_BYTES * scale / 2, y + 22, f"{stage}", 11, INK, "middle")
    canvas.text(
        LEFT, y + height + 18,
        f"grey: barriers, row state, cross-warp sums; yellow: activations; blue: {plan.num_stages} ring stages of "
        f"{abi.TILE_ROWS} rows x {abi.stage_k(plan.ops[0].element_bytes)} K ({abi.STAGE_BYTES} bytes)", 11, GREY,
    )
