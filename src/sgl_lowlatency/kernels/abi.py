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
MAX_HEADS_PER_ITEM: int = _C.abi.kMaxHeadsPerItem  # query heads of one attention item
MIN_ITEM_TOKENS: int = _C.abi.kMinItemTokens  # least tokens of an attention item
ITEM_TOKEN_MULTIPLE: int = _C.abi.kItemTokenMultiple
NUM_CONSUMER_WARPS: int = _C.abi.kNumConsumerWarps
STAGE_K: int = _C.abi.kStageK  # K elements of one stage of the weight ring
STAGE_BYTES: int = _C.abi.kStageBytes
MAX_STAGES: int = _C.abi.kMaxStages
PANEL_PAD_BYTES: int = _C.abi.kPanelPadBytes  # padding of one row of an activation panel

# smem_layout(rows, max_panel_bytes, max_tiles_multi_panel, num_stages) -> SmemLayout with byte offsets and total_bytes
smem_layout = _C.smem_layout


def panel_bytes(rows: int, k_panel: int) -> int:
    """Bytes of an activation panel [rows, k_panel] bf16 with padded rows."""
    return rows * _C.panel_row_bytes(k_panel)


def merge_scratch_bytes(head_dim: int) -> int:
    """Bytes the attention merge needs in place of a panel: every warp's heads, each an fp32 output, maximum and sum."""
    return _C.merge_scratch_bytes(head_dim)


def head_subgroups(num_q_heads: int, num_kv_heads: int) -> int:
    """Attention items that share one kv head, because an item holds at most MAX_HEADS_PER_ITEM query heads.

    Raises ValueError when num_kv_heads is not positive.
    """
    if num_kv_heads < 1:
        raise ValueError(f"num_kv_heads {num_kv_heads} is not positive")
    return _C.head_subgroups(num_q_heads, num_kv_heads)
