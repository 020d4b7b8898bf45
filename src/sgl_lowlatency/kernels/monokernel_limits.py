"""The geometries that k1 and k2 run: limits of the compiled kernels, which the unit tests compare, for a guard that needs no extension."""

from __future__ import annotations

from sgl_lowlatency.kernels.geometry import Geometry

CHANNEL_MULTIPLE = 32  # of every K: the K of the MFMA
TILE_ROWS, MAX_EXPERTS, MAX_TOP_K = 16, 256, 16  # of the router
MAX_GROUP = 16  # query heads of a KV head: the N of the MFMA
HEAD_DIMS = (64, 128)


def reasons(g: Geometry, tp_size: int = 1) -> list[str]:
    """Why the kernels cannot run a rank's share of a model, one line a field, in the HF config's names."""
    of = f" over --tp-size {tp_size}" if tp_size > 1 else ""
    found = []
    if g.head_dim not in HEAD_DIMS:
        found.append(f"config.head_dim {g.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    if g.hidden % CHANNEL_MULTIPLE:
        found.append(f"config.hidden_size {g.hidden} is not a multiple of {CHANNEL_MULTIPLE}")
    if g.mlp_channels % CHANNEL_MULTIPLE:
        channels = "moe_intermediate_size" if g.is_moe else "intermediate_size"
        found.append(f"config.{channels}{of} is {g.mlp_channels} a rank, no multiple of {CHANNEL_MULTIPLE}")
    if g.num_kv_heads < 1:
        found.append(f"config.num_key_value_heads{of} is {g.num_kv_heads} a rank, not positive")
    elif g.num_q_heads % g.num_kv_heads:
        found.append(f"config.num_attention_heads{of} is {g.num_q_heads} a rank, no multiple of {g.num_kv_heads} KV heads")
    elif g.num_q_heads // g.num_kv_heads > MAX_GROUP:
        found.append(f"a KV head has {g.num_q_heads // g.num_kv_heads} query heads, more than {MAX_GROUP}")
    if g.is_moe:
        if g.num_experts % TILE_ROWS or g.num_experts > MAX_EXPERTS:
            found.append(f"config.num_experts {g.num_experts} is not a multiple of {TILE_ROWS} up to {MAX_EXPERTS}")
        if not 1 <= g.top_k <= min(g.num_experts, MAX_TOP_K):
            found.append(f"config.num_experts_per_tok {g.top_k} is outside 1..{min(g.num_experts, MAX_TOP_K)}")
    return found
