"""Weight tiles of one layer and of the LM head, and their distribution over blocks."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.geometry import Geometry

OP_NAMES = abi.OP_NAMES  # of a dense layer
MOE_OP_NAMES = ("qkv", "out_proj", "router", "gate_up", "down")  # of a MoE layer
ROUTER = "router"  # of a MoE layer
SHARED_OP = "gate_up"  # of a MoE layer: routing decides which tiles there are, and blocks share them on the device
HEAD = "head"  # the LM head, behind the last layer; abi.HEAD_OP


@dataclass(frozen=True)
class Op:
    """One weight matrix, of a layer or the LM head. `tiles[b] = (begin, count)` is the contiguous range of block b.

    Of a MoE layer, `down` is the active experts' matrices side by side: k_extent is one expert's, and a tile is 16 output rows by all of them.
    An op that is_shared has num_tiles an expert, of the active ones; no block owns any, each takes abi.even_share of them.
    """

    name: str
    k_extent: int  # K of the matrix
    k_panel: int  # K elements of activations in shared memory at a time
    num_tiles: int  # tiles of 16 output rows; gate_up: 8 gate rows and their 8 up rows
    tiles: tuple[tuple[int, int], ...]
    element_bytes: int = 2  # of a weight: 2 bf16, 1 FP8
    is_shared: bool = False

    @property
    def owners(self) -> list[int]:
        """Blocks that own at least one tile."""
        return [block for block, (_, count) in enumerate(self.tiles) if count > 0]

    @property
    def num_panels(self) -> int:
        return -(-self.k_extent // self.k_panel)

    @property
    def max_tiles(self) -> int:
        return max(count for _, count in self.tiles)

    @property
    def tile_weight_bytes(self) -> int:
        return abi.TILE_ROWS * self.k_extent * self.element_bytes


def op_shapes(geometry: Geometry) -> dict[str, tuple[int, int]]:
    """(output rows, K) of every weight matrix of a layer, in execution order; of gate_up and down, one expert's."""
    heads = geometry.num_q_heads + 2 * geometry.num_kv_heads
    return {
        "qkv": (heads * geometry.head_dim, geometry.hidden),
        "out_proj": (geometry.hidden, geometry.num_q_heads * geometry.head_dim),
        **({"router": (geometry.num_experts, geometry.hidden)} if geometry.is_moe else {}),
        "gate_up": (2 * geometry.mlp_channels, geometry.hidden),
        "down": (geometry.hidden, geometry.mlp_channels),
    }


def op_names(geometry: Geometry) -> tuple[str, ...]:
    """The operations of a layer, in execution order."""
    return MOE_OP_NAMES if geometry.is_moe else OP_NAMES


def is_shared(geometry: Geometry, name: str) -> bool:
    return geometry.is_moe and name == SHARED_OP


def element_bytes(name: str, of_layer: int) -> int:
    """Of a weight of operation `name`, where the layer's matrices have `of_layer`: the router is bf16 always."""
    return 2 if name == ROUTER else of_layer


def head_tiles(geometry: Geometry) -> int:
    """Tiles of the LM head; the last one may reach beyond the vocabulary."""
    return -(-geometry.vocab // abi.TILE_ROWS)


def max_grid(geometry: Geometry) -> int:
    """Most blocks of a grid in which every block owns tiles of qkv and of gate_up; of MoE layers, where nobody owns gate_up, of down.

    A block that owns none reads and hands over too little to be ordered with the others (plan/generations.py), so a small
    model uses fewer blocks than the GPU has SMs.
    """
    shapes = op_shapes(geometry)
    return min(shapes[name][0] // abi.TILE_ROWS for name in ("qkv", "down" if geometry.is_moe else "gate_up"))


def grid_for(geometry: Geometry, num_sms: int) -> int:
    """Blocks of a launch on a GPU of `num_sms` SMs: one an SM, or fewer for a small model."""
    return min(num_sms, max_grid(geometry))


def distribute(shapes: dict[str, tuple[int, int]], grid: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """Tile ranges [grid] of every op: floor or ceil of the mean per op, the bytes of a layer even over blocks.

    The tiles beyond floor(num_tiles / grid) * grid go to the blocks with the fewest bytes so far, starting with the op of
    the longest K, so that the surplus of one op falls on blocks that another op left out.
    """
    load = [0] * grid
    surplus_of: dict[str, set[int]] = {}
    for name in sorted(shapes, key=lambda n: (-shapes[n][1], list(shapes).index(n))):
        out_rows, k_extent = shapes[name]
        surplus = out_rows // abi.TILE_ROWS % grid
        chosen = sorted(range(grid), key=lambda block: (load[block], block))[:surplus]
        for block in chosen:
            load[block] += k_extent
        surplus_of[name] = set(chosen)

    return {name: _ranges(out_rows // abi.TILE_ROWS, grid, surplus_of[name]) for name, (out_rows, _) in shapes.items()}


def distribute_head(num_tiles: int, layer_bytes: list[int]) -> tuple[tuple[int, int], ...]:
    """Tile ranges of the LM head: floor or ceil of the mean, the surplus to the blocks that have the fewest bytes in the layer before it.

    layer_bytes: weight bytes of a layer, by block.
    """
    grid = len(layer_bytes)
    lightest = sorted(range(grid), key=lambda block: (layer_bytes[block], block))
    return _ranges(num_tiles, grid, set(lightest[: num_tiles % grid]))


def _ranges(num_tiles: int, grid: int, surplus: set[int]) -> tuple[tuple[int, int], ...]:
    """Consecutive (begin, count), one tile more for the blocks in `surplus`."""
    begin, ranges = 0, []
    for block in range(grid):
        count = num_tiles // grid + (block in surplus)
        ranges.append((begin, count))
        begin += count
    return tuple(ranges)
