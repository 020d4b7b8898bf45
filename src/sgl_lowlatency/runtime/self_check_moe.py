"""What the self-check asks of MoE layers: SGLang's layers on the kernel's choice of experts, each from the kernel's own stream.

**Streams.** Rounding piles up over layers: two right bf16 forwards of 48 random MoE layers, on the same experts, ended 0.19 apart, as far as a
wrong one may. So each of SGLang's layers starts from the stream that entered the kernel's, and what its layer before left is compared with that
stream, over all layers and rows, the embedding of layer 0 included: relative to the stream; and, since deep in a model a layer changes the
stream by little, what is beyond a rounding step of each channel also relative to what the layer added. K and V rows and router logits of a layer
are then one layer's rounding apart, and so are the logits, which judge what leaves the last layer. Nothing compares the two forwards from end to
end: each stream of ours is where the next layer of SGLang's starts, and the last ends at the logits. A row whose stream is not finite does not reach
SGLang's layer, which keeps its own; its figures are NaN.

**Routing.** Two forwards whose router logits differ by rounding choose differently where two logits nearly tie. Other experts then speak, and
what follows is no matter of precision. So SGLang's forward is given the kernel's choices, of the same batch, and everything else is compared as
in a dense model. The choices are judged by themselves, over every layer and row:

- They are the top k of the very logits that the kernel ranked, equal ones by id, in this order: no row may differ.
- These logits are near those of SGLang's router, whose layer started from the same stream.
- Where SGLang's router, asked on its own logits, takes other experts, each of ours is a near tie of the last that it takes: how far below, in
  units of the row's root mean square, since rounding moves logits in proportion to that.

Weights are SGLang's own; of a row with other experts, its formula on its logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.reference.routing import NAN_RANK
from sgl_lowlatency.runtime import sglang_state

WRONG_CHOICES, ROUTER_L2, GAP = "routing.wrong_choices", "router_logits.relative_l2", "routing.gap"
STREAM_L2, ADDED_L2 = "stream.relative_l2", "added.relative_l2"
MOE_FIGURES = (STREAM_L2, ADDED_L2, WRONG_CHOICES, ROUTER_L2, GAP)
ROUNDING_STEP = 2**-7  # two bf16 neighbours are at most this far apart, relative to either


@dataclasses.dataclass
class SglangRouters:
    """What SGLang's routers did while the kernel's choices stood in for theirs, a layer an entry: logits float32 [rows, num_experts], and the
    ids [rows, top_k] that they would have taken."""

    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)
    ids: list[torch.Tensor] = dataclasses.field(default_factory=list)


@contextmanager
def routed_as(model: Any, record: RoutingRecord) -> Iterator[SglangRouters]:
    """SGLang's forward takes the experts of `record` within the body, which runs it once, or clears what was noted. Raises RuntimeError for another number of rows."""
    routers, topks = SglangRouters(), [layer.mlp.topk for layer in model.model.layers]
    with _forwards({
        topk: _router(topk.forward, topk.topk_config.renormalize, record.ids[index], routers) for index, topk in enumerate(topks)
    }):
        yield routers


@contextmanager
def streamed_as(model: Any, record: RoutingRecord) -> Iterator[list[torch.Tensor]]:
    """SGLang's layers start from the streams of `record` within the body, which runs its forward once, or clears the list. It then has the stream that would have
    entered each layer, bf16 [rows, hidden]: what SGLang's layer before left. Raises RuntimeError for another number of rows."""
    came: list[torch.Tensor] = []
    with _forwards({layer: _layer(layer.forward, record.streams[:, index], came) for index, layer in enumerate(model.model.layers)}):
        yield came


@contextmanager
def _forwards(of_modules: dict[torch.nn.Module, Callable[..., Any]]) -> Iterator[None]:
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


def _router(choose: Callable[..., Any], renormalizes: bool, kept_ids: torch.Tensor, routers: SglangRouters) -> Callable[..., Any]:
    def forward(hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = choose(hidden_states, router_logits, *args, **kwargs)
        if own.topk_ids.shape != kept_ids.shape:
            raise RuntimeError(f"SGLang routes {list(own.topk_ids.shape)} choices where the kernel has {list(kept_ids.shape)}")
        ids = kept_ids.clamp(0, router_logits.shape[-1] - 1)  # what is no expert's id is a wrong choice, not an index
        routers.logits.append(router_logits.float())
        routers.ids.append(own.topk_ids.long())
        weights = router_logits.float().softmax(dim=-1).gather(1, ids.long())
        if renormalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        differs = (own.topk_ids.sort(dim=-1).values != ids.sort(dim=-1).values).any(dim=-1, keepdim=True)
        return own._replace(
            topk_ids=torch.where(differs, ids, own.topk_ids).to(own.topk_ids.dtype),
            topk_weights=torch.where(differs, weights, own.topk_weights).to(own.topk_weights.dtype),
        )

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


def routing_errors(record: RoutingRecord, routers: SglangRouters) -> dict[str, torch.Tensor]:
    """The other MOE_FIGURES, each [layers, rows]."""
    ours, theirs, ids = record.logits.float(), torch.stack(routers.logits), record.ids.long()
    ranked = torch.where(ours.isnan(), NAN_RANK, ours).sort(dim=-1, descending=True, stable=True).indices[..., : ids.shape[-1]]
    last = theirs.gather(-1, torch.stack(routers.ids)).amin(dim=-1)
    gap = (last - theirs.gather(-1, ids.clamp(0, theirs.shape[-1] - 1)).amin(dim=-1)).clamp(min=0.0)
    return {
        WRONG_CHOICES: (ranked != ids).any(dim=-1).float(),
        ROUTER_L2: (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1),
        GAP: gap / theirs.square().mean(dim=-1).sqrt(),
    }


def other_choices(record: RoutingRecord, routers: SglangRouters) -> torch.Tensor:
    """bool [layers, rows]: where SGLang's router would have taken other experts."""
    return (record.ids.long().sort(dim=-1).values != torch.stack(routers.ids).sort(dim=-1).values).any(dim=-1)


def distinct_experts(record: RoutingRecord) -> float:
    """Experts that at least one row took, a layer on average."""
    counts = [len(set(of_layer) - {-1}) for of_layer in record.ids.flatten(1).tolist()]
    return sum(counts) / len(counts)
