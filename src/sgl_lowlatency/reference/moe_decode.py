"""The oracle of the MLP half of a Qwen3-MoE layer, in float64 (or float32), without any rounding of its own but the router's.

    y = rms_norm(x);  ids, weights = top_k of softmax(router(y))
    x + sum over k of weights[k] * down[ids[k]](silu(gate[ids[k]](y)) * up[ids[k]](y)),  in the order of k
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from sgl_lowlatency.kernels.decode_step_tensors import spread
from sgl_lowlatency.reference import routing
from sgl_lowlatency.reference.dense_decode import rms_norm


@dataclasses.dataclass(frozen=True)
class MoeTensors:
    """A layer's tensors as SGLang loads them: post_norm [hidden], router [num_experts, hidden], w13 [num_experts, 2 intermediate, hidden], rows
    gate | up, w2 [num_experts, hidden, intermediate]. Of FP8 experts, the float32 scales of blocks of 128 x 128: w13_scale, w2_scale
    [num_experts, rows / 128, columns / 128]."""

    post_norm: torch.Tensor
    router: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None

    def weight(self, name: str, number: int, dtype: torch.dtype) -> torch.Tensor:
        """One expert's "w13" or "w2" as it is meant, in `dtype`."""
        matrix, scale = getattr(self, name)[number].to(dtype), getattr(self, f"{name}_scale")
        return matrix if scale is None else matrix * spread(scale[number].to(dtype), matrix)

    @property
    def num_experts(self) -> int:
        return self.router.shape[0]


@dataclasses.dataclass(frozen=True)
class MoeOutputs:
    """x [rows, hidden]: the residual stream behind the layer. logits [rows, num_experts]: as they were ranked. choices: the router's."""

    x: torch.Tensor
    logits: torch.Tensor
    choices: routing.Choices


def random_tensors(hidden: int, intermediate: int, num_experts: int, seed: int, device: torch.device | str = "cpu") -> MoeTensors:
    """bf16, of std 1/sqrt(K); the router's rows so that logits have a variance of about 4."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).mul_(std).add_(mean).bfloat16()

    return MoeTensors(
        post_norm=normal(hidden, std=0.2, mean=1.0),
        router=normal(num_experts, hidden, std=2 * hidden**-0.5),
        w13=normal(num_experts, 2 * intermediate, hidden, std=hidden**-0.5),
        w2=normal(num_experts, hidden, intermediate, std=intermediate**-0.5),
    )


def expert(tensors: MoeTensors, number: int, y: torch.Tensor) -> torch.Tensor:
    """What one expert makes of y [.., hidden], in y's dtype."""
    gate, up = (y @ tensors.weight("w13", number, y.dtype).T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ tensors.weight("w2", number, y.dtype).T


def combine(tensors: MoeTensors, y: torch.Tensor, choices: routing.Choices) -> torch.Tensor:
    """The experts' sum of each row, [rows, hidden] in y's dtype. y: [rows, hidden], normed. A choice of -1 adds nothing."""
    out = torch.zeros_like(y)
    for row, (ids, weights) in enumerate(zip(choices.ids.tolist(), choices.weights.to(y.dtype), strict=True)):
        for number, weight in zip(ids, weights, strict=True):
            if number >= 0:
                out[row] += weight * expert(tensors, number, y[row])
    return out


def mlp_half(
    tensors: MoeTensors,
    x: torch.Tensor,
    top_k: int,
    eps: float,
    renormalizes: bool = True,
    dtype: torch.dtype = torch.float64,
    logits_dtype: torch.dtype | None = torch.bfloat16,
    choices: routing.Choices | Callable[[torch.Tensor], routing.Choices] | None = None,
) -> MoeOutputs:
    """The residual stream x [rows, hidden] through the MLP half, in `dtype`.

    logits_dtype: what logits are rounded to before they are ranked and weighed: SGLang's router is a bf16 matrix product. None: nothing.
    choices: taken instead of the router's, or the rule that makes them of the logits. A row whose last chosen logit and the next are within
    rounding may choose differently in any other arithmetic: give both sides the choices of one, and compare logits by themselves.
    """
    x = x.to(dtype)
    y = rms_norm(x, tensors.post_norm, eps)
    logits = y @ tensors.router.to(dtype).T
    if logits_dtype is not None:
        logits = logits.to(logits_dtype)
    if not isinstance(choices, routing.Choices):
        choices = (choices or (lambda ranked: routing.choose(ranked, top_k, renormalizes)))(logits)
    return MoeOutputs(x + combine(tensors, y, choices), logits, choices)
