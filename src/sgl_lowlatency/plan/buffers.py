"""Buffers of the workspace: what they hold, how large they are, who writes and who reads them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.edges import attention_units

ALIGNMENT_BYTES = 256
DTYPE_BYTES = {"bf16": 2, "f32": 4, "u32": 4}


@dataclass(frozen=True)
class Buffer:
    """One tensor of the workspace. Writers and readers are phases (plan/edges.py).

    A phase in `own_part` touches only the part of the buffer that its own block or its own work item owns, or hands parts
    over through `split_tickets`; its blocks do not conflict with one another.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    own_part: tuple[str, ...]


@dataclass(frozen=True)
class Spec:
    """What the geometry asks of a buffer, before it has a place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    own_part: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def buffer_specs(geometry: Geometry, grid: int) -> tuple[Spec, ...]:
    """Buffers of one step. Sized for MAX_ROWS, so that the plans of every width lay out one workspace alike.

    `split_tickets` is zero before the first launch and between layers, so no other plan may place data over it.
    """
    g = geometry
    rows = abi.MAX_ROWS
    units = attention_units(g, rows)
    items = grid + units  # most items of a step, whatever the lengths
    qkv_columns = (g.num_q_heads + 2 * g.num_kv_heads) * g.head_dim
    return (
        Spec("residual", "bf16", (rows, g.hidden), ("out_proj", "down"),
             ("qkv", "out_proj", "gate_up", "down", "final_norm"), ("out_proj", "down")),
        Spec("qkv", "f32", (rows, qkv_columns), ("qkv",), ("attention",), ("qkv",)),
        Spec("attention_out", "bf16", (rows, g.num_q_heads * g.head_dim), ("attention",), ("out_proj",), ("attention",)),
        Spec("activation", "bf16", (rows, g.intermediate), ("gate_up",), ("down",), ("gate_up",)),
        Spec("partial_out", "f32", (items, abi.MAX_HEADS_PER_ITEM, g.head_dim), ("attention",), ("attention",), ("attention",)),
        Spec("partial_max_sum", "f32", (items, abi.MAX_HEADS_PER_ITEM, 2), ("attention",), ("attention",), ("attention",)),
        Spec("split_tickets", "u32", (units,), ("attention",), ("attention",), ("attention",)),
    )


def place(specs: tuple[Spec, ...]) -> tuple[tuple[Buffer, ...], int]:
    """Gives every buffer an offset, a multiple of 256 bytes; returns the buffers and the bytes of the workspace."""
    placed = []
    offset = 0
    for spec in specs:
        placed.append(Buffer(spec.name, spec.dtype, spec.shape, offset, spec.bytes, spec.writers, spec.readers, spec.own_part))
        offset += -(-spec.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(placed), offset
