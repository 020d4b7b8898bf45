"""Oracle of mHC's hyper-connection around a sublayer, in float64: the coefficients that its streams give, and the streams behind the sublayer.

Formulas are those of SGLang 0.5.23 on sm_90; tensors are those of kernels/hyper_connection.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sgl_lowlatency.kernels.hyper_connection import HyperConnection

STREAMS = 4


def coefficients(hyper: HyperConnection, streams: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 24] of streams [rows, 4, hidden]: pre, post and comb, row by row.

    deepseek_v4_mhc._mix_stats_impl and, from the mixes on, _hc_mix_reduce_sinkhorn_kernel (kernels/ops/layernorm/mhc.py).
    """
    flat, eps = streams.double().flatten(1), hyper.mix_eps
    mixes = flat @ hyper.mix.double().T * torch.rsqrt(flat.square().mean(1, keepdim=True) + hyper.mix_rms_eps)
    scale, base = hyper.mix_scale.double(), hyper.mix_base.double()
    pre = torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + eps
    post = 2 * torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8])
    comb = (mixes[:, 8:] * scale[2] + base[8:]).unflatten(1, (STREAMS, STREAMS)).softmax(2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(hyper.sinkhorn_iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return torch.cat((pre, post, comb.flatten(1)), 1)


def streams_behind(mixed: torch.Tensor, y: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 4, hidden] behind an output y [rows, hidden], of coefficients mixed [rows, 24], not rounded.

    deepseek_v4_mhc.post, by _mhc_post_split_h_kernel on sm_90.
    """
    post, comb = mixed[:, 4:8], mixed[:, 8:].unflatten(1, (STREAMS, STREAMS))
    return post[:, :, None] * y.double()[:, None] + torch.einsum("tji,tjh->tih", comb, streams.double())
