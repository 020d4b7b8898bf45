"""Whole decode steps of a Qwen3-MoE model: the dense oracle and SGLang's bf16 path with the MoE halves in them.

Both take the choices of experts from the caller where it has them: two logits within rounding make different choices in any other arithmetic,
and what follows is then no matter of precision. Logits are compared by themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference import dense_decode, moe_decode, moe_standard_path, routing, standard_path
from sgl_lowlatency.reference.step import StepInputs, StepOutputs


# choose(logits [rows, num_experts]) -> their choices; of one's own, in the place of the router's rule
Choose = Callable[[torch.Tensor], routing.Choices]


@dataclasses.dataclass(frozen=True)
class MoeStep:
    """outputs: as a dense step's. router_logits [layers, rows, num_experts]: before they are ranked. choices: of every layer."""

    outputs: StepOutputs
    router_logits: torch.Tensor
    choices: list[routing.Choices]


def tensors(layer: LayerTensors) -> moe_decode.MoeTensors:
    return moe_decode.MoeTensors(layer.post_norm, layer.router, layer.gate_up, layer.down, layer.gate_up_scale, layer.down_scale)


def decode_step(
    geometry: Geometry,
    weights: DecodeStepWeights,
    inputs: StepInputs,
    dtype: torch.dtype = torch.float64,
    lm_head: torch.Tensor | None = None,
    captured: Sequence[int] = (),
    choices: list[routing.Choices] | None = None,
    rounds_logits: bool = True,
    choose: Choose | None = None,
) -> MoeStep:
    """The oracle, as dense_decode.decode_step. choices: of every layer, else the router's, on logits rounded to bf16 as SGLang's are or, without
    rounds_logits, as they come. The logits of a step whose choices are given are not rounded. choose: instead of the router's rule."""
    logits, chosen = [], []

    def mlp_half(layer: int, x: torch.Tensor) -> torch.Tensor:
        given = choose if choices is None else choices[layer]
        out = moe_decode.mlp_half(
            tensors(weights.layers[layer]), x, geometry.top_k, geometry.rms_eps, geometry.norm_topk_prob, dtype,
            torch.bfloat16 if rounds_logits and choices is None else None, given,
        )
        logits.append(out.logits)
        chosen.append(out.choices)
        return out.x

    outputs = dense_decode.decode_step(geometry, weights, inputs, dtype, lm_head, captured, mlp_half)
    return MoeStep(outputs, torch.stack(logits), chosen)


def standard_step(
    geometry: Geometry,
    weights: DecodeStepWeights,
    inputs: StepInputs,
    lm_head: torch.Tensor | None = None,
    captured: Sequence[int] = (),
    choices: list[routing.Choices] | None = None,
    choose: Choose | None = None,
    rounds_activations: bool = True,
) -> MoeStep:
    """SGLang's own path, as standard_path.decode_step, which says what rounds_activations are. choices, choose: as decode_step has them."""
    rule = choose or (lambda ranked: routing.choose(ranked, geometry.top_k, geometry.norm_topk_prob))
    logits, chosen = [], []

    def mlp(layer: int, normed: torch.Tensor) -> torch.Tensor:
        of_layer = tensors(weights.layers[layer])
        logits.append(torch.nn.functional.linear(normed, of_layer.router))
        chosen.append(choices[layer] if choices is not None else rule(logits[-1]))
        return moe_standard_path.combine(of_layer, normed, chosen[-1], rounds_activations)

    outputs = standard_path.decode_step(geometry, weights, inputs, lm_head, rounds_activations, captured, mlp)
    return MoeStep(outputs, torch.stack(logits), chosen)
