"""The tensors of SGLang's hyper-connections as the kernels that close one read them: views, no copies."""

from __future__ import annotations

from typing import Any

from sgl_lowlatency.kernels.hyper_connection import HyperConnection


def collect_hyper_connection(layer: Any, sublayer: str) -> HyperConnection:
    """Of a DeepseekV4DecoderLayer that guard.hyper_connection has nothing against. sublayer: "attn" or "ffn"."""
    mix, scale, base = (getattr(layer, f"hc_{sublayer}_{part}").data for part in ("fn", "scale", "base"))
    return HyperConnection(mix, scale, base, layer.hc_cfg.sinkhorn_iters, layer.hc_cfg.eps, layer.hc_cfg.rms_eps)
