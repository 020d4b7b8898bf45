"""SGLang's own bf16 forward of one decode step, rounding where SGLang 0.5.23 rounds (srt/models/qwen3.py on CUDA).

The arm that says how much error is normal where SGLang itself does not run. bf16: every GEMM output, the norm's output, q
and k after their norm and after rope, the attention weights on their way into the product with V (FlashAttention 3), the
attention output, silu(gate) * up, the carried residual. float32: accumulation, the residual sum on its way into the norm,
the insides of norm, rope, softmax and SwiGLU. With FP8 weights SGLang also rounds the input of every matrix product to FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference import quantized
from sgl_lowlatency.reference.dense_decode import head_norm, rms_norm, rope
from sgl_lowlatency.reference.step import StepInputs, StepOutputs, stack_captured

# (layer, x, residual) -> (x, residual): their sum enters the layer, without a residual x alone
Enters = Callable[[int, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's fused add and norm: (norm of the float32 sum, the sum), both bf16. residual None: x is the sum."""
    total = x.float() if residual is None else x.float() + residual.float()
    return rms_norm(total, weight, eps).bfloat16(), total.bfloat16()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One row's attention as FlashAttention 3 rounds it. q: bf16 [q_heads, head_dim]; k, v: bf16 [tokens, kv_heads, head_dim]."""
    grouped = q.float().view(k.shape[1], -1, q.shape[-1])
    scores = torch.einsum("hgd,lhd->hgl", grouped, k.float()) * scale
    weights = (scores - scores.max(-1, keepdim=True).values).exp()
    out = torch.einsum("hgl,lhd->hgd", weights.bfloat16().float(), v.float()) / weights.sum(-1, keepdim=True)
    return out.reshape(q.shape).bfloat16()


def decode_step(
    geometry: Geometry,
    weights: DecodeStepWeights,
    inputs: StepInputs,
    lm_head: torch.Tensor | None = None,
    rounds_activations: bool = True,
    captured: Sequence[int] = (),
    mlp: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    enters: Enters = lambda layer, x, residual: (x, residual),
) -> StepOutputs:
    """Runs the step; the KV pool is read, never written. All results bf16, logits float32 of a bf16 GEMM.

    rounds_activations: of FP8 weights, as SGLang does; without, what bf16 rounding alone costs on the same weights. captured: layers
    whose inputs become aux: the residual that the layer's norm leaves. mlp(layer, normed): what is added to the residual, bf16, where the layer
    is not dense (moe_step.py). enters(layer, x, residual): what the layer gets of these.
    """
    g = geometry

    def linear(x: torch.Tensor, layer: LayerTensors, name: str, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.format == "bf16":
            return torch.nn.functional.linear(x, getattr(layer, name), bias)
        return quantized.linear(x, layer, name, bias, rounds_activations)

    cos_sin = weights.cos_sin[inputs.positions]
    x, residual = weights.embedding[inputs.input_ids], None
    k_rows, v_rows, entered = [], [], []
    for idx, layer in enumerate(weights.layers):
        normed, residual = add_rms_norm(*enters(idx, x, residual), layer.input_norm, g.rms_eps)
        entered.append(residual)
        y = linear(normed, layer, "qkv", layer.qkv_bias).view(inputs.rows, -1, g.head_dim)
        q, k, v = y.split([g.num_q_heads, g.num_kv_heads, g.num_kv_heads], dim=1)
        q = rope(head_norm(q.float(), layer.q_norm, g.rms_eps).bfloat16().float(), cos_sin).bfloat16()
        k = rope(head_norm(k.float(), layer.k_norm, g.rms_eps).bfloat16().float(), cos_sin).bfloat16()
        k_rows.append(k)
        v_rows.append(v)
        attention = inputs.attend(idx, q, k, v, lambda q, k, v: attend(q, k, v, g.head_dim**-0.5))
        normed, residual = add_rms_norm(linear(attention.flatten(1), layer, "out_proj"), residual, layer.post_norm, g.rms_eps)
        if mlp is not None:
            x = mlp(idx, normed)
            continue
        gate, up = linear(normed, layer, "gate_up").float().chunk(2, dim=-1)
        x = linear((torch.nn.functional.silu(gate) * up).bfloat16(), layer, "down")
    hidden, _ = add_rms_norm(x, residual, weights.final_norm, g.rms_eps)
    logits = None if lm_head is None else (hidden @ lm_head.T).float()
    return StepOutputs(hidden, torch.stack(k_rows), torch.stack(v_rows), logits, stack_captured(entered, captured))
