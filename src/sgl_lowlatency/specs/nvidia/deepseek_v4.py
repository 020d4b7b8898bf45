"""The spec of DeepSeek-V4.1 on NVIDIA, so far its MoE half on sm_90 and one GPU. In no registry: no server has run it, and where the kernel was
measured, at one row, SGLang's own launches are faster. attention_in and attention_out are not in the step yet: they need the layer issued anew.

- isas: only on sm_90 SGLang holds the experts as fused_moe reads them; tp_sizes: the sum over ranks is not in the kernel.
- Attention, Engram, mHC, KV pool, capture variants: SGLang's, as they are, so nothing of them is refused beside what every spec refuses of a server
  (guard/config.py): plain arguments, the device, what this installation was compiled for.
- Host emulation: SGLang itself would run FP8 layers on the CPU, which it does not.
- max_rows 48: the kernel's; steps of more rows run SGLang's forward.
- numerics: SGLang quantises the shared expert's activations to FP8 in groups of 32, which the kernel does not: 2^-4 a value at most, 0.03 of a row by
  chance. Never measured on a GPU: the bound is what a wrong expert of six exceeds (0.3 and more).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.plugin_kernels.nvidia.spec import (
    MEGAKERNEL_API_VERSION,
    BuildContext,
    Feature,
    MegakernelSpec,
    Numerics,
    NumericsKind,
    Requirements,
)

from sgl_lowlatency import config
from sgl_lowlatency.build.device_limits import device_limits
from sgl_lowlatency.build.fused_moe import collect_moe
from sgl_lowlatency.guard import fused_moe, moe
from sgl_lowlatency.guard.config import device_reasons, server_argument_reasons
from sgl_lowlatency.guard.device import installation_reasons
from sgl_lowlatency.guard.quantization import emulation_reasons
from sgl_lowlatency.kernels.fused_moe import MAX_ROWS, FusedMoe
from sgl_lowlatency.runtime.deepseek_v4_step import DeepseekV4Step

BOUNDS = {"moe.relative_l2": 0.1, "routing.gap": 1e-3}


def _config_disable_reasons(cfg: Any, hf_config: Any) -> list[str]:
    from sglang.srt.kernel_plugins.nvidia.binding import device_isa

    try:
        emulate = config.get().emulate
    except ValueError as error:
        return [str(error)]
    reasons = fused_moe.config_reasons(getattr(hf_config, "text_config", hf_config))
    reasons += server_argument_reasons(cfg) + server_argument_reasons(cfg, fused_moe.SERVER_ARGUMENTS + moe.SERVER_ARGUMENTS)
    reasons += device_reasons(cfg, emulate) + (emulation_reasons(cfg, hf_config) if emulate else [])
    return reasons + installation_reasons(device_isa(), emulate=emulate)


def _model_disable_reasons(model: torch.nn.Module, hf_config: Any) -> list[str]:
    return [f"layer {i}: {reason}" for i, layer in enumerate(model.model.layers) for reason in fused_moe.layer_reasons(layer.mlp)]


def _build(model: torch.nn.Module, hf_config: Any, context: BuildContext) -> DeepseekV4Step:
    layers = [(layer.mlp, collect_moe(layer.mlp)) for layer in model.model.layers]
    first = layers[0][1]
    device, widths = first.router.device, [rows for rows in context.widths if rows <= MAX_ROWS]
    if not widths:
        raise ValueError(f"fused_moe takes {MAX_ROWS} rows, the steps of this server have {min(context.widths)} and more")
    num_experts, hidden = first.router.shape
    kernel = FusedMoe(
        hidden, first.gate_up.shape[1] // 2, num_experts, first.top_k, max(widths), device, device_limits(device).grid, context.deadline_s
    )
    return DeepseekV4Step(layers, kernel, widths, context.tokens_per_request, BOUNDS, config.get().self_check)


DEEPSEEK_V4_SPEC = MegakernelSpec(
    name="sgl_lowlatency fused_moe (DeepSeek-V4.1)",
    requires=Requirements(
        isas=frozenset({"sm_90"}),
        tp_sizes=frozenset({1}),
        dtypes=frozenset({"bfloat16"}),
        decode_graph_backends=frozenset({"full", "disabled"}),
        server_args={"moe_runner_backend": fused_moe.RUNNER_BACKENDS},
        env={"SGLANG_SIMULATE_UNIFORM_EXPERTS": False, "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": False, "SGLANG_SHARED_EXPERT_TP1": False},
    ),
    features=frozenset({Feature.SPECULATIVE_DECODING}),
    numerics=Numerics(NumericsKind.TOLERANCE, dict(BOUNDS)),
    max_rows=MAX_ROWS,
    build=_build,
    api_version=MEGAKERNEL_API_VERSION,
    model_disable_reasons=_model_disable_reasons,
    config_disable_reasons=_config_disable_reasons,
)
