"""FP8 weights: made from bf16 ones as checkpoints have them, and SGLang's linear layers on them.

SGLang multiplies FP8 weights by activations that it rounds to FP8 on the way (W8A8, dynamic scales); decode_step keeps them in bf16
(W8A16). Both are in `linear`: the first is how far SGLang itself is off, the second what bf16 rounding alone would cost.
"""

from __future__ import annotations

import dataclasses

import torch

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.decode_step_tensors import MATRICES, LayerTensors, spread

LARGEST = 448.0  # of e4m3fn
SCALE_SPREAD = 0.5  # of the logarithm of random blocks' scales: a wrong scale then shows
SMALLEST_AMAX = 1e-10  # SGLang's guard against a scale of 0


def quantize_layer(layer: LayerTensors, weight_format: str, generator: torch.Generator) -> LayerTensors:
    """The layer with its matrices in a format of abi.WEIGHT_FORMATS other than bf16.

    Blocks (or rows) are made louder and softer at random first, by e^(0.5 n) of unit mean square, so that no two scales are alike. Experts'
    matrices are cut as one tall matrix; an expert's rows are whole blocks.
    """
    fields = {}
    for name in MATRICES:
        weight = getattr(layer, name).float().flatten(0, -2)
        rows, columns = weight.shape
        blocks = (rows, 1) if weight_format == "fp8_channel" else (rows // abi.SCALE_BLOCK, columns // abi.SCALE_BLOCK)
        noise = torch.randn(blocks, generator=generator, device=weight.device) * SCALE_SPREAD
        codes, scale = quantize(weight * spread((noise - SCALE_SPREAD**2).exp(), weight), blocks)
        experts = getattr(layer, name).shape[:-2]
        fields[name] = codes.view(*experts, -1, columns)
        fields[f"{name}_scale"] = scale.flatten() if weight_format == "fp8_channel" else scale.view(*experts, -1, blocks[1])
    return dataclasses.replace(layer, **fields)


def quantize(weight: torch.Tensor, blocks: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3fn [N, K], fp32 scales [blocks]) of a float matrix, cut into as many equal blocks of rows and of columns as `blocks` says."""
    parts = weight.abs().unflatten(1, (blocks[1], -1)).unflatten(0, (blocks[0], -1))
    scale = (parts.amax((1, 3)).float().clamp(min=SMALLEST_AMAX) / LARGEST).contiguous()
    return (weight / spread(scale, weight)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def round_to_fp8(x: torch.Tensor, group: int) -> torch.Tensor:
    """float32 [rows, K]: x as SGLang's dynamic quantisation leaves it, one scale a row and `group` columns."""
    grouped = x.float().unflatten(-1, (-1, group))
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_AMAX) / LARGEST
    return ((grouped / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def linear(x: torch.Tensor, layer: LayerTensors, name: str, bias: torch.Tensor | None, rounds_activations: bool) -> torch.Tensor:
    """bf16 [rows, N] of bf16 x [rows, K] and an FP8 matrix: float32 sums, rounded once."""
    if rounds_activations:
        x = round_to_fp8(x, x.shape[-1] if layer.format == "fp8_channel" else abi.SCALE_BLOCK)
    y = x.float() @ layer.dequantized(name, torch.float32).T
    return (y if bias is None else y + bias.float()).bfloat16()
