"""Tiny Qwen3-MoE models, their steps, and the checks of `decode_step` on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from decode_step_cases import Runner, first_rows, join

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, RoutingRecord
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference import moe_step, routing
from sgl_lowlatency.reference.gate import GateReport, compare, figure
from sgl_lowlatency.reference.step import StepInputs, StepOutputs


def _tiny(num_layers, hidden, num_q_heads, num_kv_heads, head_dim, num_experts, top_k, moe_intermediate, norm_topk_prob=True) -> Geometry:
    return Geometry(
        num_layers, hidden, num_q_heads, num_kv_heads, head_dim, 64, 512, 8192, 1e-6, False,
        num_experts=num_experts, top_k=top_k, moe_intermediate=moe_intermediate, norm_topk_prob=norm_topk_prob,
    )


TINY_MOE = {
    "few": _tiny(2, 256, 4, 2, 64, 16, 2, 64),  # one router tile; an expert is a chunk of K
    "many": _tiny(2, 192, 4, 1, 128, 128, 8, 64),  # more experts than pairs at few rows
    "wide": _tiny(2, 640, 4, 2, 64, 32, 4, 576),  # K of two stages in gate_up and in down, the last of 64 and 128 columns
    "raw": _tiny(3, 128, 2, 1, 64, 48, 3, 128, norm_topk_prob=False),
    "most": _tiny(2, 128, 2, 2, 64, 384, 8, 64),  # every word of the bitmaps
}


# K a multiple of 128, as FP8 weights need it, of one chunk, one stage, and beyond and off stage edges; heads of 128, as the kernel's instances.
TINY_MOE_FP8 = {
    "few": _tiny(2, 256, 4, 2, 128, 16, 2, 128),
    "many": _tiny(2, 384, 4, 1, 128, 128, 8, 128),
    "wide": _tiny(2, 1152, 2, 1, 128, 16, 2, 1152),
    "tall": _tiny(2, 256, 2, 1, 128, 32, 4, 1152),  # of the experts of two stages, more than a warp keeps the scales of at a time
}


def deep_moe(num_layers: int) -> Geometry:
    """As many layers as it takes for the generations to go round, as small as they come."""
    return _tiny(num_layers, 128, 2, 1, 64, 16, 2, 64)


def biased(geometry: Geometry, weights: DecodeStepWeights, experts_of_token) -> DecodeStepWeights:
    """The model with experts that are chosen by the token alone: channel i of the embedding is large for tokens i mod hidden, every router reads
    these channels only, and the branches add so little that their sum over all channels stays far below. experts_of_token(token): the top_k
    experts, best first."""
    hidden = geometry.hidden
    embedding = weights.embedding * 0.05
    for token in range(geometry.vocab):
        embedding[token, token % hidden] = 40.0
    router = torch.zeros(geometry.num_experts, hidden, dtype=torch.bfloat16, device=embedding.device)
    for channel in range(hidden):
        for rank, expert in enumerate(experts_of_token(channel)):
            router[expert, channel] = 1.0 - rank / 16
    layers = [
        dataclasses.replace(
            layer, router=router.clone(), post_norm=torch.ones_like(layer.post_norm), down=layer.down * 0.05, out_proj=layer.out_proj * 0.05
        )
        for layer in weights.layers
    ]
    return dataclasses.replace(weights, embedding=embedding, layers=layers)


def kernel_logits(runner: Runner, rows: int) -> torch.Tensor:
    """bf16 [layers, rows, num_experts]: what the newest launch handed over and ranked. Of models of few layers, whose generations are all there still."""
    return torch.stack([runner.kernel.buffer("router_logits", rows, layer) for layer in range(runner.geometry.num_layers)]).clone()


@dataclasses.dataclass(frozen=True)
class MoeRun:
    """A step's outputs, the logits that the kernel ranked, and the oracle's choices on just these logits: none of rows that pad the step."""

    outputs: StepOutputs
    logits: torch.Tensor
    choices: list[routing.Choices]


def run(runner: Runner, inputs: StepInputs) -> MoeRun:
    g = runner.geometry
    record = RoutingRecord.empty(g, inputs.rows, runner.device)
    outputs = runner.run(inputs, routing=record)
    logits = record.logits.cpu()
    return MoeRun(outputs, logits, [choices(g, inputs, of_layer) for of_layer in logits])


def choices(geometry: Geometry, inputs: StepInputs, logits: torch.Tensor) -> routing.Choices:
    """The oracle's on a layer's logits [rows, num_experts]. Rows that pad the step, the last ones, choose nothing."""
    live = int((inputs.out_cache_loc != abi.PADDING_SLOT).sum())
    return routing.choose(logits, geometry.top_k, geometry.norm_topk_prob, live)


def moe_gate(
    geometry: Geometry, weights: DecodeStepWeights, steps: list[StepInputs], ours: list[MoeRun], rows: int | None = None, captured: Sequence[int] = ()
) -> GateReport:
    """Our outputs and router logits against the float64 oracle, on the choices that our logits make; SGLang's bf16 rounding is the measure, of FP8
    weights without its rounding of activations.

    rows, captured: as decode_step_cases.gate has them.
    """
    lm_head = None if weights.lm_head is None else weights.lm_head[: geometry.vocab]
    standard = [
        moe_step.standard_step(geometry, weights, step, lm_head, captured, one.choices, rounds_activations=False)
        for step, one in zip(steps, ours, strict=True)
    ]
    oracle = [
        moe_step.decode_step(geometry, weights, step, torch.float64, lm_head, captured, one.choices) for step, one in zip(steps, ours, strict=True)
    ]
    arms = [[one.outputs for one in arm] for arm in (ours, standard, oracle)]
    report = compare(*(join([first_rows(outputs, rows) for outputs in arm]) for arm in arms))
    logits = [torch.cat([one[:, :rows] for one in arm], 1) for arm in (
        [one.logits for one in ours], [one.router_logits.cpu() for one in standard], [one.router_logits.cpu() for one in oracle])]
    of_layers = tuple(figure(f"router_logits[{layer}]", *(arm[layer] for arm in logits)) for layer in range(geometry.num_layers))
    return GateReport((*report.figures, *of_layers), report.top_token)
