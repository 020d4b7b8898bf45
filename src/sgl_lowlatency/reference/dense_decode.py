"""The oracle: one decode step of a dense Llama-like model in float64 (or float32), without any rounding of its own.

    x = embedding[input_ids]
    per layer: x += out_proj(attention(rope(qk_norm(qkv(norm(x)) + bias))));  x += down(silu(gate(norm(x))) * up(norm(x)))
    hidden = norm(x)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference.step import StepInputs, StepOutputs, stack_captured


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, in x's dtype."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def head_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """rms_norm of every head; x as it is where the model has no such norm."""
    return x if weight is None else rms_norm(x, weight, eps)


def rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Neox rotation. x: [rows, heads, head_dim]; cos_sin: [rows, head_dim], cos half | sin half."""
    cos, sin = cos_sin.to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One row's attention. q: [q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; returns [q_heads, head_dim]."""
    grouped = q.view(k.shape[1], -1, q.shape[-1])
    scores = torch.einsum("hgd,lhd->hgl", grouped, k) * scale
    return torch.einsum("hgl,lhd->hgd", scores.softmax(-1), v).reshape(q.shape)


def decode_step(
    geometry: Geometry,
    weights: DecodeStepWeights,
    inputs: StepInputs,
    dtype: torch.dtype = torch.float64,
    lm_head: torch.Tensor | None = None,
    captured: Sequence[int] = (),
    mlp_half: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
) -> StepOutputs:
    """Runs the step in `dtype`. The KV pool is read, never written: the new tokens' rows are in the result.

    A request of length 0 attends to nothing and gets a zero attention output. lm_head: [vocab, hidden], adds logits. captured: layers
    whose inputs become aux. mlp_half(layer, x): the stream x [rows, hidden] through the layer's other half, where that is not dense
    (moe_step.py).
    """
    g = geometry
    cos_sin = weights.cos_sin[inputs.positions]
    x = weights.embedding[inputs.input_ids].to(dtype)
    k_rows, v_rows, entered = [], [], []
    for idx, layer in enumerate(weights.layers):
        entered.append(x)
        y = rms_norm(x, layer.input_norm, g.rms_eps) @ layer.dequantized("qkv", dtype).T
        if layer.qkv_bias is not None:
            y = y + layer.qkv_bias.to(dtype)
        q, k, v = y.view(inputs.rows, -1, g.head_dim).split([g.num_q_heads, g.num_kv_heads, g.num_kv_heads], dim=1)
        q = rope(head_norm(q, layer.q_norm, g.rms_eps), cos_sin)
        k = rope(head_norm(k, layer.k_norm, g.rms_eps), cos_sin)
        k_rows.append(k)
        v_rows.append(v)
        attention = inputs.attend(idx, q, k, v, lambda q, k, v: attend(q, k, v, g.head_dim**-0.5))
        x = x + attention.flatten(1) @ layer.dequantized("out_proj", dtype).T
        if mlp_half is not None:
            x = mlp_half(idx, x)
            continue
        gate, up = (rms_norm(x, layer.post_norm, g.rms_eps) @ layer.dequantized("gate_up", dtype).T).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.dequantized("down", dtype).T
    hidden = rms_norm(x, weights.final_norm, g.rms_eps)
    logits = None if lm_head is None else hidden @ lm_head.to(dtype).T
    return StepOutputs(hidden, torch.stack(k_rows), torch.stack(v_rows), logits, stack_captured(entered, captured))
