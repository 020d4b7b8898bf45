"""Refusals of Qwen3-MoE, before and after the weights load: which experts decode_step computes, and how SGLang must keep them.

What is served (read from sglang 0.5.23): every expert on this GPU, of several ranks in bf16 a share of every expert's channels, under the Triton
runner, which a server without --moe-runner-backend gets too:
w13_weight [experts, 2 channels, hidden], rows gate | up, and w2_weight [experts, hidden, channels], in bf16 as UnquantizedFusedMoEMethod makes
them, or in FP8 as Fp8MoEMethod leaves a checkpoint with scales of 128 x 128 blocks (w13_weight_scale_inv, w2_weight_scale_inv). Without such blocks
it gives an expert one scale, which the kernel does not read. Other runners swap, interleave or repack them. The router is a bf16 matrix,
ranked by TopK's softmax, without groups, bias or scale. After load, duck-typed as guard/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_lowlatency.guard.linear import linear_reasons, tensor_reasons
from sgl_lowlatency.guard.quantization import BLOCK, element_bytes, has_blocks
from sgl_lowlatency.kernels.geometry import FP8_EXPERT_ROWS, Geometry

RUNNER_BACKENDS = frozenset({"auto", "triton"})  # of --moe-runner-backend; "auto" becomes the layer's own choice, which is checked after load
# Of the environment: one permutes w13's rows, the others overrule the router.
ENVIRONMENT = {
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": False,
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": False,
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": False,
}
FEW_EXPERTS, FP8_HEAD_DIM = 128, 128  # of FP8 experts (launch/decode_step_moe.cu, emulation alike), and of ranks the former
CAPTURING = ("EAGLE3", "DFLASH", "DSPARK")  # speculative algorithms whose drafts read the inputs of layers

_OFF = (None, False, "", 0)
_SPREAD = "experts would not all be on this GPU in the model's order"
# (server argument, values that are served, why the others are not), as in guard/config.py. Expert parallelism, EPLB, overlapped batches and experts
# that requests get back are features that SGLang refuses for a spec which does not list them.
SERVER_ARGUMENTS: tuple[tuple[str, tuple, str], ...] = (
    ("moe_dp_size", (1,), _SPREAD),
    ("moe_a2a_backend", ("none", None), _SPREAD),
    ("ep_num_redundant_experts", _OFF, _SPREAD),
    ("init_expert_location", ("trivial",), _SPREAD),
    ("elastic_ep_backend", _OFF + ("none",), _SPREAD),
    ("enable_waterfill", _OFF, _SPREAD),
    ("kt_weight_path", _OFF, "experts would be on the CPU"),
    ("enable_paged_experts", _OFF, "experts would be loaded when they are needed"),
    ("expert_distribution_recorder_mode", _OFF, "the kernel does not tell which experts it took"),
)


def moe_config_reasons(cfg: Any, hf_config: Any) -> list[str]:
    """Why the resolved server arguments `cfg` cannot be served with a MoE model, beside what guard/config.py says of every model."""
    reasons = []
    is_parallel, is_fp8 = getattr(cfg, "tp_size", 1) > 1, element_bytes(cfg, hf_config) == 1
    if (is_parallel or is_fp8) and (num_experts := getattr(hf_config, "num_experts", 0)) > FEW_EXPERTS:
        reasons.append(f"config.num_experts {num_experts} is above {FEW_EXPERTS}, the most {'on several GPUs' if is_parallel else 'in FP8'}")
    if is_fp8 and (head_dim := _head_dim(hf_config)) not in (None, FP8_HEAD_DIM):
        reasons.append(f"config.head_dim {head_dim} of a MoE model in FP8 is not {FP8_HEAD_DIM}")
    if is_fp8 and not has_blocks(hf_config):
        why = f"the kernel reads FP8 experts of a checkpoint whose weight_block_size is {BLOCK}, SGLang would give each one scale"
        reasons.append(f"FP8 weights of a MoE model without blocks: {why}")
    elif is_fp8 and is_parallel:
        reasons.append(f"--tp-size {cfg.tp_size} is not served with a MoE model in FP8: that has no kernel yet")
    drafts = getattr(cfg, "speculative_num_draft_tokens", None) or 0
    if is_fp8 and drafts > FP8_EXPERT_ROWS:
        why = f"every step would have more than {FP8_EXPERT_ROWS} rows, which were not compared with SGLang's"
        reasons.append(f"--speculative-num-draft-tokens {drafts} is not served with a MoE model in FP8: {why}")
    if (algorithm := getattr(cfg, "speculative_algorithm", None)) in CAPTURING:
        why = "its drafts read inputs of layers, which has not been tested"
        reasons.append(f"--speculative-algorithm {algorithm} is not served with a MoE model: {why}")
    return reasons


def _head_dim(hf_config: Any) -> int | None:
    try:
        return Geometry.from_hf_config(hf_config).head_dim
    except ValueError:
        return None  # guard/config.py names the fields


def moe_reasons(mlp: Any, geometry: Geometry, expected: str = "bf16", num_ranks: int = 1) -> Iterator[str]:
    """Checks a layer's MLP, SGLang's Qwen3MoeSparseMoeBlock after process_weights_after_loading. geometry: a rank's, of num_ranks. expected: the
    weight format of the model's first matrix."""
    if (name := type(mlp).__name__) != "Qwen3MoeSparseMoeBlock":
        yield f"mlp is a {name}, not a Qwen3MoeSparseMoeBlock"
        return
    yield from linear_reasons("gate", mlp.gate, (geometry.num_experts, geometry.hidden), "bf16")
    yield from _router_reasons(mlp.topk.topk_config, geometry)
    yield from _experts_reasons(mlp.experts, geometry, expected, num_ranks)


def _is_set(value: Any) -> bool:
    """Whether a field that may hold a flag, a number, a function or a tensor asks for something; numbers of 0 do not."""
    return not (value is None or value is False or (isinstance(value, (int, float)) and value == 0))


def _router_reasons(topk: Any, geometry: Geometry) -> Iterator[str]:
    if topk.top_k != geometry.top_k:
        yield f"topk takes {topk.top_k} experts, config.num_experts_per_tok is {geometry.top_k}"
    if bool(topk.renormalize) != geometry.norm_topk_prob:
        yield f"topk has renormalize {topk.renormalize}, config.norm_topk_prob is {geometry.norm_topk_prob}"
    if topk.scoring_func != "softmax":
        yield f"topk scores by {topk.scoring_func}, not by softmax"
    for name in ("use_grouped_topk", "custom_routing_function", "correction_bias", "num_shared_topk_slots"):
        if _is_set(getattr(topk, name)):
            yield f"topk.{name} is set: the kernel chooses by the router's logits alone"
    if topk.routed_scaling_factor not in (None, 1.0):
        yield f"topk scales its weights by {topk.routed_scaling_factor}"
    if topk.output_format is not None and topk.output_format.name != "STANDARD":
        yield f"topk hands out its choices as {topk.output_format.name}, not STANDARD"


def _experts_reasons(experts: Any, geometry: Geometry, expected: str, num_ranks: int) -> Iterator[str]:
    g, method, config = geometry, experts.quant_method, experts.moe_runner_config
    wanted = "UnquantizedFusedMoEMethod" if expected == "bf16" else "Fp8MoEMethod"
    if (experts.moe_ep_size, experts.moe_tp_size) != (1, num_ranks):
        yield f"experts are spread over {experts.moe_ep_size} x {experts.moe_tp_size} GPUs"
    if type(method).__name__ != wanted:
        yield f"experts run {type(method).__name__}, not {wanted}"
        return
    if (backend := method.get_moe_runner_backend(experts)) is None or backend.value != "triton":
        yield f"experts have the runner {getattr(backend, 'value', None)}, not triton"
    if getattr(method, "w13_swiglu_interleaved", False):
        yield "experts.w13_weight has gate and up rows in turn (SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED)"
    if getattr(method, "load_up_proj_weight_first", False):
        yield "experts.w13_weight has its up rows first"
    if getattr(experts, "use_intel_amx_backend", False):
        yield "experts' weights are packed for Intel AMX"
    if (experts if expected == "bf16" else method).with_bias:
        yield "experts have biases"
    if (config.activation, config.is_gated) != ("silu", True):
        yield f"experts have the activation {config.activation}{'' if config.is_gated else ', not gated'}, not a gated silu"
    for name in ("apply_router_weight_on_input", "no_combine", "num_fused_shared_experts", "gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit"):
        if _is_set(getattr(config, name)):
            yield f"experts have {name} {getattr(config, name)}"
    if config.routed_scaling_factor not in (None, 1.0):
        yield f"experts have routed_scaling_factor {config.routed_scaling_factor}"
    shapes = {"w13": (g.num_experts, 2 * g.moe_intermediate, g.hidden), "w2": (g.num_experts, g.hidden, g.moe_intermediate)}
    dtype = "bfloat16" if expected == "bf16" else "float8_e4m3fn"
    for name, shape in shapes.items():
        yield from tensor_reasons(f"experts.{name}_weight", getattr(experts, f"{name}_weight"), shape, dtype)
    if expected != "bf16":
        yield from _fp8_experts_reasons(experts, method, shapes)


def _fp8_experts_reasons(experts: Any, method: Any, shapes: dict[str, tuple[int, int, int]]) -> Iterator[str]:
    if not method.block_quant or list(method.weight_block_size or []) != BLOCK:
        yield f"experts have scales of {list(method.weight_block_size) if method.block_quant else 'an expert each'}, not of blocks of {BLOCK}"
        return
    if method.use_mxfp8 or method.is_fp4_expert:
        yield f"experts hold {'FP4' if method.is_fp4_expert else 'MXFP8'} weights"
    for name, (num_experts, rows, columns) in shapes.items():
        scale = getattr(experts, f"{name}_weight_scale_inv", None)
        yield from tensor_reasons(f"experts.{name}_weight_scale_inv", scale, (num_experts, rows // BLOCK[0], columns // BLOCK[1]), "float32")
        if getattr(scale, "format_ue8m0", False):
            yield f"experts.{name}_weight_scale_inv was rounded to powers of two for DeepGEMM, which has not been tested"
        if getattr(experts, f"{name}_input_scale", None) is not None:
            yield f"experts.{name}_input_scale is a static scale of activations: SGLang would clip them, the kernel does not"
