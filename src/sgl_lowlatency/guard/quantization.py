"""Which quantised checkpoints are served, from the server arguments and the HF config: FP8 weights that SGLang keeps as e4m3fn with a
float32 scale a block of 128 x 128 or a row. guard/model.py looks at what it loaded.

`--quantization fp8` of a bf16 checkpoint gives a scale a row, as a checkpoint with a scale a matrix does (Fp8LinearMethod,
sglang 0.5.23). A static scale of activations is refused: SGLang clips its activations at it, the kernel rounds none.
"""

from __future__ import annotations

from typing import Any

FP8 = "fp8"
BLOCK = [128, 128]  # rows and columns that share a scale


def element_bytes(cfg: Any, hf_config: Any) -> int:
    """Bytes of a weight of the server's model: 1 for FP8, else 2."""
    config = _checkpoint_config(hf_config)
    return 1 if (config.get("quant_method") if config else getattr(cfg, "quantization", None)) == FP8 else 2


def has_blocks(hf_config: Any) -> bool:
    """Whether the checkpoint's weights are FP8 with a scale a block."""
    return bool(_checkpoint_config(hf_config).get("weight_block_size"))


def quantization_reasons(hf_config: Any) -> list[str]:
    """Why the kernel cannot read the checkpoint's weights as SGLang loads them; [] when it can."""
    config = _checkpoint_config(hf_config)
    if not config:
        return []
    at = "config.quantization_config"
    if (method := config.get("quant_method")) != FP8:
        return [f"{at} has quant_method {method!r}: the kernel reads bf16 weights, or FP8 ones of quant_method 'fp8'"]
    reasons = []
    if (scheme := config.get("activation_scheme")) != "dynamic":
        reasons.append(f"{at} has activation_scheme {scheme!r}, not 'dynamic': SGLang would clip activations, the kernel does not")
    if (block := config.get("weight_block_size")) is not None and list(block) != BLOCK:
        reasons.append(f"{at} has weight_block_size {list(block)}, not {BLOCK} or none")
    for name in ("scale_fmt", "kv_cache_quant_algo", "kv_cache_scheme"):
        if config.get(name):
            reasons.append(f"{at} has {name} {config[name]!r}, which has not been tested")
    return reasons


def isa_reasons(cfg: Any, hf_config: Any, isa: str | None) -> list[str]:
    """Why the weights are not served on this GPU ("sm_100", None without one): SGLang keeps checkpoints' scales as they are on Hopper only."""
    if isa in (None, "sm_90") or element_bytes(cfg, hf_config) == 2:
        return []
    return [f"FP8 weights are served on sm_90 alone: on {isa} SGLang may requantize them for its own kernels"]


def emulation_reasons(cfg: Any, hf_config: Any) -> list[str]:
    """Why host emulation cannot serve the weights: there SGLang itself runs on the CPU."""
    if element_bytes(cfg, hf_config) == 2:
        return []
    return ["FP8 weights in host emulation: SGLang's CPU backend packs them for Intel AMX, or refuses them"]


def _checkpoint_config(hf_config: Any) -> dict[str, Any]:
    config = getattr(hf_config, "quantization_config", None) or {}
    return config if isinstance(config, dict) else config.to_dict()
