"""The specs of DSpark drafts on NVIDIA: their layers keep SGLang's forward, their proposals are draft_sampler's.

SGLang finds them when it loads the draft of a server whose target has a spec of ours; a reason would end that server, so there is none: a draft
or a setting that the kernel does not serve keeps SGLang's proposal (guard/draft.py), and so does every draft unless
SGL_LOWLATENCY_DRAFT_SAMPLER=1 asks for the kernel. SGLang takes proposals from here in its draft graphs alone: with graphs disabled it never asks.
"""

from __future__ import annotations

from collections.abc import Callable
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
from sgl_lowlatency.build.draft import build_draft_proposal, dense_parts
from sgl_lowlatency.guard.draft import dense_reasons, most_requests
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.draft_sampler import DraftParts, DraftProposal
from sgl_lowlatency.runtime.self_check_draft import GREEDY_GAP, RELATIVE_L2

ISAS = frozenset({"sm_90", "sm_100", "sm_103"})
GRAPH_BACKENDS = frozenset({"full", "disabled"})
SWITCH = "SGL_LOWLATENCY_DRAFT_SAMPLER is not 1: a draft's proposals are draft_sampler's on request alone"


def draft_spec(drafts: str, reasons_of: Callable[[Any, int], list[str]], parts_of: Callable[[Any], DraftParts]) -> MegakernelSpec:
    """Of `drafts`, in words. reasons_of: (model, ranks that share it) -> why it keeps SGLang's proposal. parts_of: what the kernel reads of it."""

    def build(model: Any, hf_config: Any, context: BuildContext) -> DraftProposal:
        place = sglang_state.tensor_parallel()

        def reasons(draft: Any) -> list[str]:
            return ([] if config.get().draft_sampler else [SWITCH]) + reasons_of(draft, place.num_ranks)

        return build_draft_proposal(model, context, place, reasons_of=reasons, parts_of=parts_of, most_of=most_requests)

    return MegakernelSpec(
        name=f"sgl_lowlatency draft_sampler ({drafts})",
        requires=Requirements(isas=ISAS, tp_sizes=frozenset(), decode_graph_backends=GRAPH_BACKENDS),
        features=frozenset({Feature.SPECULATIVE_DECODING}),
        numerics=Numerics(
            NumericsKind.TOLERANCE,
            {"base_logits.relative_l2": RELATIVE_L2, "step_logits.relative_l2": RELATIVE_L2, "greedy.gap": GREEDY_GAP},
        ),
        max_rows=0,
        build=build,
        api_version=MEGAKERNEL_API_VERSION,
    )


DSPARK_DRAFT_SPEC = draft_spec("dense DSpark drafts", dense_reasons, dense_parts)
