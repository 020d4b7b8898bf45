"""Refusals of DeepSeek-V4.1's MoE, before and after the weights load: what fused_moe computes, and how SGLang must keep it.

What is served (read from sglang 0.5.23): the flashinfer_mxfp4 runner on sm_90 with bf16 activations, all experts on this GPU, the shared expert
beside them in FP8 with scales of 32 x 32 blocks. kernels/nvidia/fused_moe/DESIGN.md has the tensors. After load, duck-typed as guard/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_lowlatency.guard.linear import tensor_reasons

RUNNER_BACKENDS = frozenset({"flashinfer_mxfp4"})  # of --moe-runner-backend, which "auto" resolves to on sm_90
PRECISIONS = ("default", "bf16")  # of --flashinfer-mxfp4-moe-precision
STEP_K, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_TOP_K, MAX_EXPERTS = 128, 5120, 2560, 8, 384  # abi/fused_moe.hpp
EXPERTS_METHOD, EXPERTS_LAYOUT = "Mxfp4FlashinferCutlassMoEMethod", "flashinfer_cutlass_sm90"
SHARED_BLOCK = [32, 32]

_ONE = "the kernel has all experts on one GPU and adds the shared expert itself"
# (server argument, values that are served, why the others are not), as in guard/config.py.
SERVER_ARGUMENTS: tuple[tuple[str, tuple, str], ...] = (
    ("flashinfer_mxfp4_moe_precision", PRECISIONS, "the experts' weights are then in another layout"),
    ("enforce_shared_experts_fusion", (None, False), "the shared expert is then one of the experts"),
)


def config_reasons(hf_config: Any) -> list[str]:
    """Why fused_moe cannot run the MoE that this config describes."""
    reasons = []
    sizes = (("hidden_size", STEP_K, MAX_HIDDEN), ("moe_intermediate_size", STEP_K, MAX_INTERMEDIATE), ("n_routed_experts", 16, MAX_EXPERTS))
    for name, multiple, most in sizes:
        value = getattr(hf_config, name, None)
        if not isinstance(value, int) or not 0 < value <= most or value % multiple:
            reasons.append(f"config.{name} {value} is not a multiple of {multiple} up to {most}")
    if not isinstance(top_k := getattr(hf_config, "num_experts_per_tok", None), int) or not 1 <= top_k <= MAX_TOP_K:
        reasons.append(f"config.num_experts_per_tok {top_k} is outside 1..{MAX_TOP_K}")
    for name, served in (("n_shared_experts", 1), ("scoring_func", "sqrtsoftplus"), ("norm_topk_prob", True), ("hidden_act", "silu"),
                         ("topk_method", "noaux_tc")):  # fmt: skip
        if (value := getattr(hf_config, name, None)) != served:
            reasons.append(f"config.{name} {value!r} is not {served!r}")
    if getattr(hf_config, "num_hash_layers", 0):
        reasons.append(f"config.num_hash_layers {hf_config.num_hash_layers}: the kernel does not route by hash")
    return reasons


def layer_reasons(mlp: Any) -> Iterator[str]:
    """Checks a layer's MoE, SGLang's DeepseekV2MoE after process_weights_after_loading."""
    if (name := type(mlp).__name__) != "DeepseekV2MoE":
        yield f"mlp is a {name}, not a DeepseekV2MoE"
        return
    if mlp.shared_experts is None:
        yield "mlp.shared_experts is None: the shared expert is fused into the experts, or there is none"
        return
    if mlp.is_hash:
        yield "mlp routes by hash"
    if (mlp.tp_size, mlp.moe_ep_size) != (1, 1):
        yield f"mlp is spread over {mlp.tp_size} x {mlp.moe_ep_size} GPUs: {_ONE}"
    if mlp._shared_expert_tp1:
        yield f"mlp has its shared expert replicated (SGLANG_SHARED_EXPERT_TP1): {_ONE}"
    if mlp._enable_a2a_moe:
        yield "mlp dispatches its rows to other GPUs"
    if not mlp.routed_scaling_factor_fused_in_topk:
        yield "mlp scales its experts' sum behind them: the kernel scales the weights of choices"
    hidden, experts = mlp.gate.weight.shape[1], mlp.gate.weight.shape[0]
    yield from tensor_reasons("gate.weight", mlp.gate.weight, (experts, hidden))
    yield from tensor_reasons("gate.e_score_correction_bias", mlp.gate.e_score_correction_bias, (experts,), "float32")
    if mlp.gate.e_score_correction_bias_vl is not None:
        yield from tensor_reasons("gate.e_score_correction_bias_vl", mlp.gate.e_score_correction_bias_vl, (experts,), "float32")
    yield from _topk_reasons(mlp.topk.topk_config, mlp)
    yield from _experts_reasons(mlp.experts, experts, hidden)
    yield from _shared_reasons(mlp.shared_experts, mlp.experts, hidden)


def _topk_reasons(topk: Any, mlp: Any) -> Iterator[str]:
    if (topk.scoring_func, topk.sqrtsoftplus_log1p) != ("sqrtsoftplus", True):
        yield f"topk scores by {topk.scoring_func}, sqrtsoftplus_log1p {topk.sqrtsoftplus_log1p}, not by sqrtsoftplus through log1p"
    if not topk.renormalize:
        yield "topk does not normalise its weights"
    for name in ("use_grouped_topk", "custom_routing_function", "num_shared_topk_slots"):
        if getattr(topk, name):
            yield f"topk.{name} is set"
    if topk.top_k > MAX_TOP_K:
        yield f"topk takes {topk.top_k} experts, more than {MAX_TOP_K}"
    if topk.routed_scaling_factor != mlp.routed_scaling_factor:
        yield f"topk scales by {topk.routed_scaling_factor}, mlp.routed_scaling_factor is {mlp.routed_scaling_factor}"


def _experts_reasons(experts: Any, num_experts: int, hidden: int) -> Iterator[str]:
    method, config = experts.quant_method, experts.moe_runner_config
    if (name := type(method).__name__) != EXPERTS_METHOD:
        yield f"experts run {name}, not {EXPERTS_METHOD}"
        return
    if (layout := getattr(experts, "_dsv4_mxfp4_backend", None)) != EXPERTS_LAYOUT:
        yield f"experts are laid out for {layout}, not {EXPERTS_LAYOUT}"
        return
    if (config.activation, config.is_gated) != ("silu", True):
        yield f"experts have the activation {config.activation}{'' if config.is_gated else ', not gated'}, not a gated silu"
    for name in ("apply_router_weight_on_input", "gemm1_alpha", "gemm1_clamp_limit"):
        if getattr(config, name, None):
            yield f"experts have {name} {getattr(config, name)}"
    rows, channels = experts.w13_weight.shape[1], experts.w13_weight.shape[1] // 2
    yield from tensor_reasons("experts.w13_weight", experts.w13_weight, (num_experts, rows, hidden // 2), "uint8")
    yield from tensor_reasons("experts.w13_weight_scale_inv", experts.w13_weight_scale_inv, (num_experts, rows // 64, hidden // 128, 16, 16), "uint8")
    yield from tensor_reasons("experts.w2_weight", experts.w2_weight, (num_experts, hidden, channels // 2), "uint8")
    down_scale = (num_experts, hidden // 64, channels // 128, 16, 16)
    yield from tensor_reasons("experts.w2_weight_scale_inv", experts.w2_weight_scale_inv, down_scale, "uint8")


def _shared_reasons(shared: Any, experts: Any, hidden: int) -> Iterator[str]:
    channels = experts.w13_weight.shape[1] // 2
    if shared.swiglu_limit != getattr(experts.moe_runner_config, "swiglu_limit", None):
        yield f"shared_experts has swiglu_limit {shared.swiglu_limit}, experts {getattr(experts.moe_runner_config, 'swiglu_limit', None)}"
    for name, rows, columns in (("gate_up_proj", 2 * channels, hidden), ("down_proj", hidden, channels)):
        linear = getattr(shared, name)
        if list(getattr(linear.quant_method, "weight_block_size", None) or []) != SHARED_BLOCK:
            yield f"shared_experts.{name} has no scale a block of {SHARED_BLOCK}"
            continue
        yield from tensor_reasons(f"shared_experts.{name}.weight", linear.weight, (rows, columns), "float8_e4m3fn")
        yield from tensor_reasons(f"shared_experts.{name}.weight_scale_inv", linear.weight_scale_inv, (rows // 32, columns // 32), "float32")
