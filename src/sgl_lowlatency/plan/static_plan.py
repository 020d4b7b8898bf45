"""StaticPlan: everything about one decode step that is decided before the first launch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan import buffers, edges, panels, tiles
from sgl_lowlatency.plan.buffers import Buffer
from sgl_lowlatency.plan.edges import Edge
from sgl_lowlatency.plan.tiles import Op


class PlanError(ValueError):
    """No plan exists for these arguments; the message names the field and its value."""


@dataclass(frozen=True)
class StaticPlan:
    """Tiles, edges, buffers and shared memory of `decode_step` for one number of rows. See make_plan.

    `generation_bytes` depends on the geometry and the grid only: the plans of all widths share one workspace of `generations`.
    A step's buffers lie at the begin of each.
    """

    geometry: Geometry
    rows: int
    rows_per_request: int  # consecutive rows of each request: 1 in decode; in a verify step each sees the ones before it
    grid: int  # blocks, one an SM
    ops: tuple[Op, ...]  # of a layer
    head: Op | None  # the LM head, bf16, behind the last layer; None: the step ends at the final norm
    edges: tuple[Edge, ...]
    buffers: tuple[Buffer, ...]
    num_stages: int  # of the weight ring
    max_panel_bytes: int  # of any op and of attention
    max_tiles_multi_panel: int  # most tiles of one block in an op of several panels; 0 when there is none
    panel_pairs: int  # MoE: pairs of a row and an expert whose activations are in the panel of down at a time; 0 for dense layers
    shared_memory_bytes: int  # of one block
    shared_memory_limit_bytes: int
    generations: int  # copies of the buffers; consecutive layers take them in turn, across launches
    clear_ahead: int  # layer l clears the generation of layer l + clear_ahead
    generation_bytes: int  # from one generation to the next

    @property
    def num_requests(self) -> int:
        return self.rows // self.rows_per_request

    @property
    def workspace_bytes(self) -> int:
        return self.generations * self.generation_bytes

    @property
    def matrices(self) -> tuple[Op, ...]:
        """The ops of a layer, and the LM head where there is one, in the order of abi::OpIdx."""
        return self.ops if self.head is None else (*self.ops, self.head)

    def op(self, name: str) -> Op:
        return next(op for op in self.matrices if op.name == name)

    def edge(self, name: str) -> Edge:
        return next(edge for edge in self.edges if edge.name == name)

    def buffer(self, name: str) -> Buffer:
        return next(buffer for buffer in self.buffers if buffer.name == name)

    def block_weight_bytes(self) -> list[int]:
        """Weight bytes of one layer that each block reads, [grid]."""
        return block_weight_bytes(self.ops, self.grid)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces. Equal plans have equal text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def hash(self) -> str:
        """sha256 of the canonical JSON, hex. Ranks compare it before the first launch."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def block_weight_bytes(ops: tuple[Op, ...], grid: int) -> list[int]:
    """Weight bytes of the ops that each block reads, [grid]."""
    return [sum(op.tiles[block][1] * op.tile_weight_bytes for op in ops) for block in range(grid)]


def make_plan(
    geometry: Geometry,
    rows: int,
    grid: int = 132,
    shared_memory_bytes: int = 232448,
    panel_budget_bytes: int = panels.DEFAULT_PANEL_BUDGET_BYTES,
    rows_per_request: int = 1,
    element_bytes: int = 2,
    has_head: bool = False,
) -> StaticPlan:
    """Plans a step of `rows` rows on `grid` blocks (one an SM) with that much shared memory a block.

    `panel_budget_bytes`: activations kept in shared memory at a time; what is left becomes ring stages. `rows_per_request`: new
    tokens of each request, one a row; rows is a multiple of it. `element_bytes`: of a layer's weight, 2 (bf16) or 1 (FP8);
    a router's has 2. `has_head`: the step may end with the LM head.
    Raises PlanError when a shape is unsupported or nothing fits.
    """
    require_shapes(geometry, rows, grid, shared_memory_bytes, rows_per_request, element_bytes)
    shapes = tiles.op_shapes(geometry)
    owned = {name: shape for name, shape in shapes.items() if not tiles.is_shared(geometry, name)}
    ranges = tiles.distribute(owned, grid) | {name: ((0, 0),) * grid for name in shapes if name not in owned}
    experts = panels.Experts(rows * geometry.top_k, geometry.mlp_channels, abi.routing_bytes(geometry, rows)) if geometry.is_moe else None
    memory = panels.choose(
        rows,
        {name: k for name, (_, k) in shapes.items() if not (experts and name == "down")},
        {name: max(count for _, count in ranges[name]) for name in ranges},
        geometry.head_dim,
        shared_memory_bytes,
        panel_budget_bytes,
        element_bytes,
        geometry.hidden if has_head else 0,
        experts,
    )
    if memory is None:
        busiest = max(ranges, key=lambda name: max(count for _, count in ranges[name]))
        raise PlanError(
            f"shared_memory_bytes {shared_memory_bytes} is too little for rows {rows} on grid {grid}: no panel size leaves "
            f"{panels.MIN_STAGES} ring stages (op {busiest} gives one block {max(c for _, c in ranges[busiest])} tiles)"
        )
    ops = tuple(
        Op(
            name, k, memory.k_panel.get(name, k), out_rows // abi.TILE_ROWS, ranges[name],
            tiles.element_bytes(name, element_bytes), tiles.is_shared(geometry, name),
        )
        for name, (out_rows, k) in shapes.items()
    )
    head = None
    if has_head:
        layer_bytes = block_weight_bytes(ops, grid)
        num_tiles = tiles.head_tiles(geometry)
        head = Op(tiles.HEAD, geometry.hidden, memory.head_k_panel, num_tiles, tiles.distribute_head(num_tiles, layer_bytes))
    placed = buffers.handover_buffers(geometry, rows, grid, rows_per_request, has_head)
    return StaticPlan(
        geometry=geometry,
        rows=rows,
        rows_per_request=rows_per_request,
        grid=grid,
        ops=ops,
        head=head,
        edges=edges.make_edges(geometry, buffers.edge_words(placed), has_head),
        buffers=placed,
        num_stages=memory.num_stages,
        max_panel_bytes=memory.max_panel_bytes,
        max_tiles_multi_panel=memory.max_tiles_multi_panel,
        panel_pairs=memory.panel_pairs,
        shared_memory_bytes=memory.total_bytes,
        shared_memory_limit_bytes=shared_memory_bytes,
        generations=abi.GENERATIONS,
        clear_ahead=abi.CLEAR_AHEAD,
        generation_bytes=buffers.generation_bytes(geometry, grid),
    )


def require_shapes(
    geometry: Geometry, rows: int, grid: int, shared_memory_bytes: int, rows_per_request: int = 1, element_bytes: int = 2
) -> None:
    """Raises PlanError with every argument that tiles, panels and attention items cannot express."""
    reasons = geometry.reasons(element_bytes)
    if geometry.num_layers < 1:
        reasons.append(f"num_layers {geometry.num_layers} is not positive")
    if not 1 <= rows <= abi.MAX_ROWS:
        reasons.append(f"rows {rows} is outside 1..{abi.MAX_ROWS}")
    for name, value in (("grid", grid), ("shared_memory_bytes", shared_memory_bytes), ("rows_per_request", rows_per_request)):
        if value < 1:
            reasons.append(f"{name} {value} is not positive")
    if geometry.is_moe and grid > geometry.hidden // abi.TILE_ROWS:
        reasons.append(f"grid {grid} leaves blocks without tiles of down: hidden {geometry.hidden} has {geometry.hidden // abi.TILE_ROWS}")
    if rows_per_request > 1 and rows % rows_per_request:
        reasons.append(f"rows {rows} is not a multiple of rows_per_request {rows_per_request}")
    if reasons:
        raise PlanError("; ".join(reasons))
