"""What the self-check asks of MoE layers: SGLang's layers on the kernel's choice of experts, each from the kernel's stream (self_check_streams.py).

Two forwards whose router logits differ by rounding choose differently where two logits nearly tie. Other experts then speak, and
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.reference.routing import NAN_RANK
from sgl_lowlatency.runtime.self_check_streams import forwards_replaced

WRONG_CHOICES, ROUTER_L2, GAP = "routing.wrong_choices", "router_logits.relative_l2", "routing.gap"
MOE_FIGURES = (WRONG_CHOICES, ROUTER_L2, GAP)


@dataclasses.dataclass
class SglangRouters:
    """What SGLang's routers did while the kernel's choices stood in for theirs, a layer an entry: logits float32 [rows, num_experts], and the
    ids [rows, top_k] that they would have taken."""

    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)
    ids: list[torch.Tensor] = dataclasses.field(default_factory=list)


@contextmanager
def routed_as(model: Any, record: RoutingRecord) -> Iterator[SglangRouters]:
    """SGLang's forward takes the experts of `record` within the body, which runs it once, or clears what was noted. Raises RuntimeError for another
    number of rows."""
    routers, topks = SglangRouters(), [layer.mlp.topk for layer in model.model.layers]
    with forwards_replaced({
        topk: _router(topk.forward, topk.topk_config.renormalize, record.ids[index], routers) for index, topk in enumerate(topks)
    }):
        yield routers


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


def routing_errors(record: RoutingRecord, routers: SglangRouters) -> dict[str, torch.Tensor]:
    """MOE_FIGURES, each [layers, rows]."""
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
