"""A static plan as text."""

from __future__ import annotations

from collections import Counter

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.fault import EDGE_CONTENT
from sgl_lowlatency.plan.edges import describe_consumer
from sgl_lowlatency.plan.static_plan import StaticPlan

FLOOR_TB_S = 4.65  # measured plain read bandwidth of an H200


def weight_bytes(plan: StaticPlan) -> int:
    """Bytes of all layers' weights and norms that one step reads, each once, and of its LM head, FP8 scales not counted (a 4,000th of
    their weights). Of MoE layers, those of as many distinct experts as the rows take if all are equally likely.
    """
    g = plan.geometry
    norms, experts = 2 * (2 * g.hidden + 2 * g.head_dim), g.expected_experts(plan.rows) if g.is_moe else 1
    layer = norms + sum(round(op.num_tiles * op.tile_weight_bytes * (experts if op.name in ("gate_up", "down") else 1)) for op in plan.ops)
    head = 0 if plan.head is None else plan.head.num_tiles * plan.head.tile_weight_bytes
    return layer * plan.geometry.num_layers + head + 2 * plan.geometry.hidden * (1 + plan.rows)


def kv_bytes(plan: StaticPlan, context: int) -> int:
    """Bytes of K and V of the step's requests, each with `context` tokens: what one step must read."""
    token = 2 * 2 * plan.geometry.num_kv_heads * plan.geometry.head_dim
    return token * context * plan.num_requests * plan.geometry.num_layers


def floor_ms(num_bytes: int, tb_s: float = FLOOR_TB_S) -> float:
    return num_bytes / tb_s * 1e-9


def balance(plan: StaticPlan) -> float:
    """Weight bytes of the busiest block over the mean."""
    loads = plan.block_weight_bytes()
    return max(loads) * len(loads) / sum(loads)


def table(header: tuple[str, ...], rows: list[tuple]) -> list[str]:
    """Columns padded to their widest cell; numbers to the right."""
    cells = [header, *[tuple(f"{c:,}" if isinstance(c, int) else str(c) for c in row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [bool(rows) and isinstance(rows[0][i], int) for i in range(len(header))]
    return [
        "  " + "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in cells
    ]


def describe_rows(plan: StaticPlan) -> str:
    return f"{plan.rows} rows" + (f" ({plan.num_requests} requests of {plan.rows_per_request})" if plan.rows_per_request > 1 else "")


def to_text(plan: StaticPlan, contexts: tuple[int, ...] = (1024, 8000)) -> str:
    """Ops, tiles per block, edges, buffers, shared memory, bytes and floors, for people to read."""
    g, weights = plan.geometry, {2: "bf16", 1: "FP8"}[plan.ops[0].element_bytes]
    lines = [
        f"static plan {plan.hash[:16]}: {describe_rows(plan)} on {plan.grid} blocks, {g.num_layers} layers, {weights} weights",
        f"geometry: hidden {g.hidden}, {g.num_q_heads} q heads, {g.num_kv_heads} kv heads of {g.head_dim}, "
        f"{g.mlp_words}",
        "",
        "Ops of a layer, in order (attention follows qkv; a tile is 16 output rows by all of K)"
        + ("; behind the last one the LM head:" if plan.head else "; the step ends at the final norm:"),
    ]
    if g.is_moe:
        lines.insert(-1, "Of gate_up and down one expert's; the active experts' tiles of gate_up are shared out on the device, evenly.")
    lines += table(
        ("op", "K", "K panel", "panels", "tiles", "weight bytes", "blocks that own tiles", "tiles a block"),
        [
            (op.name, op.k_extent, op.k_panel, op.num_panels, op.num_tiles, op.num_tiles * op.tile_weight_bytes, len(op.owners),
             ", ".join(f"{blocks} x {count}" for count, blocks in sorted(Counter(c for _, c in op.tiles).items())))
            for op in plan.matrices
        ],
    )
    loads = plan.block_weight_bytes()
    lines += [
        f"  weight bytes of a block and layer: {min(loads):,} to {max(loads):,}; the busiest has {balance(plan):.3f} of the mean",
        "",
        "Edges (words that are their own flags: unwritten until the producer stores them, polled by those who need them; of",
        "partial as many as the most attention items write):",
    ]
    lines += table(
        ("edge", "words a layer", "from", "to", "content"),
        [
            (edge.name, edge.words, edge.producer, ", ".join(describe_consumer(*consumer) for consumer in edge.consumers), EDGE_CONTENT[edge.name])
            for edge in plan.edges
        ],
    )
    lines += [
        "",
        f"Workspace, {plan.workspace_bytes:,} bytes, shared by the plans of all widths: {plan.generations} generations of "
        f"{plan.generation_bytes:,} bytes.",
        f"Consecutive layers take them in turn; layer l clears that of layer l + {plan.clear_ahead}. A generation of this plan:",
    ]
    lines += table(
        ("buffer", "offset", "bytes", "type", "shape", "edge", "written by", "read by"),
        [
            (b.name, b.offset, b.bytes, b.dtype, "x".join(map(str, b.shape)), b.edge, b.writer,
             ", ".join(describe_consumer(*reader) for reader in b.readers))
            for b in plan.buffers
        ],
    )
    ring = plan.num_stages * abi.STAGE_BYTES
    lines += [
        "",
        f"Shared memory of a block: {plan.shared_memory_bytes:,} of {plan.shared_memory_limit_bytes:,} bytes",
        f"  ring {plan.num_stages} stages x {abi.STAGE_BYTES:,} = {ring:,}; activation panel {plan.max_panel_bytes:,}; "
        f"accumulators across panels for {plan.max_tiles_multi_panel} tiles",
        "",
        f"Floor at {FLOOR_TB_S} TB/s (each weight once, each KV entry once; {'with' if plan.head else 'without'} the LM head"
        + (f"; {g.expected_experts(plan.rows):.1f} distinct experts a layer, as if all were equally likely):" if g.is_moe else "):"),
    ]
    num_bytes = weight_bytes(plan)
    lines += table(
        ("context", "weight bytes", "KV bytes", "ms"),
        [(c, num_bytes, kv_bytes(plan, c), f"{floor_ms(num_bytes + kv_bytes(plan, c)):.3f}") for c in contexts],
    )
    return "\n".join(lines) + "\n"
