"""Checks a static plan: what must hold for the kernel to be free of races, hangs and out-of-bounds accesses."""

from __future__ import annotations

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.plan import buffers, tiles
from sgl_lowlatency.plan.edges import FINAL_PHASE, LAYER_PHASES, attention_units
from sgl_lowlatency.plan.events import Event, EventGraph, build, participants
from sgl_lowlatency.plan.static_plan import StaticPlan

NUM_LAYERS = 2  # consecutive layers examined; every layer has the same phases, so two meet every hand-over
MAX_SIGNALS = 2**31  # targets are compared by signed 32-bit difference


def validate(plan: StaticPlan, num_sms: int | None = None) -> list[str]:
    """Every reason why the plan must not run; empty when it may. `num_sms`: SMs of the device, to check residency."""
    errors = check_bounds(plan, num_sms)
    errors += check_tiles(plan)
    errors += check_shared_memory(plan)
    errors += check_buffers(plan)
    errors += check_signals(plan)
    graph = build(plan, NUM_LAYERS)
    order = graph.order()
    if len(order) < len(graph.events):
        return errors + [describe_cycle(graph, order)]
    ancestors = graph.ancestors(order)
    errors += check_hand_overs(plan, graph, ancestors)
    errors += check_generations(plan, graph, ancestors)
    return errors


def check_bounds(plan: StaticPlan, num_sms: int | None) -> list[str]:
    errors = []
    if not 1 <= plan.rows <= abi.MAX_ROWS:
        errors.append(f"rows {plan.rows} is outside 1..{abi.MAX_ROWS}")
    if num_sms is not None and plan.grid > num_sms:
        errors.append(f"grid {plan.grid} is more than the device's {num_sms} SMs: blocks that wait would not be co-resident")
    return errors


def check_tiles(plan: StaticPlan) -> list[str]:
    """Every output tile is produced exactly once, ranges are in bounds, panels are ones the kernel can walk."""
    errors = []
    shapes = tiles.op_shapes(plan.geometry)
    if tuple(op.name for op in plan.ops) != tiles.OP_NAMES:
        return [f"ops are {[op.name for op in plan.ops]}, not {list(tiles.OP_NAMES)}"]
    for op in plan.ops:
        out_rows, k_extent = shapes[op.name]
        if op.k_extent != k_extent:
            errors.append(f"op {op.name}: k_extent {op.k_extent} is not the matrix's K {k_extent}")
        if op.num_tiles * abi.TILE_ROWS != out_rows:
            errors.append(f"op {op.name}: {op.num_tiles} tiles do not cover {out_rows} output rows")
        if op.k_panel != op.k_extent and (op.k_panel <= 0 or op.k_panel % abi.STAGE_K):
            errors.append(f"op {op.name}: k_panel {op.k_panel} is neither all of K nor a multiple of {abi.STAGE_K}")
        if len(op.tiles) != plan.grid:
            errors.append(f"op {op.name}: tile ranges for {len(op.tiles)} blocks on a grid of {plan.grid}")
        produced = [0] * op.num_tiles
        for block, (begin, count) in enumerate(op.tiles):
            if begin < 0 or count < 0 or begin + count > op.num_tiles:
                errors.append(f"op {op.name}: block {block} owns tiles {begin}..{begin + count} of {op.num_tiles}")
                continue
            for tile in range(begin, begin + count):
                produced[tile] += 1
        errors += [f"op {op.name}: tile {tile} is produced {n} times" for tile, n in enumerate(produced) if n != 1][:4]
    return errors


def check_shared_memory(plan: StaticPlan) -> list[str]:
    """Panels, the attention merge, accumulators and the ring fit what the plan reserves, and that fits the limit."""
    errors = []
    for op in plan.ops:
        need = abi.panel_bytes(plan.rows, min(op.k_panel, op.k_extent))
        if need > plan.max_panel_bytes:
            errors.append(f"op {op.name}: a panel of {need} bytes exceeds max_panel_bytes {plan.max_panel_bytes}")
        if op.num_panels > 1 and op.max_tiles > plan.max_tiles_multi_panel:
            errors.append(
                f"op {op.name}: {op.max_tiles} tiles of one block across panels, accumulators for {plan.max_tiles_multi_panel}"
            )
    merge = abi.merge_scratch_bytes(plan.geometry.head_dim)
    if merge > plan.max_panel_bytes:
        errors.append(f"attention merge of {merge} bytes exceeds max_panel_bytes {plan.max_panel_bytes}")
    if not 2 <= plan.num_stages <= abi.MAX_STAGES:
        errors.append(f"num_stages {plan.num_stages} is outside 2..{abi.MAX_STAGES}")
    layout = abi.smem_layout(plan.rows, plan.max_panel_bytes, plan.max_tiles_multi_panel, plan.num_stages)
    if layout.total_bytes != plan.shared_memory_bytes:
        errors.append(f"shared_memory_bytes {plan.shared_memory_bytes} is not the layout's {layout.total_bytes}")
    if plan.shared_memory_bytes > plan.shared_memory_limit_bytes:
        errors.append(f"shared_memory_bytes {plan.shared_memory_bytes} exceeds the limit {plan.shared_memory_limit_bytes}")
    return errors


def check_buffers(plan: StaticPlan) -> list[str]:
    """Every buffer is aligned, large enough for the geometry, inside the workspace, and apart from the others."""
    errors = []
    present = {buffer.name: buffer for buffer in plan.buffers}
    for spec in buffers.buffer_specs(plan.geometry, plan.grid):
        if spec.name not in present:
            errors.append(f"buffer {spec.name} is missing")
        elif present[spec.name].bytes < spec.bytes:
            errors.append(f"buffer {spec.name}: {present[spec.name].bytes} bytes, its tensor {list(spec.shape)} needs {spec.bytes}")
    ordered = sorted(plan.buffers, key=lambda buffer: buffer.offset)
    for buffer in ordered:
        if buffer.offset % buffers.ALIGNMENT_BYTES:
            errors.append(f"buffer {buffer.name}: offset {buffer.offset} is not a multiple of {buffers.ALIGNMENT_BYTES}")
        if buffer.offset < 0 or buffer.offset + buffer.bytes > plan.workspace_bytes:
            errors.append(f"buffer {buffer.name} ends at {buffer.offset + buffer.bytes}, the workspace at {plan.workspace_bytes}")
    for first, second in zip(ordered, ordered[1:], strict=False):
        if first.offset + first.bytes > second.offset:
            errors.append(f"buffers {first.name} and {second.name} overlap at offset {second.offset}")
    return errors


def check_signals(plan: StaticPlan) -> list[str]:
    """A wait opens exactly when all producers have signalled, in this launch and, through the base, in the next."""
    errors = []
    consumed = {phase for edge in plan.edges for phase, _ in edge.consumers}
    for phase in (*LAYER_PHASES, FINAL_PHASE):
        if phase not in consumed:
            errors.append(f"phase {phase} waits for no edge")
    for op in plan.ops:
        owners = len(participants(plan, op.name))
        if op.producers != owners:
            errors.append(f"op {op.name}: producers {op.producers}, but {owners} blocks own tiles")
    for edge in plan.edges:
        signals = num_signals(plan, edge.producer)
        if edge.producers > signals:
            errors.append(f"edge {edge.name}: waits for {edge.producers} signals a layer, only {signals} are given: it would hang")
        elif edge.producers < signals:
            errors.append(
                f"edge {edge.name}: waits for {edge.producers} signals a layer, {signals} are given: the wait opens early and "
                "the next launch starts from a wrong base"
            )
        if edge.producers * plan.geometry.num_layers >= MAX_SIGNALS:
            errors.append(f"edge {edge.name}: {edge.producers} signals a layer overflow the counter within a launch")
    return errors


def num_signals(plan: StaticPlan, phase: str) -> int:
    """Signals that the phase gives per layer: one a block; attention one for each unit that a block completes."""
    if phase == "attention":
        return attention_units(plan.geometry, plan.rows)
    return len(participants(plan, phase))


def describe_cycle(graph: EventGraph, order: list[int]) -> str:
    """Walks back from any event that never becomes ready until one repeats."""
    done = set(order)
    node = next(n for n in range(len(graph.events)) if n not in done)
    path: list[int] = []
    while node not in path:
        path.append(node)
        node = next(source for source in graph.before[node] if source not in done)
    cycle = path[path.index(node) :]
    return "cycle: " + " <- ".join(str(graph.events[n]) for n in [*cycle, node])


def check_hand_overs(plan: StaticPlan, graph: EventGraph, ancestors: list[int]) -> list[str]:
    """Two accesses of a buffer, one of them a write, are ordered: no early read, no overwrite of what is still read."""
    errors = []
    steps = [(layer, phase) for layer in range(NUM_LAYERS) for phase in LAYER_PHASES] + [(NUM_LAYERS - 1, FINAL_PHASE)]
    nodes = {step: [graph.index[Event(*step, block)] for block in participants(plan, step[1])] for step in steps}
    masks = {step: sum(1 << node for node in nodes[step]) for step in steps}
    for buffer in plan.buffers:
        touched = [s for s in steps if s[1] in buffer.writers or s[1] in buffer.readers]
        for j, later in enumerate(touched):
            if later[1] in buffer.writers and later[1] not in buffer.own_part and len(nodes[later]) > 1:
                errors.append(f"buffer {buffer.name}: blocks of {later[1]} write parts they do not own")
            for earlier in touched[:j]:
                writes_first = earlier[1] in buffer.writers
                if not writes_first and later[1] not in buffer.writers:
                    continue
                errors += unordered(buffer.name, graph, ancestors, nodes[later], masks[earlier], writes_first)[:1]
    return list(dict.fromkeys(errors))


def unordered(buffer: str, graph: EventGraph, ancestors: list[int], later: list[int], earlier_mask: int, writes_first: bool):
    """One message per node of `later` that some node of the earlier phase does not happen before."""
    messages = []
    for node in later:
        missing = earlier_mask & ~ancestors[node]
        if missing:
            other = graph.events[missing.bit_length() - 1]
            if writes_first:
                messages.append(f"buffer {buffer}: {graph.events[node]} may run before {other} has written it")
            else:
                messages.append(f"buffer {buffer}: {graph.events[node]} may overwrite it while {other} still reads it")
    return messages


def check_generations(plan: StaticPlan, graph: EventGraph, ancestors: list[int]) -> list[str]:
    """No block signals layer l + 1 of an edge before all of layer l is signalled: the counter tells layers apart."""
    errors = []
    for edge in plan.edges:
        complete = graph.index[Event(0, edge.name, None)]
        for block in participants(plan, edge.producer):
            if not ancestors[graph.index[Event(1, edge.producer, block)]] >> complete & 1:
                errors.append(f"edge {edge.name}: block {block} may signal layer 1 before every signal of layer 0 is counted")
                break
    return errors
