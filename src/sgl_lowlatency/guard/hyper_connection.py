"""Refusals of a DeepSeek-V4.1 layer's hyper-connections: mHC of four streams whose combine takes the pre of the sublayer in front. What attention_out
closes of the attention's, and fused_moe of the MoE's. Duck-typed as guard/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_lowlatency.guard.linear import tensor_reasons

STREAMS, MIXES = 4, 24  # abi/hyper_connection.hpp


def layer_reasons(layer: Any) -> Iterator[str]:
    """Of a DeepseekV4DecoderLayer: what its hyper-connections have alike."""
    hc = layer.hc_cfg
    if not layer.boundary_pre_from_prev:
        yield "the combine does not take the pre of the sublayer in front: a layer of DeepSeek-V4, or of V4.1's MTP"
    if hc.mult != STREAMS:
        yield f"mHC has {hc.mult} streams, not {STREAMS}"
    if hc.hidden % 128:
        yield f"hidden {hc.hidden} is not a multiple of 128"
    if hc.sinkhorn_iters < 1:
        yield f"mHC has {hc.sinkhorn_iters} Sinkhorn iterations"
    for name in ("eps", "rms_eps"):
        if not getattr(hc, name) >= 0:
            yield f"mHC has {name} {getattr(hc, name)}, which is negative or no number"


def sublayer_reasons(layer: Any, sublayer: str) -> Iterator[str]:
    """Of the same layer: its tensors around a sublayer, "attn" or "ffn"."""
    shapes = {"fn": (MIXES, STREAMS * layer.hc_cfg.hidden), "scale": (3,), "base": (MIXES,)}
    for part, shape in shapes.items():
        name = f"hc_{sublayer}_{part}"
        yield from tensor_reasons(name, getattr(layer, name, None), shape, "float32")
