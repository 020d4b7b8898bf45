"""Refusals before the weights load, from the resolved server arguments and the HF config alone.

SGLang itself checks what the spec states in Requirements and Feature; these are the checks those cannot state. Every
function is pure and returns all of its reasons. A server argument that this SGLang does not have is a reason too:
guessing that an unknown release behaves like the tested one is what a guard is there to prevent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_lowlatency import TESTED_SGLANG
from sgl_lowlatency.guard import moe, parallel
from sgl_lowlatency.guard.quantization import FP8, element_bytes, emulation_reasons, quantization_reasons
from sgl_lowlatency.kernels.geometry import Geometry

# SGLang's Rotary classes for these types only change the cos/sin table, which the kernel reads; the rotation is the
# same (tests/contract/test_rope.py pins that against the wheel).
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
# Keys that make SGLang pick another rotation under one of these types.
ROPE_VARIANT_KEYS = ("mrope_section", "use_fope", "video_rope")


def geometry_reasons(hf_config: Any, element_bytes: int = 2) -> list[str]:
    """Sizes the kernel cannot run, each with the config field named. element_bytes: of a weight, 2 (bf16) or 1 (FP8)."""
    try:
        geometry = Geometry.from_hf_config(hf_config)
    except ValueError as error:
        return str(error).split("; ")
    return geometry.reasons(element_bytes)


def _rope_reasons(hf_config: Any) -> list[str]:
    rope = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    reasons = []
    if rope_type not in ROPE_TYPES:
        reasons.append(f"rope type {rope_type!r} of the model's config is not one of {', '.join(ROPE_TYPES)}")
    reasons += [
        f"{key} in the config's rope parameters selects another rotation" for key in ROPE_VARIANT_KEYS if rope.get(key)
    ]
    if (partial := rope.get("partial_rotary_factor") or getattr(hf_config, "partial_rotary_factor", None) or 1.0) != 1.0:
        reasons.append(f"config.partial_rotary_factor {partial} is not 1: the kernel rotates every channel of a head")
    return reasons


def _attention_reasons(hf_config: Any) -> list[str]:
    reasons = []
    for name in ("attention_bias", "mlp_bias"):
        if getattr(hf_config, name, False):
            reasons.append(f"config.{name} is true: the kernel adds no bias but that of Qwen2's q, k and v")
    layer_types = sorted(set(getattr(hf_config, "layer_types", None) or ()) - {"full_attention"})
    if getattr(hf_config, "use_sliding_window", False) or layer_types:
        what = f"layer_types {', '.join(layer_types)}" if layer_types else "use_sliding_window"
        reasons.append(f"config.{what}: the kernel attends to the whole context in every layer")
    if getattr(hf_config, "dual_chunk_attention_config", None):
        reasons.append("config.dual_chunk_attention_config is set: the kernel has no chunked attention")
    return reasons


def decoder_reasons(hf_config: Any) -> list[str]:
    """Why the model that this HF config describes is not a decoder as kernels compute it, whatever its sizes and weights."""
    reasons = _rope_reasons(hf_config) + _attention_reasons(hf_config)
    if (act := getattr(hf_config, "hidden_act", None)) != "silu":
        reasons.append(f"config.hidden_act {act!r} is not 'silu'")
    return reasons


def model_config_reasons(hf_config: Any, element_bytes: int = 2) -> list[str]:
    """Why the kernel cannot run the model that this HF config describes. element_bytes: of a weight as it is served."""
    return geometry_reasons(hf_config, element_bytes) + decoder_reasons(hf_config) + quantization_reasons(hf_config)


_ABSENT = object()
_OFF = (None, False, "", 0)
_HOOKS = "it hooks layers that the kernel does not run one by one"

# (server argument, values that are served, why the others are not); a reason quotes the argument and its value.
_SERVER_ARGUMENTS: tuple[tuple[str, tuple, str], ...] = (
    ("quantization", (None, FP8), "the kernel reads bf16 and FP8 weights"),
    ("modelopt_quant", _OFF, "the kernel reads bf16 weights"),
    ("quantize_and_serve", _OFF, "the kernel reads bf16 weights"),
    ("rl_quant_profile", _OFF, "the kernel reads bf16 weights"),
    ("model_impl", ("auto", "sglang"), "the kernel replaces SGLang's own model code"),
    ("dp_size", (1,), "servers that share their requests have not been tested"),
    ("is_embedding", _OFF, "an embedding server has no decode steps"),
    ("dllm_algorithm", _OFF, "a diffusion language model has no decode steps"),
    ("prefill_only_disable_kv_cache", _OFF, "there is no KV cache to read"),
    ("enable_unified_memory", _OFF, "req_to_token then holds virtual page ids"),
    ("enable_page_major_kv_layout", _OFF, "the KV rows of a layer are then not one strided array"),
    ("enable_kv_cache_sharding", _OFF, "the KV rows are then spread over GPUs"),
    ("enable_unified_cache_external_linker", _OFF, "KV that arrives beside a step has not been tested"),
    ("enable_pdmux", _OFF, "decode then has a part of the SMs, and the kernel needs one block on each"),
    ("startup_weight_load_mode", ("serial",), "weights would still be loading when the kernel is checked"),
    ("checkpoint_engine_wait_weights_before_ready", _OFF, "SGLang refuses weight updates under a kernel plugin"),
    ("aux_hidden_state_capture", _OFF, "hidden states that requests get back have not been tested"),
    ("uno_lora_path", _OFF, "the kernel applies no LoRA"),
    ("decoupled_spec_role", _OFF + ("null",), "drafts that come from another server have not been tested"),
    ("forward_hooks", _OFF, _HOOKS),
    ("debug_tensor_dump_output_folder", _OFF, _HOOKS),
    ("msprobe_dump_config", _OFF, _HOOKS),
    ("enable_layerwise_nvtx_marker", _OFF, _HOOKS),
    ("kv_canary", _OFF + ("none",), "its patches of the model's forward and the KV pool have not been tested here"),
)


def server_argument_reasons(cfg: Any, arguments: tuple[tuple[str, tuple, str], ...] = _SERVER_ARGUMENTS) -> list[str]:
    """Why arguments have values that are not among those served: (name, those, why not others)."""
    reasons = []
    for name, served, why in arguments:
        value = getattr(cfg, name, _ABSENT)
        if value is _ABSENT:
            reasons.append(f"this SGLang has no server argument {name!r} to check; {TESTED_SGLANG} is the tested release")
        elif value not in served and value not in ([], {}):
            reasons.append(f"--{name.replace('_', '-')} {value!r} is not served: {why}")
    return reasons


def backend_reasons(cfg: Any) -> list[str]:
    """Why the attention backends of prefill and decode cannot serve: SGLang wraps two in one, of which runtime/sglang_state.py keeps no metadata."""
    prefill = cfg.prefill_attention_backend or cfg.attention_backend
    decode = cfg.decode_attention_backend or cfg.attention_backend
    if prefill == decode:
        return []
    return [
        f"prefill and decode attention backends differ ({prefill!r} and {decode!r}): SGLang then gives a step no "
        "attention metadata; give both the same --attention-backend"
    ]


def device_reasons(cfg: Any, emulate: bool) -> list[str]:
    """Why the server's --device is not where the kernels run."""
    wanted = "cpu" if emulate else "cuda"
    if cfg.device == wanted:
        return []
    mode = "1 runs the kernels on the CPU" if emulate else "0, the default, runs the kernels on a GPU"
    return [f"--device {cfg.device!r} is not {wanted!r}: SGL_LOWLATENCY_EMULATE={mode}"]


def _moe_reasons(cfg: Any, hf_config: Any) -> list[str]:
    if not getattr(hf_config, "num_experts", None):
        return []
    return server_argument_reasons(cfg, moe.SERVER_ARGUMENTS) + moe.moe_config_reasons(cfg, hf_config)


def _parallel_reasons(cfg: Any, hf_config: Any, emulate: bool) -> list[str]:
    if cfg.tp_size == 1:
        return []
    reasons = parallel.parallel_config_reasons(cfg, hf_config, element_bytes(cfg, hf_config), emulate=emulate)
    return server_argument_reasons(cfg, parallel.SERVER_ARGUMENTS) + reasons


def config_disable_reasons(cfg: Any, hf_config: Any, *, emulate: bool) -> list[str]:
    """Every reason this configuration cannot be served; [] when it can.

    cfg: SGLang's resolved server arguments. hf_config: the served model's HF config. emulate: host emulation is on.
    """
    checks: tuple[Callable[[], list[str]], ...] = (
        lambda: model_config_reasons(hf_config, element_bytes(cfg, hf_config)),
        lambda: server_argument_reasons(cfg),
        lambda: backend_reasons(cfg),
        lambda: device_reasons(cfg, emulate),
        lambda: emulation_reasons(cfg, hf_config) if emulate else [],
        lambda: _moe_reasons(cfg, hf_config),
        lambda: _parallel_reasons(cfg, hf_config, emulate),
    )
    return [reason for check in checks for reason in check()]
