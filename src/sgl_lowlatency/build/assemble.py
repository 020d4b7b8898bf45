"""From a loaded model to the object SGLang installs: weight views, plans, workspace, step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.kernels.plugin_kernels.nvidia.spec import BuildContext

from sgl_lowlatency.build.agreement import VERDICT_DEADLINE_S, exchange
from sgl_lowlatency.build.device_limits import DeviceLimits, device_limits
from sgl_lowlatency.build.progress import Progress
from sgl_lowlatency.build.rank_group import meet
from sgl_lowlatency.build.weights import collect_weights, rope_table
from sgl_lowlatency.kernels.decode_step import DecodeStep, DecodeStepWeights
from sgl_lowlatency.kernels.geometry import FP8_EXPERT_ROWS, Geometry
from sgl_lowlatency.plan.static_plan import StaticPlan, make_plan
from sgl_lowlatency.plan.tiles import grid_for
from sgl_lowlatency.plan.validate import validate
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.draft_step import DraftStep
from sgl_lowlatency.runtime.nvidia_step import NvidiaStep
from sgl_lowlatency.runtime.sglang_state import TensorParallel

logger = logging.getLogger(__name__)


def build_step(
    model: torch.nn.Module,
    hf_config: Any,
    ctx: BuildContext,
    *,
    tolerances: Mapping[str, float],
    head_reasons: Sequence[str] = (),
    place: TensorParallel = TensorParallel(0, 1, None),
) -> NvidiaStep | DraftStep:
    """Builds the decode step of a loaded model; the `build` of its MegakernelSpec, which names the tolerances.

    head_reasons: why the step ends at the final norm; without any, with the LM head. place: this rank's among those that share the model; all of them
    build together.

    Runs after the weights' post-processing and before KV sizing: all device memory the step keeps is allocated here, the
    weights are views of the model's. In a speculative server it is a verify step of ctx.tokens_per_request, and the draft model
    gets none. Raises ValueError when a weight or a plan does not fit, DisagreementError where the ranks differ or one does not come.
    """
    if sglang_state.building_draft_model():
        return DraftStep(ctx.widths)
    progress = Progress("building decode_step", logger)
    device = model.model.embed_tokens.weight.device
    limits = device_limits(device)
    whole = dataclasses.replace(Geometry.from_hf_config(hf_config), max_position=rope_table(model).shape[0])
    geometry = whole.shard(place.num_ranks)
    weights = collect_weights(model, geometry, has_head=not head_reasons)
    plans = _plans(geometry, weights, ctx, limits, progress)
    progress.step("allocating the workspace")
    group = None
    if place.num_ranks > 1:
        progress.step("meeting the other ranks")
        group = meet(type(model).__name__, whole.vocab, plans, device, place.group, ctx.deadline_s)
    step = DecodeStep(geometry, plans, weights, device, ctx.deadline_s, group=group)
    return NvidiaStep(
        model=model, geometry=geometry, step=step, plans=plans, tolerances=tolerances, device_name=limits.name,
        tokens_per_request=ctx.tokens_per_request, head_reasons=head_reasons,
        exchange=None if group is None else lambda claim: exchange(claim, place.group, VERDICT_DEADLINE_S, "agreement on a step"),
    )


def served_widths(widths: Sequence[int], geometry: Geometry, weights: DecodeStepWeights) -> Sequence[int]:
    """Those of SGLang's widths that the kernel is worth. Wider steps run SGLang's forward; the guard refuses a server that has wider ones alone."""
    if not geometry.is_moe or weights.format == "bf16":
        return widths
    return [rows for rows in widths if rows <= FP8_EXPERT_ROWS]


def _plans(
    geometry: Geometry, weights: DecodeStepWeights, ctx: BuildContext, limits: DeviceLimits, progress: Progress
) -> dict[int, StaticPlan]:
    plans, widths = {}, served_widths(ctx.widths, geometry, weights)
    for rows in widths:
        progress.step(f"plan {len(plans) + 1} of {len(widths)}")
        plan = make_plan(
            geometry, rows, grid_for(geometry, limits.grid), limits.shared_memory_bytes,
            rows_per_request=ctx.tokens_per_request, element_bytes=weights.element_bytes, has_head=weights.lm_head is not None,
        )
        faults = validate(plan)
        if faults:
            raise ValueError(f"the plan for {rows} rows on {limits.name} is invalid:\n  - " + "\n  - ".join(faults))
        plans[rows] = plan
    return plans
