"""From a DSpark draft to the object SGLang installs: what the kernel reads of it, and where its ranks meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sgl_lowlatency.build.agreement import VERDICT_DEADLINE_S, exchange
from sgl_lowlatency.build.device_limits import device_limits
from sgl_lowlatency.build.symmetric_workspace import build_symmetric_workspace
from sgl_lowlatency.kernels.draft_sampler import DraftWeights, draft_layout
from sgl_lowlatency.kernels.symmetric_workspace import MappedWorkspaces
from sgl_lowlatency.runtime.draft_sampler import DraftParts, DraftProposal, DraftRanks
from sgl_lowlatency.runtime.sglang_state import TensorParallel

if TYPE_CHECKING:
    from sglang.kernels.plugin_kernels.nvidia.spec import BuildContext


@dataclasses.dataclass(frozen=True)
class DraftTerms:
    """What the ranks of a draft must have in common (build/symmetric_workspace.py). max_batch: requests of the largest launch. grid: blocks a rank.
    step_logits_bytes: of a rank's, 0 for a greedy draft."""

    model: str
    vocab: int
    hidden: int
    gamma: int
    max_batch: int
    grid: int
    step_dtype: str
    has_norm: bool
    rms_eps: float
    has_fused_greedy: bool
    noise_key: int
    step_logits_bytes: int

    def layout(self, num_ranks: int) -> Any:
        return draft_layout(self.gamma, self.max_batch, num_ranks * self.grid, self.step_logits_bytes)

    def claim(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def build_draft_proposal(
    model: Any,
    context: BuildContext,
    place: TensorParallel,
    *,
    reasons_of: Callable[[Any], list[str]],
    parts_of: Callable[[Any], DraftParts],
    most_of: Callable[[int, int], int],
) -> DraftProposal:
    """The `build` of a draft's MegakernelSpec. place: this rank's among those that share the draft; reasons_of, parts_of, most_of: DraftProposal's.

    Nothing is allocated yet: the draft has no LM head before SGLang asks for proposals.
    """
    device = next(model.parameters()).device
    grid, ranks = device_limits(device).grid, draft_ranks(type(model).__name__, place, device, context.deadline_s)
    return DraftProposal(model, context.deadline_s, grid, reasons_of, parts_of, most_of, ranks)


def draft_ranks(model: str, place: TensorParallel, device: torch.device, deadline_s: float) -> DraftRanks | None:
    """What a proposal needs of the other ranks; None where there is one. model: what is built, in words."""
    if place.num_ranks == 1:
        return None

    def meet(**sizes: Any) -> MappedWorkspaces:
        return build_symmetric_workspace(DraftTerms(model=model, **sizes), device, place.group, deadline_s).mapped

    return DraftRanks(
        place.rank, place.num_ranks, lambda claim: exchange(claim, place.group, VERDICT_DEADLINE_S, "agreement on draft_sampler"), meet
    )


def rank_columns(model: Any) -> tuple[int, int]:
    """(first, number) of the rank's ids of the vocabulary: its rows of the LM head without padding."""
    head = model.lm_head
    if int(head.tp_size) == 1:
        return 0, int(head.org_vocab_size)
    begin, end = int(head.shard_indices.org_vocab_start_index), int(head.shard_indices.org_vocab_end_index)
    return begin, end - begin


def _parts(model: Any, norm: torch.Tensor | None, rms_eps: float, has_fused_greedy: bool) -> DraftParts:
    markov, (begin, count) = model.markov_head, rank_columns(model)
    weights = DraftWeights(markov.markov_w1.weight.data[: int(markov.vocab_size)], norm, rms_eps)
    w2 = markov.markov_w2.weight.data[begin : begin + count]
    return DraftParts(weights, begin, model.lm_head.weight.data, w2, markov.step_logits_dtype(torch.bfloat16), has_fused_greedy)


def dense_parts(model: Any) -> DraftParts:
    """Of a draft whose hidden states are normed already."""
    return _parts(model, None, 0.0, model.markov_head.greedy_w2_weight() is not None)


def deepseek_v4_parts(model: Any) -> DraftParts:
    """Of DeepSeek-V4.1's draft: the norm is its last stage's, and no greedy step is fused."""
    norm = model.stages[-1].norm
    return _parts(model, norm.weight.data, float(norm.variance_epsilon), False)
