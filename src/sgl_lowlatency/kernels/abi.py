"""Constants and sizes of `decode_step`, as the compiled extension states them.

They exist once, in csrc/include/sgl_lowlatency/abi/decode_step.hpp; this module gives them Python names.
"""

try:
    from sgl_lowlatency import _C
except ImportError as error:
    raise ImportError(
        "sgl_lowlatency has no compiled extension (_C): install the package with `pip install .` or `pip install -e .`"
    ) from error

MAX_ROWS: int = _C.abi.kMaxRows  # rows of one step
TILE_ROWS: int = _C.abi.kTileRows  # output rows of one weight tile
MAX_HEADS_PER_ITEM: int = _C.abi.kMaxHeadsPerItem  # columns of one attention item, each a query head of a row
MIN_ITEM_TOKENS: int = _C.abi.kMinItemTokens  # least tokens of an attention item
ITEM_TOKEN_MULTIPLE: int = _C.abi.kItemTokenMultiple
NUM_CONSUMER_WARPS: int = _C.abi.kNumConsumerWarps
STAGE_BYTES: int = _C.abi.kStageBytes  # of one stage of the weight ring
SCALE_BLOCK: int = _C.abi.kScaleBlock  # FP8: rows and columns of a block of weights that has one scale
MAX_SCALED_PANEL_K: int = _C.abi.kMaxScaledPanelK  # FP8: largest panel
WEIGHT_FORMATS: dict[str, int] = dict(_C.abi.kWeightFormats)  # by name, abi::WeightFormat
MAX_STAGES: int = _C.abi.kMaxStages
WARP_TOKENS: int = _C.abi.kWarpTokens  # tokens that one warp attends to at a time
GENERATIONS: int = _C.abi.kGenerations  # copies of the hand-over buffers; layers take them in turn
CLEAR_AHEAD: int = _C.abi.kClearAhead  # layer l clears the generation of layer l + CLEAR_AHEAD
PADDING_SLOT: int = _C.abi.kPaddingSlot  # KV slot of the rows that pad a step to its graph's width
UNWRITTEN: int = _C.abi.kUnwritten  # a hand-over word nobody has written
OP_NAMES: tuple[str, ...] = tuple(_C.abi.kOpNames)  # a layer's operations in execution order, by abi::OpIdx
OP_INDEX: dict[str, int] = {**{name: index for index, name in enumerate(OP_NAMES)}, "head": _C.abi.kOpHead, "router": _C.abi.kOpRouter}  # abi::OpIdx
EDGE_NAMES: tuple[str, ...] = tuple(_C.abi.kEdgeNames)  # by abi::EdgeIdx; the last one is MoE layers'
HEAD_OP: int = _C.abi.kOpHead  # abi::OpIdx of the LM head, behind a layer's matrices
NUM_MATRICES: int = len(OP_INDEX)  # abi::kNumMatrices
PANEL_PAD_BYTES: int = _C.abi.kPanelPadBytes  # padding of one row of an activation panel

# smem_layout(rows, max_panel_bytes, max_tiles_multi_panel, num_stages, routing_bytes=0) -> SmemLayout with byte offsets and total_bytes
smem_layout = _C.smem_layout


def stage_k(element_bytes: int) -> int:
    """K elements of one stage of the weight ring: 512 of bf16 (2 bytes), 1024 of FP8 (1 byte)."""
    return _C.stage_k(element_bytes)


def panel_bytes(rows: int, k_panel: int) -> int:
    """Bytes of an activation panel [rows, k_panel] bf16 with padded rows."""
    return rows * _C.panel_row_bytes(k_panel)


def geometry_struct(geometry) -> "_C.abi.Geometry":
    """abi::Geometry of a kernels.geometry.Geometry; what the KV pool adds is 0."""
    struct = _C.abi.Geometry()
    for name in ("num_layers", "hidden", "num_q_heads", "num_kv_heads", "head_dim", "intermediate", "vocab", "max_position", "rms_eps",
                 "num_experts", "top_k", "moe_intermediate"):
        setattr(struct, name, getattr(geometry, name))
    struct.norm_topk_prob = int(geometry.norm_topk_prob)
    struct.softmax_scale = geometry.head_dim**-0.5
    return struct


def attention_panel_bytes(head_dim: int) -> int:
    """Bytes that attention needs in place of a panel: every warp's tokens, later its heads' fp32 outputs, maxima and sums."""
    return _C.attention_panel_bytes(head_dim)


def handover_layout(geometry, rows: int, grid: int, rows_per_request: int = 1):
    """Byte offsets of the hand-over buffers in one generation, and its total_bytes. rows: a multiple of rows_per_request."""
    return _C.handover_layout(geometry_struct(geometry), rows, grid, rows_per_request)


def router_logits_at(geometry, at, rows: int) -> int:
    """Byte offset in one generation of a MoE layer's router logits. at: handover_layout of as many rows."""
    return _C.router_logits_at(geometry_struct(geometry), at, rows)


def item_rows(geometry, rows_per_request: int) -> int:
    """Rows of one request that share an attention item."""
    return _C.item_rows(geometry_struct(geometry), rows_per_request)


def item_columns(geometry, rows_per_request: int) -> int:
    """Most columns, each a query head of a row, of one attention item."""
    return _C.item_columns(geometry_struct(geometry), rows_per_request)


def request_units(geometry, rows_per_request: int) -> int:
    """Attention items of one split of a request: kv heads by subgroups of their heads by groups of rows."""
    return _C.request_units(geometry_struct(geometry), rows_per_request)


def stream_layout(geometry, rows: int):
    """Byte offsets of the residual stream's tensors x, scaled and squares, and their total_bytes."""
    return _C.stream_layout(geometry_struct(geometry), rows)


def head_subgroups(num_q_heads: int, num_kv_heads: int) -> int:
    """Attention items that share one kv head, because an item holds at most MAX_HEADS_PER_ITEM query heads.

    Raises ValueError when num_kv_heads is not positive.
    """
    if num_kv_heads < 1:
        raise ValueError(f"num_kv_heads {num_kv_heads} is not positive")
    return _C.head_subgroups(num_q_heads, num_kv_heads)


def moe_layout(geometry, rows: int):
    """Byte offsets of a MoE layer's routing in shared memory, and its total_bytes; all 0 for dense layers."""
    return _C.moe_layout(rows, geometry.num_experts, geometry.top_k) if geometry.num_experts else _C.abi.MoeLayout()


def routing_bytes(geometry, rows: int) -> int:
    """Shared memory that a block keeps a layer's routing in; 0 for dense layers."""
    return moe_layout(geometry, rows).total_bytes


def even_share(total: int, block: int, grid: int) -> tuple[int, int]:
    """(begin, count) of a block's share of `total` tiles, as the device cuts work whose size routing decides."""
    return _C.even_share(total, block, grid)
