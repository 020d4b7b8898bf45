"""Refusals of AMD's k1 and k2, before and after the weights load: which servers and models they compute.

What is served (read from sglang 0.5.23): bf16 weights in SGLang's own layout, one node, 1, 2, 4 or 8 ranks by tensor parallelism. A rank has its
share of query heads and of the MLP's channels, or of every expert's, and its share of the KV heads, or one that several ranks have alike.

- SGLANG_USE_AITER=1 shuffles the experts' weights where --moe-runner-backend is "auto" or "aiter"; other matrices stay as they are. With
  SGLANG_AITER_KV_CACHE_LAYOUT=vectorized_5d the pool is no array of tokens: the spec pins "nhd".
- Verify steps are chains, and k1 and k2 hand over no inputs of layers: no NGRAM, whose drafts aiter and triton verify as a tree, and no EAGLE3,
  DFLASH or DSPARK. A step's rows are one of WIDTHS, whole requests. On several ranks no verify step has run.
- The LM head, the embedding and the last norm are SGLang's.

Pure and duck-typed, as guard/config.py and guard/model.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_lowlatency import TESTED_SGLANG
from sgl_lowlatency.guard import moe, parallel, speculation
from sgl_lowlatency.guard.config import backend_reasons, decoder_reasons, device_reasons, server_argument_reasons
from sgl_lowlatency.guard.device import code_object_reasons, extension_reasons, installation_reasons
from sgl_lowlatency.guard.family import Family
from sgl_lowlatency.guard.model import hook_reasons, layers_reasons
from sgl_lowlatency.kernels import monokernel_limits
from sgl_lowlatency.kernels.geometry import Geometry

WIDTHS = (1, 2, 4, 6, 8, 12, 16)  # rows of a step
SPECULATION = ("STANDALONE", "EAGLE")


def rank_geometry(hf_config: Any, tp_size: int) -> tuple[Geometry | None, list[str]]:
    """(a rank's share, []), or (None, why the model cannot be cut into tp_size shares)."""
    try:
        whole = Geometry.from_hf_config(hf_config)
    except ValueError as error:
        return None, str(error).split("; ")
    channels = "moe_intermediate_size" if whole.is_moe else "intermediate_size"
    reasons = [
        f"config.{name} {value} cannot be shared evenly by --tp-size {tp_size}"
        for name, value in (("num_attention_heads", whole.num_q_heads), (channels, whole.mlp_channels))
        if value % tp_size
    ]
    if max(whole.num_kv_heads, tp_size) % min(whole.num_kv_heads, tp_size):
        reasons.append(f"config.num_key_value_heads {whole.num_kv_heads} and --tp-size {tp_size}: neither is a multiple of the other")
    if reasons:
        return None, reasons
    share = {"moe_intermediate" if whole.is_moe else "intermediate": whole.mlp_channels // tp_size}
    share |= {"num_q_heads": whole.num_q_heads // tp_size, "num_kv_heads": max(1, whole.num_kv_heads // tp_size)}
    return dataclasses.replace(whole, **share), []


def _geometry_reasons(hf_config: Any, tp_size: int) -> list[str]:
    geometry, reasons = rank_geometry(hf_config, tp_size)
    return reasons if geometry is None else monokernel_limits.reasons(geometry, tp_size)


def _weight_reasons(cfg: Any, hf_config: Any) -> list[str]:
    config = getattr(hf_config, "quantization_config", None)
    reasons = []
    if config:
        method = config.get("quant_method") if isinstance(config, dict) else config.to_dict().get("quant_method")
        reasons.append(f"config.quantization_config has quant_method {method!r}: the kernels read bf16 weights")
    elif getattr(cfg, "quantization", None):  # of a bf16 checkpoint; with a config of its own the reason is there
        reasons.append(f"--quantization {cfg.quantization} is not served: the kernels read bf16 weights")
    return reasons


def speculation_reasons(cfg: Any) -> list[str]:
    """Why the speculative decoding that the resolved server arguments ask for cannot be served; [] when it can, and without any."""
    absent = [name for name in speculation.READ if not hasattr(cfg, name)]
    if absent:
        return [f"this SGLang has no server argument {absent[0]!r} to check; {TESTED_SGLANG} is the tested release"]
    algorithm = cfg.speculative_algorithm
    if algorithm is None:
        return []
    if cfg.tp_size > 1:
        return [f"--speculative-algorithm {algorithm!r} is not served: on several GPUs it has not been tested"]
    if algorithm not in SPECULATION:
        why = "its drafts are verified as a tree" if algorithm == "NGRAM" else "its drafts read inputs of layers, which the kernels do not hand over"
        return [f"--speculative-algorithm {algorithm} is not served: {why}; served are {', '.join(SPECULATION)}"]
    reasons = []
    if cfg.speculative_eagle_topk not in (None, 1):
        reasons.append(f"--speculative-eagle-topk {cfg.speculative_eagle_topk} is not 1: drafts would form a tree, and the kernels verify a chain")
    if cfg.speculative_adaptive:
        reasons.append("--speculative-adaptive is not served: the number of draft tokens would change while the server runs")
    if cfg.enable_multi_layer_eagle:
        reasons.append("--enable-multi-layer-eagle is not served: its verify steps have not been tested")
    tokens = cfg.speculative_num_draft_tokens
    if not tokens or tokens < 2 or not [width for width in WIDTHS if width % tokens == 0]:
        widths = ", ".join(map(str, WIDTHS))
        reasons.append(f"--speculative-num-draft-tokens {tokens} is not served: a step has {widths} rows, and none of these is whole requests of it")
    return reasons


def _moe_config_reasons(cfg: Any, hf_config: Any, use_aiter: bool) -> list[str]:
    if not getattr(hf_config, "num_experts", None):
        return []
    reasons = server_argument_reasons(cfg, moe.SERVER_ARGUMENTS)
    if use_aiter and cfg.moe_runner_backend != "triton":
        backend = cfg.moe_runner_backend
        reasons.append(
            f"--moe-runner-backend {backend!r} with SGLANG_USE_AITER=1 shuffles the experts' weights: give --moe-runner-backend triton"
        )
    return reasons


def _server_reasons(cfg: Any, attention_backends: Sequence[str], emulate: bool) -> list[str]:
    reasons = server_argument_reasons(cfg) + (server_argument_reasons(cfg, parallel.SPLITS) if cfg.tp_size > 1 else [])
    if emulate:
        reasons += device_reasons(cfg, emulate)
    elif cfg.device != "cuda":
        reasons.append(f"--device {cfg.device!r} is not 'cuda', SGLang's word for a ROCm GPU too")
    if getattr(cfg, "enable_nvidia_megakernel", False):
        reasons.append("--enable-nvidia-megakernel is also set; use one of the two")
    # That of decode is one of the spec's requirements.
    prefill, decode = (own or cfg.attention_backend for own in (cfg.prefill_attention_backend, cfg.decode_attention_backend))
    if prefill not in attention_backends:
        backends = ", ".join(sorted(attention_backends))
        reasons.append(f"--prefill-attention-backend {prefill!r} is not one of {backends}: it may keep K and V in another layout")
    elif decode in attention_backends:
        reasons += backend_reasons(cfg)
    return reasons


def config_disable_reasons(
    cfg: Any, hf_config: Any, *, isa: str, built: Mapping[str, Sequence[str]], use_aiter: bool, attention_backends: Sequence[str], emulate: bool = False
) -> list[str]:
    """Every reason this configuration cannot be served; [] when it can.

    cfg: SGLang's resolved server arguments. isa: "gfx950". built: code_objects.installed(). use_aiter: SGLANG_USE_AITER. attention_backends: those
    of the spec. emulate: host emulation is on.
    """
    reasons = _geometry_reasons(hf_config, cfg.tp_size) + decoder_reasons(hf_config) + _weight_reasons(cfg, hf_config)
    reasons += _server_reasons(cfg, attention_backends, emulate) + _moe_config_reasons(cfg, hf_config, use_aiter) + speculation_reasons(cfg)
    return reasons + launch_reasons(isa, built, emulate)


def launch_reasons(isa: str, built: Mapping[str, Sequence[str]], emulate: bool = False) -> list[str]:
    """Why no step could be launched on this GPU, or emulated, whatever the model."""
    return installation_reasons(isa, emulate=True) if emulate else extension_reasons() + code_object_reasons(isa, built)


def model_disable_reasons(model: Any, hf_config: Any, family: Family, tp_size: int) -> list[str]:
    """Every reason a rank's loaded model is not its share of one of `family`; [] when it is.

    model: SGLang's after process_weights_after_loading.
    """
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    if name != family.model_class:
        return [f"the loaded model is {name}, not {family.model_class}"]
    if reasons := _geometry_reasons(hf_config, tp_size):
        return reasons
    geometry, _ = rank_geometry(hf_config, tp_size)
    layers = list(model.model.layers)
    reasons = layers_reasons(layers, geometry, family, "bf16", tp_size) + hook_reasons(model.model)
    if len(layers) != geometry.num_layers:
        reasons.insert(0, f"{len(layers)} layers are loaded, config.num_hidden_layers is {geometry.num_layers}")
    return reasons
