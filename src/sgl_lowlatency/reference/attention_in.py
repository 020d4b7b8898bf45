"""Oracle of attention_in: a DeepSeek-V4.1 layer from its residual streams to rotated queries and the new KV row, in float64.

Formulas and roundings are those of SGLang 0.5.23 on sm_90, each named where it is; tensors are those of kernels/attention_in.py. What the standard
path adds beyond bf16, FP8 activations of both linears in groups of 32, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sgl_lowlatency.reference.fused_moe import shared_matrix as block_scaled_matrix

if TYPE_CHECKING:
    from sgl_lowlatency.kernels.attention_in import AttentionInSizes, AttentionInWeights, KvPages

HEAD_DIM, ROPE, GROUP = 512, 64, 64
DATA_BYTES, SCALE_BYTES = 576, 8
LARGEST, LEAST = 448.0, 1e-4  # of e4m3fn; of a group's largest value, for its scale


@dataclasses.dataclass(frozen=True)
class Outputs:
    """x [rows, hidden]; q_lora [rows, lora]; q [rows, heads, 512]; kv [rows, 512], as it is before the cache stores it, or as it is read there."""

    x: torch.Tensor
    q_lora: torch.Tensor
    q: torch.Tensor
    kv: torch.Tensor


def norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float64: RMSNorm of the last dimension (layernorm.py, forward_native without cast_x_before_out_mul)."""
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.double()


def rotate(x: torch.Tensor, freqs_cis: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64, of [rows, ..., 512]: the last 64 as complex numbers, times their row's frequencies (fused_q_norm_rope of dsv4/norm_rope.py, whose
    kernel is main_norm_rope.cuh)."""
    pairs = torch.view_as_complex(x[..., -ROPE:].double().unflatten(-1, (-1, 2)).contiguous())
    factors = freqs_cis[positions].to(torch.complex128).reshape(x.shape[0], *[1] * (x.dim() - 2), ROPE // 2)
    return torch.cat((x[..., :-ROPE].double(), torch.view_as_real(pairs * factors).flatten(-2)), -1)


def combine(streams: torch.Tensor, pre: torch.Tensor | None) -> torch.Tensor:
    """float64 [rows, hidden] (deepseek_v4_mhc._combine: of the first layer, which has no pre, stream 0)."""
    return streams[:, 0].double() if pre is None else torch.einsum("tk,tkh->th", pre.double(), streams.double())


def stored(kv: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 512]: what the V4 layout keeps of kv, the first 448 in e4m3 with a power of two for each 64, the others in bf16
    (fused_k_norm_rope_flashmla of main_norm_rope.cuh)."""
    nope = kv[:, :-ROPE].double().unflatten(1, (-1, GROUP))
    scale = torch.exp2(torch.ceil(torch.log2(nope.abs().amax(2, keepdim=True).clamp(min=LEAST) / LARGEST)))
    codes = (nope / scale).to(torch.float8_e4m3fn).double() * scale
    return torch.cat((codes.flatten(1), kv[:, -ROPE:].bfloat16().double()), 1)


def read_slots(cache: KvPages, slots: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 512] of slots: the inverse of the layout (kv_layout.py, KVLayout.V4)."""
    pages = cache.pages[slots // cache.page_size]
    found = []
    for page, slot in zip(pages, (slots % cache.page_size).tolist(), strict=True):
        data, at = page[slot * DATA_BYTES :][:DATA_BYTES].clone(), cache.page_size * DATA_BYTES + slot * SCALE_BYTES
        scale = torch.exp2(page[at : at + (HEAD_DIM - ROPE) // GROUP].double() - 127)
        nope = data[: HEAD_DIM - ROPE].view(torch.float8_e4m3fn).double() * scale.repeat_interleave(GROUP)
        found.append(torch.cat((nope, data[HEAD_DIM - ROPE :].view(torch.bfloat16).double())))
    return torch.stack(found)


def outputs(
    sizes: AttentionInSizes, weights: AttentionInWeights, streams: torch.Tensor, pre: torch.Tensor | None, positions: torch.Tensor
) -> tuple[Outputs, Outputs]:
    """(the oracle, SGLang's standard path), float64; the standard path's kv as the cache keeps it, the oracle's as it should be.

    The standard path rounds the combined row (hc_combine_norm), x, both linears' outputs, q_lora and rotated queries to bf16. Keys are rounded once
    by the linear, and then normed and rotated in fp32 until they are stored.
    """
    wqkv_a, wq_b = block_scaled_matrix(weights.wqkv_a, weights.wqkv_a_scale), block_scaled_matrix(weights.wq_b, weights.wq_b_scale)
    roundings: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (lambda t: t, lambda t: t.bfloat16().double())
    found = []
    for rounded in roundings:
        x = rounded(norm(rounded(combine(streams, pre)), weights.norm, weights.norm_eps))
        latent, kv = rounded(x @ wqkv_a.T).split((sizes.lora, HEAD_DIM), 1)
        q_lora = rounded(norm(latent, weights.q_norm, weights.q_norm_eps))
        heads = rounded(q_lora @ wq_b.T).unflatten(1, (sizes.heads, HEAD_DIM))
        q = rounded(rotate(heads, weights.freqs_cis, positions))
        found.append(Outputs(x, q_lora, q, rotate(norm(kv, weights.kv_norm, weights.kv_norm_eps), weights.freqs_cis, positions)))
    oracle, standard = found
    return oracle, dataclasses.replace(standard, kv=stored(standard.kv))
