"""A rank meets the others of its tensor-parallel group: workspaces that all of them share, once all have the same plans."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from sgl_lowlatency.build.symmetric_workspace import Terms, build_symmetric_workspace
from sgl_lowlatency.kernels.rank_group import PEER_COPIES, RankGroup
from sgl_lowlatency.plan.static_plan import StaticPlan


def meet(
    model: str, num_tokens: int, plans: Mapping[int, StaticPlan], device: torch.device, group: dist.ProcessGroup, deadline_s: float
) -> RankGroup:
    """The rank's RankGroup, over workspaces for the widest plan. model: what is built, in words. num_tokens: ids of the vocabulary.

    All ranks call it together. Raises DisagreementError, on every rank alike, when plans or sizes differ, or naming a rank that does not come.
    """
    first = next(iter(plans.values()))
    terms = Terms(
        spec=f"decode_step ({model}, {num_tokens} tokens)",
        plan_hash=hashlib.sha256("".join(plan.hash for plan in plans.values()).encode()).hexdigest(),
        grid=first.grid,
        widths=tuple(plans),
        max_rows=max(plans),
        hidden=first.geometry.hidden,
        copies=PEER_COPIES,
    )
    return RankGroup(build_symmetric_workspace(terms, device, group, deadline_s).mapped, num_tokens)
