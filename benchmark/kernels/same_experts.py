"""A step of DeepSeek-V4.1 with slices of ours beside SGLang's own on the same experts: what is left of the distance between their logits when no row
may choose others.

SGLang rounds activations of its FP8 matrices and the slices do not. A hundredth in a router's logits sends a row to another expert wherever two are
near, and from there on its states are another row's. So the step with the slices runs first, eagerly, and its routers' logits are kept, layer by
layer; then SGLang's own runs with those in place of its routers'. What they still differ by is rounding, or a wrong step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def kept_logits(layers: Sequence[Any], running: Any) -> Iterator[dict[int, torch.Tensor]]:
    """What the router of each layer says in the body, the last time that it runs: [rows, experts] by the layer's number. layers: the model's.
    running: of the step with slices, whose fused_moe has a router of its own."""
    found: dict[int, torch.Tensor] = {}

    def keeping(number: int, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = original(*args, **kwargs)
            found[number] = logits.clone()
            return logits

        return forward

    with _gates(layers, keeping):
        running.router_logits = found
        try:
            yield found
        finally:
            running.router_logits = None


@contextlib.contextmanager
def given_logits(layers: Sequence[Any], logits: dict[int, torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
    """In the body every layer's router says `logits` of it. Yields what they would have said. Raises ValueError for a layer without, RuntimeError in
    the body for other rows or experts."""
    if missing := sorted(set(range(len(layers))) - set(logits)):
        raise ValueError(f"no router ran in layers {missing}")
    own: dict[int, torch.Tensor] = {}

    def giving(number: int, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            said, given = original(*args, **kwargs), logits[number]
            if said.shape != given.shape:
                raise RuntimeError(f"layer {number}: the router's logits are {list(said.shape)}, those kept {list(given.shape)}")
            own[number] = said.clone()
            return said.copy_(given)

        return forward

    with _gates(layers, giving):
        yield own


@contextlib.contextmanager
def _gates(layers: Sequence[Any], replaced: Any) -> Iterator[None]:
    gates = [layer.mlp.gate for layer in layers]
    for number, gate in enumerate(gates):
        gate.forward = replaced(number, gate.forward)
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


def others_chosen(layers: Sequence[Any], own: dict[int, torch.Tensor], given: dict[int, torch.Tensor]) -> float:
    """Share of (row, layer) whose experts are not all the same by two routers' logits, by score and bias as SGLang ranks text."""
    moved = []
    for number, layer in enumerate(layers):
        bias, top_k = layer.mlp.gate.e_score_correction_bias, layer.mlp.topk.topk_config.top_k
        chosen = [
            (torch.nn.functional.softplus(logits[number].float()).sqrt() + bias.float()).topk(top_k).indices.sort(1).values for logits in (own, given)
        ]
        moved.append((chosen[0] != chosen[1]).any(1))
    return float(torch.cat(moved).float().mean())


def router_distances(own: dict[int, torch.Tensor], given: dict[int, torch.Tensor]) -> list[float]:
    """By layer, how far two routers' logits are from each other, by the norm: the states in front of each MoE, seen through its router."""
    return [float((given[i].float() - own[i].float()).norm() / own[i].float().norm()) for i in sorted(own)]
