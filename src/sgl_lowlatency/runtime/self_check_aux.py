"""What the self-check asks of auxiliary hidden states: the stream that enters each captured layer, of ours and of SGLang's forward.

Two figures. How far a row is from SGLang's, as for logits; and whether it is the right layer's at all. Deep in a model one layer changes
the stream by little, so that a neighbour's would pass the first. Ours must be nearer to SGLang's stream at the captured layer than to
that at the layer before and behind: rounding noise is orthogonal to what a layer adds, so at the right layer the ratio of the two
distances is below 1 whatever the noise, and at a wrong one above. Distances are medians over channels and rows: few channels of a real
model are a thousand times louder than the rest, and their rounding says nothing. (The last layer has no layer behind it.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

AUX_L2, AUX_LAYER_RATIO = "aux.relative_l2", "aux.layer_ratio"
AUX_FIGURES = (AUX_L2, AUX_LAYER_RATIO)


def with_neighbours(captured: Sequence[int], num_layers: int) -> list[int]:
    """The captured layers and the ones beside them, ascending."""
    near = {layer + step for layer in captured for step in (-1, 0, 1)}
    return sorted(layer for layer in near if 0 <= layer < num_layers)


def split_layers(packed: torch.Tensor, layers: Sequence[int], hidden: int) -> dict[int, torch.Tensor]:
    """[rows, layers * hidden] by layer, float32 [rows, hidden]. Raises RuntimeError for another width."""
    if packed.shape[-1] != len(layers) * hidden:
        raise RuntimeError(
            f"auxiliary hidden states have {packed.shape[-1]} columns, those of layers {list(layers)} have {len(layers) * hidden}"
        )
    return dict(zip(layers, packed.float().split(hidden, dim=-1)))


def aux_errors(
    actual: dict[int, torch.Tensor], expected: dict[int, torch.Tensor], captured: Sequence[int]
) -> dict[str, torch.Tensor]:
    """AUX_FIGURES: relative L2 [layers, rows], and the ratio [layers]. expected: with_neighbours of `captured`."""
    l2 = [(actual[layer] - expected[layer]).norm(dim=-1) / expected[layer].norm(dim=-1) for layer in captured]
    return {AUX_L2: torch.stack(l2), AUX_LAYER_RATIO: torch.stack([_layer_ratio(actual[layer], expected, layer) for layer in captured])}


def _layer_ratio(stream: torch.Tensor, expected: dict[int, torch.Tensor], layer: int) -> torch.Tensor:
    own = (stream - expected[layer]).abs().median()
    beside = [(stream - expected[near]).abs().median() for near in (layer - 1, layer + 1) if near in expected]
    if not beside or own == 0:
        return torch.zeros_like(own)  # nothing to mistake it for, or no distance at all
    return own / torch.stack(beside).min()
