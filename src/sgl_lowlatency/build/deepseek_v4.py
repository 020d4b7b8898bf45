"""The slices of a DeepSeek-V4.1 model's layers: which of them are ours is decided here, from one list, for all layers alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sgl_lowlatency.build.attention_slices import attention_in_sizes, attention_out_sizes, collect_attention_in, collect_attention_out
from sgl_lowlatency.build.fused_moe import collect_moe
from sgl_lowlatency.build.hyper_connection import collect_hyper_connection
from sgl_lowlatency.kernels.attention_in import AttentionIn
from sgl_lowlatency.kernels.attention_out import AttentionOut
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fused_moe import FusedMoe
from sgl_lowlatency.runtime.deepseek_v4_layer import LayerSlices


def build_slices(
    layers: Sequence[Any], names: Sequence[str], max_rows: int, device: torch.device, grid: int, deadline_s: float,
    emulation: EmulationOptions | None = None,
) -> list[tuple[Any, LayerSlices]]:  # fmt: skip
    """layers: SGLang's decoder layers, of which guard has nothing against `names`, out of config.DEEPSEEK_SLICES. Each slice has one kernel with one
    workspace, which the layers share. Behind attention_out the MoE has the streams that its post needs: there it is prepared for that."""
    layer, common = layers[0], (max_rows, device, grid, deadline_s)
    kernels: dict[str, Any] = {}
    if "attention_in" in names:
        kernels["attention_in"] = AttentionIn(attention_in_sizes(layer), *common, emulation=emulation)
    if "attention_out" in names:
        kernels["attention_out"] = AttentionOut(attention_out_sizes(layer), *common, emulation=emulation)
    if "moe" in names:
        first = collect_moe(layer.mlp)
        num_experts, hidden = first.router.shape
        kernels["moe"] = FusedMoe(hidden, first.gate_up.shape[1] // 2, num_experts, first.top_k, *common, emulation=emulation)

    def prepare(name: str, kernel: Any, layer: Any) -> Any:
        if name == "attention_in":
            return kernel.prepare(collect_attention_in(layer))
        if name == "attention_out":
            return kernel.prepare(collect_attention_out(layer))
        hyper = collect_hyper_connection(layer, "ffn") if "attention_out" in kernels else None
        return kernel.prepare(collect_moe(layer.mlp), hyper=hyper)

    return [(layer, LayerSlices(**{name: (kernel, prepare(name, kernel, layer)) for name, kernel in kernels.items()})) for layer in layers]
