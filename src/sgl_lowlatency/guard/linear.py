"""Refusals after load, of one linear layer: the weight must lie in memory as the kernel reads it, bf16 or FP8 with its scales.

Duck-typed, as guard/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_lowlatency.guard.quantization import BLOCK

ALIGNMENT_BYTES = 16  # of every tensor the kernel reads with asynchronous copies
_METHODS = {"bf16": "UnquantizedLinearMethod", "fp8_block": "Fp8LinearMethod", "fp8_channel": "Fp8LinearMethod"}


def weight_format(linear: Any) -> str:
    """The format of SGLang's linear layer, a name in kernels.abi.WEIGHT_FORMATS; bf16 for a method that the kernel does not know."""
    method = getattr(linear, "quant_method", None)
    if type(method).__name__ != "Fp8LinearMethod":
        return "bf16"
    return "fp8_block" if method.block_quant else "fp8_channel"


def tensor_reasons(name: str, tensor: Any, shape: tuple[int, ...], dtype: str = "bfloat16", *, min_rows: bool = False) -> Iterator[str]:
    """Checks one tensor. shape: expected sizes; with min_rows the first is a lower bound (padded vocabularies)."""
    if tensor is None:
        yield f"{name} is missing"
        return
    got = tuple(tensor.shape)
    if len(got) != len(shape) or got[1:] != shape[1:] or (got[0] < shape[0] if min_rows else got[0] != shape[0]):
        yield f"{name} has shape {list(got)}, not {list(shape)}"
    if str(tensor.dtype) != f"torch.{dtype}":
        yield f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not {dtype}"
    if not tensor.is_contiguous():
        yield f"{name} is not contiguous"
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        yield f"{name} is not aligned to {ALIGNMENT_BYTES} bytes"


def linear_reasons(name: str, linear: Any, shape: tuple[int, int], expected: str, *, has_bias: bool = False) -> Iterator[str]:
    """Checks a linear layer of `shape` [N, K]. expected: the weight format of the model's first one."""
    method = getattr(linear, "quant_method", None)
    if type(method).__name__ != _METHODS[expected]:
        yield f"{name} runs {type(method).__name__}, not {_METHODS[expected]}"
    elif weight_format(linear) != expected:
        yield f"{name} has scales of format {weight_format(linear)}, not {expected}"
    elif expected != "bf16":
        yield from _fp8_method_reasons(name, linear, method)
    weight = getattr(linear, "weight", None)
    if expected == "bf16":
        yield from tensor_reasons(f"{name}.weight", weight, shape)
    elif expected == "fp8_block":
        scale, blocks = getattr(linear, "weight_scale_inv", None), (shape[0] // BLOCK[0], shape[1] // BLOCK[1])
        yield from tensor_reasons(f"{name}.weight", weight, shape, "float8_e4m3fn")
        yield from tensor_reasons(f"{name}.weight_scale_inv", scale, blocks, "float32")
        if getattr(scale, "format_ue8m0", False):
            yield f"{name}.weight_scale_inv was rounded to powers of two for DeepGEMM, which has not been tested"
    else:
        yield from _channel_reasons(name, weight, getattr(linear, "weight_scale", None), shape)
    bias = getattr(linear, "bias", None)
    if has_bias:
        yield from tensor_reasons(f"{name}.bias", bias, shape[:1])
    elif bias is not None:
        yield f"{name} has a bias"
    if getattr(linear, "use_intel_amx_backend", False):
        yield f"{name}.weight is packed for Intel AMX"


def _fp8_method_reasons(name: str, linear: Any, method: Any) -> Iterator[str]:
    if method.use_marlin:
        yield f"{name} runs FP8 Marlin kernels, whose weights are repacked"
    if method.use_mxfp8 or method.block_fp8_as_mxfp8:
        yield f"{name} holds MXFP8 weights"
    if method.block_quant and list(method.weight_block_size) != BLOCK:
        yield f"{name} has a scale a block of {list(method.weight_block_size)}, not {BLOCK}"
    if getattr(linear, "input_scale", None) is not None:
        yield f"{name}.input_scale is a static scale of activations: SGLang would clip them, the kernel does not"


def _channel_reasons(name: str, weight: Any, scale: Any, shape: tuple[int, int]) -> Iterator[str]:
    """SGLang holds the weight as a transposed view [K, N], and the scales as [N, 1] or [1, N]."""
    if weight is None or scale is None:
        yield f"{name}.{'weight' if weight is None else 'weight_scale'} is missing"
        return
    yield from tensor_reasons(f"{name}.weight, transposed,", weight.t(), shape, "float8_e4m3fn")
    if tuple(scale.shape) not in ((shape[0], 1), (1, shape[0])):
        yield f"{name}.weight_scale has shape {list(scale.shape)}, not one scale for each of {shape[0]} rows"
    else:
        yield from tensor_reasons(f"{name}.weight_scale", scale, tuple(scale.shape), "float32")
