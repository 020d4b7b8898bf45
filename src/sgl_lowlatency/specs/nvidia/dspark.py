"""The spec of dense DSpark drafts on NVIDIA: their layers keep SGLang's forward, their proposals are draft_sampler's.

SGLang finds it when it loads the draft of a server whose target has a spec of ours; a reason would end that server, so there is none: a draft
or a setting that the kernel does not serve keeps SGLang's proposal (guard/draft.py), and so does every draft unless
SGL_LOWLATENCY_DRAFT_SAMPLER=1 asks for the kernel. SGLang takes proposals from here in its draft graphs alone: with graphs disabled it never asks.
DeepseekV4ForCausalLMDSpark belongs to a target that has no spec here.
"""

from __future__ import annotations

from typing import Any

from sglang.kernels.plugin_kernels.nvidia.spec import (
    MEGAKERNEL_API_VERSION,
    BuildContext,
    Feature,
    MegakernelSpec,
    Numerics,
    NumericsKind,
    Requirements,
)

from sgl_lowlatency import config
from sgl_lowlatency.build.device_limits import device_limits
from sgl_lowlatency.guard.draft import draft_reasons, most_requests
from sgl_lowlatency.runtime.draft_sampler import DraftProposal
from sgl_lowlatency.runtime.self_check_draft import GREEDY_GAP, RELATIVE_L2


def _reasons(model: Any) -> list[str]:
    switch = [] if config.get().draft_sampler else ["SGL_LOWLATENCY_DRAFT_SAMPLER is not 1: draft_sampler was never served"]
    return switch + draft_reasons(model)


def _build(model: Any, hf_config: Any, context: BuildContext) -> DraftProposal:
    device = next(model.parameters()).device
    return DraftProposal(model, context.deadline_s, device_limits(device).grid, _reasons, most_requests)


DSPARK_DRAFT_SPEC = MegakernelSpec(
    name="sgl_lowlatency draft_sampler (dense DSpark drafts)",
    requires=Requirements(
        isas=frozenset({"sm_90", "sm_100", "sm_103"}),
        tp_sizes=frozenset(),
        decode_graph_backends=frozenset({"full", "disabled"}),
    ),
    features=frozenset({Feature.SPECULATIVE_DECODING}),
    numerics=Numerics(
        NumericsKind.TOLERANCE,
        {"base_logits.relative_l2": RELATIVE_L2, "step_logits.relative_l2": RELATIVE_L2, "greedy.gap": GREEDY_GAP},
    ),
    max_rows=0,
    build=_build,
    api_version=MEGAKERNEL_API_VERSION,
)
