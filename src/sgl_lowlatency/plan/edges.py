"""Phases of a layer and the dependency edges between them."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.geometry import Geometry

# What every block runs, in order, for each layer; after the last layer, final_norm once.
LAYER_PHASES = ("qkv", "attention", "out_proj", "gate_up", "down")
FINAL_PHASE = "final_norm"


@dataclass(frozen=True)
class Edge:
    """A monotonic counter. Consumers of layer l wait for base + (l + 1 - layers_later) * producers.

    `consumers` are (phase, layers_later): (qkv, 1) of layer l waits for the signals of layer l - 1. final_norm follows
    the last layer and has layers_later 0.
    """

    name: str
    index: int  # abi::EdgeIdx
    producer: str  # the phase that signals, after its stores
    consumers: tuple[tuple[str, int], ...]
    producers: int  # signals per layer


def attention_units(geometry: Geometry, rows: int) -> int:
    """Groups of query heads whose attention output is completed together: (row, kv head, subgroup)."""
    return rows * geometry.num_kv_heads * abi.head_subgroups(geometry.num_q_heads, geometry.num_kv_heads)


def make_edges(producers: dict[str, int], units: int) -> tuple[Edge, ...]:
    """The five edges. `producers[op]`: blocks that own tiles of the op, each signals once a layer. Attention signals once
    for each of its `units`, by the block that completes it, because lengths decide on the device which blocks take part.
    """
    return (
        Edge("qkv", 0, "qkv", (("attention", 0),), producers["qkv"]),
        Edge("attention", 1, "attention", (("out_proj", 0),), units),
        Edge("out_proj", 2, "out_proj", (("gate_up", 0),), producers["out_proj"]),
        Edge("gate_up", 3, "gate_up", (("down", 0),), producers["gate_up"]),
        Edge("down", 4, "down", (("qkv", 1), (FINAL_PHASE, 0)), producers["down"]),
    )
