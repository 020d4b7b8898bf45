"""Oracle of attention_out: a DeepSeek-V4.1 layer from attention's heads to the normed input of its MoE, in float64.

Formulas and roundings are those of SGLang 0.5.23 on sm_90, each named where it is; tensors are those of kernels/attention_out.py. What the standard
path adds beyond bf16, FP8 activations of wo_b in groups of 32, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sgl_lowlatency.reference.fused_moe import shared_matrix as block_scaled_matrix
from sgl_lowlatency.reference.hyper_connection import coefficients, streams_behind

if TYPE_CHECKING:
    from sgl_lowlatency.kernels.attention_out import AttentionOutSizes, AttentionOutWeights


@dataclasses.dataclass(frozen=True)
class Outputs:
    """coefficients [rows, 24]: pre, post, comb; streams [rows, 4, hidden]; out [rows, hidden]."""

    coefficients: torch.Tensor
    streams: torch.Tensor
    out: torch.Tensor


def rotate_back(x: torch.Tensor, freqs_cis: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64, of heads [rows, heads, head_dim]: the last values of a head as complex numbers, times the conjugate of their row's frequencies.

    MQALayer.forward calls fused_rope_inplace(o[..., -rope:], inverse=True); the formula is apply_rotary_emb_triton_kernel's (dsv4/rope.py).
    """
    rope, wide = 2 * freqs_cis.shape[1], x.double()
    pairs = torch.view_as_complex(wide[..., -rope:].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * freqs_cis[positions].to(torch.complex128).conj()[:, None]).flatten(-2)
    return torch.cat((wide[..., :-rope], turned), -1)


def post_combine_norm(
    weights: AttentionOutWeights, y: torch.Tensor, streams: torch.Tensor, mixed: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(streams [rows, 4, hidden], out [rows, hidden]) float64 behind an output y [rows, hidden]. rounded: what a stored value becomes.

    streams_behind's, then deepseek_v4_mhc._combine with the same pre, by _hc_combine_norm: each rounds what it stores, and the second one its
    combined row, before the norm reads it.
    """
    next_streams = rounded(streams_behind(mixed, y, streams))
    combined = rounded(torch.einsum("tk,tkh->th", mixed[:, :4], next_streams))
    inverse_rms = torch.rsqrt(combined.square().mean(1, keepdim=True) + weights.norm_eps)
    return next_streams, rounded(combined * inverse_rms * weights.norm.double())


def outputs(
    sizes: AttentionOutSizes, weights: AttentionOutWeights, x: torch.Tensor, positions: torch.Tensor, streams: torch.Tensor
) -> tuple[Outputs, Outputs]:
    """(the oracle float64, SGLang's standard path with its streams and out in bf16) of heads x [rows, heads, head_dim].

    The standard path rounds the rotated heads, the latent rows (torch.einsum or wo_a_bf16_gemv), the output, the streams, the combined row and out
    to bf16. Its coefficients are fp32, as ours: the oracle's.
    """
    mixed = coefficients(weights.hyper, streams)
    wo_a = weights.wo_a.double().unflatten(0, (sizes.groups, sizes.lora))
    wo_b = block_scaled_matrix(weights.wo_b, weights.wo_b_scale)
    found = []
    for rounded in (lambda t: t, lambda t: t.bfloat16().double()):
        heads = rounded(rotate_back(x, weights.freqs_cis, positions)).reshape(x.shape[0], sizes.groups, -1)
        latent = rounded(torch.einsum("tgd,grd->tgr", heads, wo_a)).flatten(1)
        found.append(post_combine_norm(weights, rounded(latent @ wo_b.T), streams, mixed, rounded))
    (exact, out), (standard, standard_out) = found
    return Outputs(mixed, exact, out), Outputs(mixed, standard.bfloat16(), standard_out.bfloat16())
