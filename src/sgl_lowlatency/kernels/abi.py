"""Constants and the shared-memory layout of `decode_step`, as the compiled extension states them.

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
    return rows * (k_panel * 2 + PANEL_PAD_BYTES)


def merge_scratch_bytes(head_dim: int) -> int:
    """Bytes the attention merge needs in place of a panel: every warp's heads, each an fp32 output, maximum and sum."""
    return NUM_CONSUMER_WARPS * MAX_HEADS_PER_ITEM * (head_dim + 2) * 4


def head_subgroups(num_q_heads: int, num_kv_heads: int) -> int:
    """Attention items that share one kv head, because an item holds at most MAX_HEADS_PER_ITEM query heads."""
    return -(-(num_q_heads // num_kv_heads) // MAX_HEADS_PER_ITEM)
