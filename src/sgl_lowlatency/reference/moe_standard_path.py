"""SGLang's own MLP half of a Qwen3-MoE layer, rounding where SGLang 0.5.23 rounds (srt/models/qwen3_moe.py, its Triton experts, on CUDA).

The arm that says how much error is normal where SGLang itself does not run. bf16: the norm's output, router logits, each expert's gate and
up, silu(gate) * up, each choice's weighted output, their sum, the carried residual. float32: accumulation, softmax and weights, SwiGLU's inside,
the product with the weight before it is rounded, the sum over choices before it is. FP8 experts are as their scales mean them, and what they multiply
is rounded to FP8 first, a scale a row and 128 columns (W8A8), or left in bf16.
"""

from __future__ import annotations

import torch

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.reference import quantized, routing
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


def combine(tensors: MoeTensors, y: torch.Tensor, choices: routing.Choices, rounds_activations: bool = True) -> torch.Tensor:
    """The experts' sum of each row, bf16 [rows, hidden]. y: bf16 [rows, hidden], normed. A choice of -1 adds nothing. rounds_activations: of FP8
    experts, as SGLang does."""

    def product(x: torch.Tensor, name: str, number: int) -> torch.Tensor:
        """float32, not rounded. x: bf16 [K]."""
        is_rounded = rounds_activations and getattr(tensors, f"{name}_scale") is not None
        x = quantized.round_to_fp8(x, abi.SCALE_BLOCK) if is_rounded else x.float()
        return torch.nn.functional.linear(x, tensors.weight(name, number, torch.float32))

    experts = torch.zeros(*choices.ids.shape, y.shape[1], dtype=torch.bfloat16, device=y.device)
    for row, (ids, weights) in enumerate(zip(choices.ids.tolist(), choices.weights.float(), strict=True)):
        for k, (number, weight) in enumerate(zip(ids, weights, strict=True)):
            if number < 0:
                continue
            gate, up = product(y[row], "w13", number).bfloat16().float().chunk(2)
            activation = (torch.nn.functional.silu(gate) * up).bfloat16()
            experts[row, k] = (product(activation, "w2", number) * weight).bfloat16()
    return experts.float().sum(1).bfloat16()
