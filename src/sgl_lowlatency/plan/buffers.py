"""Hand-over buffers: what they hold, where they lie in a generation, who writes and who reads them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.edges import FINAL_PHASE, HEAD_PHASE, attention_units

ALIGNMENT_BYTES = 128
DTYPE_BYTES = {"bf16": 2, "f32": 4}
WORD_BYTES = 4


@dataclass(frozen=True)
class Buffer:
    """One tensor of a generation. Its 32-bit words are their own flags: unwritten until the writer stores them.

    A word is written once a layer, by the owner of its tile or of its attention item, and read by whoever needs it.
    """

    name: str
    edge: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the begin of a generation
    bytes: int
    writer: str  # phase
    tile_columns: int  # columns of the last dimension that one tile of the writer fills; 0: attention items fill it
    readers: tuple[tuple[str, int], ...]  # (phase, layers later)
    whole_readers: tuple[str, ...]  # of these, the phases of a layer whose every block reads all of it

    @property
    def words(self) -> int:
        return self.bytes // WORD_BYTES


def handover_buffers(geometry: Geometry, rows: int, grid: int, rows_per_request: int = 1, has_head: bool = False) -> tuple[Buffer, ...]:
    """The buffers of one generation of a step of `rows` rows, where abi::handover_layout places them."""
    g = geometry
    at, stream = abi.handover_layout(g, rows, grid, rows_per_request), abi.stream_layout(g, rows)
    items = grid + attention_units(g, rows, rows_per_request)  # most items of a step, whatever the lengths
    tile, half_tile = abi.TILE_ROWS, abi.TILE_ROWS // 2

    def buffer(name, edge, dtype, shape, offset, writer, tile_columns, readers, whole_readers=()):
        return Buffer(name, edge, dtype, shape, offset, prod(shape) * DTYPE_BYTES[dtype], writer, tile_columns, readers, whole_readers)

    def stream_buffers(prefix, edge, begin, x_readers, norm_reader, head, final):
        """The residual stream x, x * weight of the norm that follows, and the sums of squares of x, one a tile."""
        whole, hidden = (norm_reader[0],), (rows, g.hidden)
        return (
            buffer(f"{prefix}_x", edge, "bf16", hidden, begin + stream.x, edge, tile, (*x_readers, *final)),
            buffer(f"{prefix}_scaled", edge, "bf16", hidden, begin + stream.scaled, edge, tile, (norm_reader, *head), whole),
            buffer(f"{prefix}_squares", edge, "f32", (rows, g.hidden // tile), begin + stream.squares, edge, 1, (norm_reader, *head, *final), whole),
        )

    columns = (g.num_q_heads + 2 * g.num_kv_heads) * g.head_dim
    partial = (items, abi.item_columns(g, rows_per_request))
    combine, down = (("combine", 0),), (("down", 0),)
    head, final = ((HEAD_PHASE, 0),) if has_head else (), ((FINAL_PHASE, 0),)
    router = ()
    if g.is_moe:
        logits_at = abi.router_logits_at(g, at, rows)
        router = (buffer("router_logits", "router", "bf16", (rows, g.num_experts), logits_at, "router", tile, (("routing", 0),), ("routing",)),)
    return (
        buffer("qkv", "qkv", "f32", (rows, columns), at.qkv, "qkv", tile, (("attention", 0),)),
        buffer("attention_out", "attention", "bf16", (rows, g.num_q_heads * g.head_dim), at.attention_out, "combine", 0,
               (("out_proj", 0),), ("out_proj",)),
        *stream_buffers("mid", "out_proj", at.mid, down, ("router" if g.is_moe else "gate_up", 0), (), ()),
        buffer("activation", "gate_up", "bf16", (rows * g.num_pairs_a_row, g.mlp_channels), at.activation, "gate_up", half_tile, down, ("down",)),
        *stream_buffers("end", "down", at.end, (("out_proj", 1),), ("qkv", 1), head, final),
        buffer("partial_out", "partial", "f32", (*partial, g.head_dim), at.partial_out, "attention", 0, combine),
        buffer("partial_max_sum", "partial", "f32", (*partial, 2), at.partial_max_sum, "attention", 0, combine),
        *router,
    )


def edge_words(buffers: tuple[Buffer, ...]) -> dict[str, int]:
    """Words that each edge hands over in a layer."""
    words = {name: 0 for name in abi.EDGE_NAMES}  # of a dense layer, none of the router's
    for buffer in buffers:
        words[buffer.edge] += buffer.words
    return words


def generation_bytes(geometry: Geometry, grid: int) -> int:
    """From one generation to the next: the plans of every width, and of any rows a request, share one workspace."""
    chains = range(1, abi.MAX_ROWS + 1)
    return max(abi.handover_layout(geometry, abi.MAX_ROWS // chain * chain, grid, chain).total_bytes for chain in chains)
