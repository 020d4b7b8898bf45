"""Checks a static plan: what must hold for the kernel to be free of races, hangs and out-of-bounds accesses."""

from __future__ import annotations

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.plan import tiles
from sgl_lowlatency.plan.events import build_waits, describe_cycle
from sgl_lowlatency.plan.generations import check_generations
from sgl_lowlatency.plan.handovers import check_buffers, check_edges, check_words
from sgl_lowlatency.plan.static_plan import StaticPlan

NUM_LAYERS = 2  # consecutive layers whose waits are examined; every layer has the same, so two meet every hand-over


def validate(plan: StaticPlan, num_sms: int | None = None) -> list[str]:
    """Every reason why the plan must not run; empty when it may. `num_sms`: SMs of the device, to check residency."""
    if plan.rows_per_request < 1 or plan.rows % plan.rows_per_request:
        return [f"rows {plan.rows} is not a multiple of rows_per_request {plan.rows_per_request}"]  # there are no requests to look at
    errors = check_bounds(plan, num_sms) + check_shared_memory(plan) + check_buffers(plan) + check_edges(plan)
    if unwritten := check_tiles(plan) or check_words(plan):
        return errors + unwritten  # the rest takes every word to have one writer
    waits = build_waits(plan, NUM_LAYERS)
    order = waits.order()
    if len(order) < len(waits.events):
        errors.append(describe_cycle(waits, order))
    return errors + check_generations(plan)


def check_bounds(plan: StaticPlan, num_sms: int | None) -> list[str]:
    errors = []
    if not 1 <= plan.rows <= abi.MAX_ROWS:
        errors.append(f"rows {plan.rows} is outside 1..{abi.MAX_ROWS}")
    if num_sms is not None and plan.grid > num_sms:
        errors.append(f"grid {plan.grid} is more than the device's {num_sms} SMs: blocks that wait would not be co-resident")
    for name, value, of_kernel in (("generations", plan.generations, abi.GENERATIONS), ("clear_ahead", plan.clear_ahead, abi.CLEAR_AHEAD)):
        if value != of_kernel:
            errors.append(f"{name} {value} is not the kernel's {of_kernel}")
    return errors


def check_tiles(plan: StaticPlan) -> list[str]:
    """Every output tile is produced exactly once, ranges are in bounds, panels are ones the kernel can walk."""
    errors = []
    shapes = tiles.op_shapes(plan.geometry)
    names = tiles.op_names(plan.geometry)
    if tuple(op.name for op in plan.ops) != names:
        return [f"ops are {[op.name for op in plan.ops]}, not {list(names)}"]
    if plan.head is not None:
        if plan.head.name != tiles.HEAD or plan.head.element_bytes != 2:
            errors.append(f"head is op {plan.head.name} of {plan.head.element_bytes} bytes a weight, not {tiles.HEAD} of 2")
        shapes[plan.head.name] = (tiles.head_tiles(plan.geometry) * abi.TILE_ROWS, plan.geometry.hidden)
    for op in plan.matrices:
        out_rows, k_extent = shapes[op.name]
        if op.k_extent != k_extent:
            errors.append(f"op {op.name}: k_extent {op.k_extent} is not the matrix's K {k_extent}")
        if op.num_tiles * abi.TILE_ROWS != out_rows:
            errors.append(f"op {op.name}: {op.num_tiles} tiles do not cover {out_rows} output rows")
        stage_k = abi.stage_k(op.element_bytes)
        if op.k_panel != op.k_extent and (op.k_panel <= 0 or op.k_panel % stage_k):
            errors.append(f"op {op.name}: k_panel {op.k_panel} is neither all of K nor a multiple of {stage_k}")
        if op.element_bytes == 1 and op.k_panel > abi.MAX_SCALED_PANEL_K:
            errors.append(f"op {op.name}: k_panel {op.k_panel} is above {abi.MAX_SCALED_PANEL_K}, the most that has its FP8 scales in registers")
        if len(op.tiles) != plan.grid:
            errors.append(f"op {op.name}: tile ranges for {len(op.tiles)} blocks on a grid of {plan.grid}")
        if op.is_shared != tiles.is_shared(plan.geometry, op.name):
            errors.append(f"op {op.name}: is_shared {op.is_shared} is not the kernel's")
        if op.is_shared:
            if op.owners:
                errors.append(f"op {op.name}: blocks {op.owners} own tiles that routing shares out")
            errors += check_shares(plan, op)
            continue
        produced = [0] * op.num_tiles
        for block, (begin, count) in enumerate(op.tiles):
            if begin < 0 or count < 0 or begin + count > op.num_tiles:
                errors.append(f"op {op.name}: block {block} owns tiles {begin}..{begin + count} of {op.num_tiles}")
                continue
            for tile in range(begin, begin + count):
                produced[tile] += 1
        errors += [f"op {op.name}: tile {tile} is produced {n} times" for tile, n in enumerate(produced) if n != 1][:4]
    return errors


def check_shares(plan: StaticPlan, op: tiles.Op) -> list[str]:
    """Whatever the number of active experts, the blocks' shares are all of their tiles, each once, and floor or ceil of the mean."""
    g = plan.geometry
    for num_active in range(g.top_k, min(g.num_experts, plan.rows * g.top_k) + 1):
        total, end = num_active * op.num_tiles, 0
        for block in range(plan.grid):
            begin, count = abi.even_share(total, block, plan.grid)
            if begin != end or not total // plan.grid <= count <= -(-total // plan.grid):
                share = f"block {block} takes tiles {begin}..{begin + count} of {total}, {end} are taken"
                return [f"op {op.name}: with {num_active} active experts {share}"]
            end += count
        if end != total:
            return [f"op {op.name}: with {num_active} active experts {end} of {total} tiles are taken"]
    return []


def check_shared_memory(plan: StaticPlan) -> list[str]:
    """Panels, attention, accumulators and the ring fit what the plan reserves, and that fits the limit."""
    errors = []
    for op in plan.matrices:
        is_pairs = plan.geometry.is_moe and op.name == "down"
        need = abi.panel_bytes(plan.panel_pairs if is_pairs else plan.rows, min(op.k_panel, op.k_extent))
        if need > plan.max_panel_bytes:
            errors.append(f"op {op.name}: a panel of {need} bytes exceeds max_panel_bytes {plan.max_panel_bytes}")
        if op.num_panels > 1 and plan.geometry.is_moe and op.name in ("router", "gate_up", "down"):
            errors.append(f"op {op.name}: {op.num_panels} panels, the kernel takes all of K in a MoE layer")
        tiles_at_once = 1 if op is plan.head else op.max_tiles  # the head takes as many as there are accumulators
        if op.num_panels > 1 and tiles_at_once > plan.max_tiles_multi_panel:
            errors.append(
                f"op {op.name}: {tiles_at_once} tiles of one block across panels, accumulators for {plan.max_tiles_multi_panel}"
            )
    merge = abi.attention_panel_bytes(plan.geometry.head_dim)
    if merge > plan.max_panel_bytes:
        errors.append(f"attention of {merge} bytes exceeds max_panel_bytes {plan.max_panel_bytes}")
    if plan.geometry.is_moe and plan.panel_pairs < plan.rows:
        errors.append(f"panel_pairs {plan.panel_pairs} does not hold the {plan.rows} pairs that an expert may have")
    if not 2 <= plan.num_stages <= abi.MAX_STAGES:
        errors.append(f"num_stages {plan.num_stages} is outside 2..{abi.MAX_STAGES}")
    routing_bytes = abi.routing_bytes(plan.geometry, plan.rows)
    layout = abi.smem_layout(plan.rows, plan.max_panel_bytes, plan.max_tiles_multi_panel, plan.num_stages, routing_bytes)
    if layout.total_bytes != plan.shared_memory_bytes:
        errors.append(f"shared_memory_bytes {plan.shared_memory_bytes} is not the layout's {layout.total_bytes}")
    if plan.shared_memory_bytes > plan.shared_memory_limit_bytes:
        errors.append(f"shared_memory_bytes {plan.shared_memory_bytes} exceeds the limit {plan.shared_memory_limit_bytes}")
    return errors
