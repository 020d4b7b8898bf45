"""SGLang's own bf16 MLP half of a Qwen3-MoE layer, rounding where SGLang 0.5.23 rounds (srt/models/qwen3_moe.py, its Triton experts, on CUDA).

The arm that says how much error is normal where SGLang itself does not run. bf16: the norm's output, router logits, each expert's gate and
up, silu(gate) * up, each choice's weighted output, their sum, the carried residual. float32: accumulation, softmax and weights, SwiGLU's inside,
the product with the weight before it is rounded, the sum over choices before it is.
"""

from __future__ import annotations

import torch

from sgl_lowlatency.reference import routing
from sgl_lowlatency.reference.moe_decode import MoeOutputs, MoeTensors
from sgl_lowlatency.reference.standard_path import add_rms_norm


def mlp_half(
    tensors: MoeTensors, x: torch.Tensor, top_k: int, eps: float, renormalizes: bool = True, choices: routing.Choices | None = None
) -> MoeOutputs:
    """The residual stream x [rows, hidden], rounded to bf16 first, through the MLP half; all results bf16. choices: taken instead of the
    router's, as in moe_decode.mlp_half."""
    y, residual = add_rms_norm(x.bfloat16(), None, tensors.post_norm, eps)
    logits = torch.nn.functional.linear(y, tensors.router)
    choices = choices or routing.choose(logits, top_k, renormalizes)
    return MoeOutputs((combine(tensors, y, choices).float() + residual.float()).bfloat16(), logits, choices)


def combine(tensors: MoeTensors, y: torch.Tensor, choices: routing.Choices) -> torch.Tensor:
    """The experts' sum of each row, bf16 [rows, hidden]. y: bf16 [rows, hidden], normed. A choice of -1 adds nothing."""
    experts = torch.zeros(*choices.ids.shape, y.shape[1], dtype=torch.bfloat16, device=y.device)
    for row, (ids, weights) in enumerate(zip(choices.ids.tolist(), choices.weights.float(), strict=True)):
        for k, (number, weight) in enumerate(zip(ids, weights, strict=True)):
            if number < 0:
                continue
            gate, up = torch.nn.functional.linear(y[row], tensors.w13[number]).float().chunk(2)
            activation = (torch.nn.functional.silu(gate) * up).bfloat16()
            experts[row, k] = (torch.nn.functional.linear(activation.float(), tensors.w2[number].float()) * weight).bfloat16()
    return experts.float().sum(1).bfloat16()
