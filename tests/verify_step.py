"""Verify steps for tests: the reference, with what every draft token sees spelled out."""

from __future__ import annotations

import torch

from sgl_lowlatency.reference import standard_path
from sgl_lowlatency.reference.dense_decode import head_norm, rope


def causal(prefix: int, draft: int) -> range:
    """The tokens of a request that its draft token number `draft` sees: the prefix, the drafts before it and itself."""
    return range(prefix + draft + 1)


def standard_verify(
    geometry, weights, kv, input_ids, positions, prefix_lens, request_rows, slots, lm_head, sees=causal, mlp=None, enters=lambda layer, x, residual: (x, residual)
):
    """SGLang's bf16 path of a verify step with plain causal attention, KV rows written as SGLang does. Returns (hidden, logits, entered):
    the last is the stream [rows, hidden] that enters each layer.

    kv: KvState, whose req_to_token holds the drafts' slots too. input_ids, positions, slots: [rows]; prefix_lens, request_rows:
    [requests]. sees: as `causal`, another one is a planted bug. mlp, enters: as standard_path.decode_step has them.
    """
    g, drafts = geometry, input_ids.shape[0] // prefix_lens.shape[0]
    cos_sin = weights.cos_sin[positions]
    x, residual, entered = weights.embedding[input_ids], None, []
    for idx, layer in enumerate(weights.layers):
        normed, residual = standard_path.add_rms_norm(*enters(idx, x, residual), layer.input_norm, g.rms_eps)
        entered.append(residual)
        y = torch.nn.functional.linear(normed, layer.qkv, layer.qkv_bias).view(len(input_ids), -1, g.head_dim)
        q, k, v = y.split([g.num_q_heads, g.num_kv_heads, g.num_kv_heads], dim=1)
        q = rope(head_norm(q.float(), layer.q_norm, g.rms_eps).bfloat16().float(), cos_sin).bfloat16()
        k = rope(head_norm(k.float(), layer.k_norm, g.rms_eps).bfloat16().float(), cos_sin).bfloat16()
        kv.k[idx][slots], kv.v[idx][slots] = k, v.contiguous()
        attended = []
        for row in range(len(input_ids)):
            request, draft = divmod(row, drafts)
            seen = kv.req_to_token[request_rows[request], list(sees(int(prefix_lens[request]), draft))].long()
            attended.append(standard_path.attend(q[row], kv.k[idx][seen], kv.v[idx][seen], g.head_dim**-0.5))
        attention = torch.stack(attended)
        normed, residual = standard_path.add_rms_norm(attention.flatten(1) @ layer.out_proj.T, residual, layer.post_norm, g.rms_eps)
        if mlp is not None:
            x = mlp(idx, normed)
            continue
        gate, up = (normed @ layer.gate_up.T).float().chunk(2, dim=-1)
        x = (torch.nn.functional.silu(gate) * up).bfloat16() @ layer.down.T
    hidden, _ = standard_path.add_rms_norm(x, residual, weights.final_norm, g.rms_eps)
    return hidden, (hidden @ lm_head.T).float(), entered
