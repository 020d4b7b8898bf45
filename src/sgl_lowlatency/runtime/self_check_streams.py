"""The self-check of layers one by one: SGLang's layers each from the stream that entered the kernel's.

Rounding piles up over layers: two right bf16 forwards of 48 random MoE layers, on the same experts, ended 0.19 apart, as far as a
wrong one may. So each of SGLang's layers starts from the stream that entered the kernel's, and what its layer before left is compared with that
stream, over all layers and rows, the embedding of layer 0 included: relative to the stream; and, since deep in a model a layer changes the
stream by little, what is beyond a rounding step of each channel also relative to what the layer added. K and V rows and router logits of a layer
are then one layer's rounding apart, and so are the logits, which judge what leaves the last layer. Nothing compares the two forwards from end to
end: each stream of ours is where the next layer of SGLang's starts, and the last ends at the logits. A row whose stream is not finite does not reach
SGLang's layer, which keeps its own; its figures are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.runtime import sglang_state

STREAM_L2, ADDED_L2 = "stream.relative_l2", "added.relative_l2"
STREAM_FIGURES = (STREAM_L2, ADDED_L2)
ROUNDING_STEP = 2**-7  # two bf16 neighbours are at most this far apart, relative to either


@contextmanager
def streamed_as(model: Any, record: RoutingRecord) -> Iterator[list[torch.Tensor]]:
    """SGLang's layers start from the streams of `record` within the body, which runs its forward once, or clears the list. It then has the stream
    that would have entered each layer, bf16 [rows, hidden]: what SGLang's layer before left. Raises RuntimeError for another number of rows."""
    came: list[torch.Tensor] = []
    with forwards_replaced({layer: _layer(layer.forward, record.streams[:, index], came) for index, layer in enumerate(model.model.layers)}):
        yield came


@contextmanager
def forwards_replaced(of_modules: dict[torch.nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Other forwards for these modules within the body; whatever happens there, they have their own afterwards."""
    kept = [(module, vars(module).get("forward")) for module in of_modules]
    try:
        for module, forward in of_modules.items():
            module.forward = forward
        yield
    finally:
        for module, forward in kept:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def _layer(run: Callable[..., Any], ours: torch.Tensor, came: list[torch.Tensor]) -> Callable[..., Any]:
    def forward(positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = sglang_state.stream_entering(hidden_states, forward_batch)
        if theirs.shape != ours.shape:
            raise RuntimeError(f"a stream {list(theirs.shape)} enters SGLang's layer where the kernel has {list(ours.shape)}")
        came.append(theirs)
        entering = torch.where(ours.isfinite().all(dim=-1, keepdim=True), ours, theirs)  # a copy: the layer adds to it in place
        return run(positions, sglang_state.enter_with(entering, forward_batch), forward_batch, *args, **kwargs)

    return forward


def stream_errors(record: RoutingRecord, came: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """STREAM_L2 and ADDED_L2, [layers, rows]. came: of every layer, as streamed_as has it. Raises RuntimeError when it is not of every layer."""
    if len(came) != record.streams.shape[1]:
        raise RuntimeError(f"SGLang's forward called {len(came)} of {record.streams.shape[1]} layers: the self-check cannot give them our streams")
    ours, theirs = record.streams.transpose(0, 1).float(), torch.stack(list(came)).float()
    apart = (ours - theirs).abs()
    added = torch.cat((theirs[:1], theirs[1:] - ours[:-1]))
    beyond = (apart - ROUNDING_STEP * theirs.abs()).clamp(min=0.0)
    return {STREAM_L2: apart.norm(dim=-1) / theirs.norm(dim=-1), ADDED_L2: beyond.norm(dim=-1) / added.norm(dim=-1)}
