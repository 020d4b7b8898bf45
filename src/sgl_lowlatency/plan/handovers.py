"""Checks that buffers lie where the kernel may use them, and that each of their words is written once and awaited."""

from __future__ import annotations

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.plan import buffers, tiles
from sgl_lowlatency.plan.edges import describe_consumer, edge_names, end_phases, layer_phases
from sgl_lowlatency.plan.static_plan import StaticPlan


def check_buffers(plan: StaticPlan) -> list[str]:
    """Every buffer is where the kernel looks for it, aligned, large enough, inside its generation, and apart from the others."""
    errors = []
    present = {buffer.name: buffer for buffer in plan.buffers}
    for wanted in buffers.handover_buffers(plan.geometry, plan.rows, plan.grid, plan.rows_per_request, plan.head is not None):
        if wanted.name not in present:
            errors.append(f"buffer {wanted.name} is missing")
            continue
        buffer = present[wanted.name]
        if buffer.bytes < wanted.bytes:
            errors.append(f"buffer {buffer.name}: {buffer.bytes} bytes, its tensor {list(wanted.shape)} needs {wanted.bytes}")
        if buffer.offset != wanted.offset:
            errors.append(f"buffer {buffer.name}: offset {buffer.offset}, the kernel has it at {wanted.offset}")
    ordered = sorted(plan.buffers, key=lambda buffer: buffer.offset)
    for buffer in ordered:
        if buffer.offset % buffers.ALIGNMENT_BYTES:
            errors.append(f"buffer {buffer.name}: offset {buffer.offset} is not a multiple of {buffers.ALIGNMENT_BYTES}")
        if buffer.offset < 0 or buffer.offset + buffer.bytes > plan.generation_bytes:
            errors.append(f"buffer {buffer.name} ends at {buffer.offset + buffer.bytes}, its generation at {plan.generation_bytes}")
    for first, second in zip(ordered, ordered[1:], strict=False):
        if first.offset + first.bytes > second.offset:
            errors.append(f"buffers {first.name} and {second.name} overlap at offset {second.offset}")
    most = buffers.generation_bytes(plan.geometry, plan.grid)
    if plan.generation_bytes < most:
        errors.append(f"generation_bytes {plan.generation_bytes}: the widest step, which shares them, needs {most}")
    if plan.generation_bytes % buffers.ALIGNMENT_BYTES:
        errors.append(f"generation_bytes {plan.generation_bytes} is not a multiple of {buffers.ALIGNMENT_BYTES}")
    return errors


def check_words(plan: StaticPlan) -> list[str]:
    """The tiles and attention items of a layer write every word of every buffer; check_tiles has that no tile is twice."""
    errors = []
    for buffer in plan.buffers:
        readers = ", ".join(phase for phase, _ in buffer.readers)
        if buffer.writer not in layer_phases(plan.geometry):
            errors.append(f"buffer {buffer.name}: nobody writes it, {readers} would hang")
        elif buffer.writer in tiles.op_names(plan.geometry):
            written = plan.op(buffer.writer).num_tiles * buffer.tile_columns
            if written < buffer.shape[-1]:
                errors.append(f"buffer {buffer.name}: tiles write {written} of its {buffer.shape[-1]} columns, {readers} would hang")
            elif written > buffer.shape[-1]:
                errors.append(f"buffer {buffer.name}: tiles write {written} columns, it has {buffer.shape[-1]}")
        elif buffer.tile_columns:
            errors.append(f"buffer {buffer.name}: {buffer.writer} has no tiles that fill {buffer.tile_columns} columns")
    return errors


def check_edges(plan: StaticPlan) -> list[str]:
    """Edges are the kernel's, say who writes and reads their buffers, and every phase behind the first waits for one."""
    errors = []
    names = tuple(edge.name for edge in plan.edges)
    wanted = edge_names(plan.geometry)
    if names != wanted or any(edge.index != index for index, edge in enumerate(plan.edges)):
        errors.append(f"edges are {[(edge.name, edge.index) for edge in plan.edges]}, the kernel's are {list(wanted)} in this order")
    for phase in (*layer_phases(plan.geometry), *end_phases(plan.head is not None)):
        if tiles.is_shared(plan.geometry, phase):  # multiplies the panel that the router's wait filled, on the routing that its own block made
            continue
        if not any(phase == consumer for edge in plan.edges for consumer, _ in edge.consumers):
            errors.append(f"phase {phase} waits for no edge")
    for buffer in plan.buffers:
        edge = next((edge for edge in plan.edges if edge.name == buffer.edge), None)
        if edge is None:
            errors.append(f"buffer {buffer.name}: there is no edge {buffer.edge} that {', '.join(p for p, _ in buffer.readers)} could wait for")
            continue
        if edge.producer != buffer.writer:
            errors.append(f"buffer {buffer.name}: {buffer.writer} writes it, its edge {edge.name} is {edge.producer}'s")
        for reader in buffer.readers:
            if reader not in edge.consumers:
                errors.append(f"buffer {buffer.name}: {describe_consumer(*reader)} reads it without waiting for edge {edge.name}")
    words = buffers.edge_words(tuple(buffer for buffer in plan.buffers if buffer.edge in abi.EDGE_NAMES))
    for edge in plan.edges:
        read = {reader for buffer in plan.buffers if buffer.edge == edge.name for reader in buffer.readers}
        errors += [f"edge {edge.name}: {describe_consumer(*c)} waits for it and reads none of its words" for c in edge.consumers if c not in read]
        if edge.name in words and edge.words != words[edge.name]:
            errors.append(f"edge {edge.name}: {edge.words} words a layer, its buffers have {words[edge.name]}")
    return errors
