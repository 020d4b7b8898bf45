"""The spec of DeepSeek-V4.1 on NVIDIA with steps of the target, on sm_90 and one GPU: slices of every layer, all of them unless
SGL_LOWLATENCY_DEEPSEEK_SLICES names fewer. With "none" deepseek_v4_dspark's stands in its place (plugin.py).

- isas: only on sm_90 SGLang holds experts as fused_moe reads them, and keys in the V4 layout; tp_sizes: attention_out and
  fused_moe can add sums over ranks (kernels/parallel_attention_out.py, kernels/fused_moe.py), which nothing here asks them for yet.
- Which slices: the variable's list, read in `_build` and in the checks below, which ask of a server what these slices need.
- Engram, compressor, indexer, sparse attention, mHC behind the MoE unless attention_out and moe are both ours, capture variants and commits that are
  put off: SGLang's, as they are.
- Host emulation: SGLang itself would run FP8 layers on the CPU, which it does not.
- max_rows 48: the kernels'; steps of more rows run SGLang's forward. With drafts, verify steps alone: of 6 rows a request up to 8 requests.
- numerics: SGLang quantises activations of FP8 matrices in groups of 32, which the kernels do not. Bounds of attention's slices: twice what such
  activations do to the worst of 48 rows (tests/contract/test_deepseek_v4_layers.py), a third of what a wrong block, slot, mix or rotation does. Of
  the MoE: 0.03 of a row by chance, a wrong expert of six 0.3 and more; of its post, attention_out's. On an H200, in eight layers, attention's are at most 0.35 of
  their bounds and the MoE's 0.045 (benchmark/LOG.md, 26), logits of a whole step 0.06 to 0.07 of their norm from SGLang's on the same experts, KV
  rows 0.08, and a server's tokens and drafts SGLang's own on a text that the head forces (30).
"""

from __future__ import annotations

import logging
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
from sgl_lowlatency.build.deepseek_v4 import build_slices
from sgl_lowlatency.build.device_limits import device_limits
from sgl_lowlatency.guard import attention_slices, fused_moe, moe
from sgl_lowlatency.guard.config import device_reasons, server_argument_reasons
from sgl_lowlatency.guard.deepseek_v4 import layer_reasons
from sgl_lowlatency.guard.device import installation_reasons
from sgl_lowlatency.guard.quantization import emulation_reasons
from sgl_lowlatency.kernels.fused_moe import MAX_ROWS as MOE_ROWS
from sgl_lowlatency.kernels.slice import MAX_ROWS as ATTENTION_ROWS
from sgl_lowlatency.runtime.deepseek_v4_step import DeepseekV4Step

logger = logging.getLogger(__name__)

MAX_ROWS = min(MOE_ROWS, ATTENTION_ROWS)
OTHERWISE = "SGL_LOWLATENCY_DEEPSEEK_SLICES names fewer, or none"
BOUNDS = {
    "attention_in.x": 0.01, "attention_in.q_lora": 0.1, "attention_in.q": 0.12, "attention_in.q_rope": 0.13, "attention_in.kv": 0.12,
    "attention_in.kv_rope": 0.12, "attention_out.coefficients": 1e-3, "attention_out.streams": 0.08, "attention_out.out": 0.08,
    "moe.relative_l2": 0.1, "routing.gap": 1e-3, "moe.coefficients": 1e-3, "moe.streams": 0.08,
}  # fmt: skip
# (server argument, values that are served, why the others are not), as in guard/config.py.
SERVER_ARGUMENTS = (("speculative_algorithm", (None, "DSPARK"), "nobody has tested its verify steps with slices of DeepSeek-V4.1"),)
SEVERAL_GPUS = (
    "slices of DeepSeek-V4.1's layers run on one GPU: on several, SGL_LOWLATENCY_DEEPSEEK_SLICES=none and SGL_LOWLATENCY_DRAFT_SAMPLER=1 have the "
    "proposals of its DSPARK draft"
)
NO_SLICES = "SGL_LOWLATENCY_DEEPSEEK_SLICES=none leaves every layer to SGLang: unset it, or name attention_in, attention_out or moe"


def _takes_attention(slices: tuple[str, ...]) -> bool:
    return bool({"attention_in", "attention_out"} & set(slices))


def _config_disable_reasons(cfg: Any, hf_config: Any) -> list[str]:
    from sglang.srt.kernel_plugins.nvidia.binding import device_isa

    try:
        settings = config.get()
    except ValueError as error:
        return [str(error)]
    slices, emulate, model = settings.deepseek_slices, settings.emulate, getattr(hf_config, "text_config", hf_config)
    reasons = server_argument_reasons(cfg) + server_argument_reasons(cfg, SERVER_ARGUMENTS) if slices else [NO_SLICES]
    reasons += [SEVERAL_GPUS] if slices and cfg.tp_size > 1 else []
    if _takes_attention(slices):
        reasons += attention_slices.config_reasons(model) + server_argument_reasons(cfg, attention_slices.SERVER_ARGUMENTS)
    if "moe" in slices:
        reasons += fused_moe.config_reasons(model) + server_argument_reasons(cfg, fused_moe.SERVER_ARGUMENTS + moe.SERVER_ARGUMENTS)
    reasons += device_reasons(cfg, emulate) + (emulation_reasons(cfg, hf_config) if emulate else [])
    return reasons + installation_reasons(device_isa(), emulate=emulate)


def _model_disable_reasons(model: torch.nn.Module, hf_config: Any) -> list[str]:
    slices = config.get().deepseek_slices
    return [f"layer {i}: {reason}" for i, layer in enumerate(model.model.layers) for reason in layer_reasons(layer, slices)]


def _build(model: torch.nn.Module, hf_config: Any, context: BuildContext) -> DeepseekV4Step:
    settings, widths = config.get(), [rows for rows in context.widths if rows <= MAX_ROWS]
    if not widths:
        raise ValueError(f"the slices take {MAX_ROWS} rows, the steps of this server have {context.tokens_per_request} and more")
    logger.info("%s of every layer of DeepSeek-V4.1: %s", ", ".join(settings.deepseek_slices), OTHERWISE)
    layers = list(model.model.layers)
    device = layers[0].mlp.gate.weight.device
    slices = build_slices(layers, settings.deepseek_slices, max(widths), device, device_limits(device).grid, context.deadline_s)
    return DeepseekV4Step(slices, widths, context.tokens_per_request, BOUNDS, settings.self_check, attention_slices.pool_reasons)


DEEPSEEK_V4_SPEC = MegakernelSpec(
    name="sgl_lowlatency slices of a layer (DeepSeek-V4.1)",
    requires=Requirements(
        isas=frozenset({"sm_90"}),
        tp_sizes=frozenset({1}),
        dtypes=frozenset({"bfloat16"}),
        decode_graph_backends=frozenset({"full", "disabled"}),
        server_args={"moe_runner_backend": fused_moe.RUNNER_BACKENDS},
        env={
            "SGLANG_SIMULATE_UNIFORM_EXPERTS": False, "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": False, "SGLANG_SHARED_EXPERT_TP1": False,
            **attention_slices.ENVIRONMENT,
        },
    ),
    features=frozenset({Feature.SPECULATIVE_DECODING}),
    numerics=Numerics(NumericsKind.TOLERANCE, dict(BOUNDS)),
    max_rows=MAX_ROWS,
    build=_build,
    api_version=MEGAKERNEL_API_VERSION,
    model_disable_reasons=_model_disable_reasons,
    config_disable_reasons=_config_disable_reasons,
)  # fmt: skip
