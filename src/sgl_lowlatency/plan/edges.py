"""Phases of a layer and the dependency edges between them."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.geometry import Geometry

# What every block runs, in order, for each layer. `attention` are its items, up to their hand-over, `combine` its shares of requests
# that were cut into several splits; an item that has all of its tokens hands its output over at once. Before layer 0 comes the
# embedding, as the `down` of layer -1; after the last layer, final_norm, and the LM head where the step has one.
LAYER_PHASES = ("qkv", "attention", "combine", "out_proj", "gate_up", "down")
# Of a MoE layer. In `router` every block reads the stream, which is also what its share of gate_up multiplies, and the owners of tiles hand
# logits over; in `routing` every block takes all logits.
MOE_LAYER_PHASES = ("qkv", "attention", "combine", "out_proj", "router", "routing", "gate_up", "down")
EMBEDDING_PHASE = "embedding"
FINAL_PHASE = "final_norm"
HEAD_PHASE = "head"
END_PHASES = (HEAD_PHASE, FINAL_PHASE)  # of the last layer only


@dataclass(frozen=True)
class Edge:
    """What one phase of a layer hands over to others, in 32-bit words that are each their own flag.

    `consumers` are (phase, layers later) that wait for words of this edge: (qkv, 1) of layer l waits for those of layer l - 1.
    """

    name: str
    index: int  # abi::EdgeIdx
    producer: str  # phase
    consumers: tuple[tuple[str, int], ...]
    words: int  # of a layer: the edge's buffers; of `partial`, as many as the largest number of attention items writes


def describe_consumer(phase: str, layers_later: int) -> str:
    return f"{phase} of the next layer" if layers_later else phase


def attention_units(geometry: Geometry, rows: int, rows_per_request: int) -> int:
    """Attention outputs that one item, or the splits of one item's tokens, make: (some rows of a request, kv head, subgroup)."""
    return rows // rows_per_request * abi.request_units(geometry, rows_per_request)


def layer_phases(geometry: Geometry) -> tuple[str, ...]:
    """What every block runs, in order, for each layer."""
    return MOE_LAYER_PHASES if geometry.is_moe else LAYER_PHASES


def edge_names(geometry: Geometry) -> tuple[str, ...]:
    """The edges of a layer, in the order of abi::EdgeIdx."""
    return abi.EDGE_NAMES if geometry.is_moe else tuple(name for name in abi.EDGE_NAMES if name != "router")


def end_phases(has_head: bool) -> tuple[str, ...]:
    """What follows the last layer."""
    return END_PHASES if has_head else (FINAL_PHASE,)


def make_edges(geometry: Geometry, words: dict[str, int], has_head: bool = False) -> tuple[Edge, ...]:
    """The edges, in the order of abi::EdgeIdx. `words[edge]`: of a layer."""
    ends = {
        "qkv": ("qkv", (("attention", 0),)),
        "partial": ("attention", (("combine", 0),)),
        "attention": ("combine", (("out_proj", 0),)),
        "out_proj": ("out_proj", (("router" if geometry.is_moe else "gate_up", 0), ("down", 0))),
        "gate_up": ("gate_up", (("down", 0),)),
        "down": ("down", (("qkv", 1), ("out_proj", 1), *((phase, 0) for phase in end_phases(has_head)))),
        "router": ("router", (("routing", 0),)),
    }
    return tuple(Edge(name, index, *ends[name], words[name]) for index, name in enumerate(edge_names(geometry)))
