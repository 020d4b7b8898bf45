"""From a loaded model to the object SGLang installs on AMD: weight views, a workspace that ranks share, code objects or host emulation."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
from sglang.kernels.plugin_kernels.amd.spec import BuildContext

import sgl_lowlatency
from sgl_lowlatency import config
from sgl_lowlatency.build.agreement import VERDICT_DEADLINE_S, exchange
from sgl_lowlatency.build.symmetric_workspace import Terms, build_symmetric_workspace
from sgl_lowlatency.build.weights import collect_weights, rope_table
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.kernels.hip import HipRuntime
from sgl_lowlatency.kernels.monokernel import EXCHANGES, Monokernels
from sgl_lowlatency.kernels.monokernel_objects import MonokernelObjects
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.amd_step import AmdStep
from sgl_lowlatency.runtime.draft_step import AmdDraftStep
from sgl_lowlatency.runtime.sglang_state import TensorParallel

logger = logging.getLogger(__name__)

EMULATED_GRID = 3  # workgroups of a step in host emulation: enough for words and split attention to cross them


def build_step(
    model: torch.nn.Module,
    geometry: Geometry,
    context: BuildContext,
    *,
    bounds: Mapping[str, float],
    grid: int,
    tokens_per_request: int,
    place: TensorParallel = TensorParallel(0, 1, None),
) -> AmdStep | AmdDraftStep:
    """Builds the steps of a loaded model; the `build` of its MonoSpec, which names the bounds.

    geometry: this rank's share, of the whole vocabulary. grid: workgroups of a launch on a GPU, the spec's resident_blocks. tokens_per_request: of
    this server's steps. place: this rank's among those that share the model; all of them build together.

    Runs after the weights' post-processing and before KV sizing: all device memory that outlives a step is allocated here, the weights are views of
    the model's. In a speculative server the draft model gets none. Puts a forward on the model that counts the steps which SGLang does not route here.
    Raises ValueError when a weight does not fit, RuntimeError when the grid cannot be resident, HipError and FileNotFoundError where the kernels
    do not load, DisagreementError where the ranks differ or one does not come.
    """
    if sglang_state.building_draft_model():
        return AmdDraftStep(model)
    cos_sin = rope_table(model)
    geometry = dataclasses.replace(geometry, max_position=cos_sin.shape[0])
    weights, device = collect_weights(model, geometry), model.model.embed_tokens.weight.device
    objects, grid = _objects(context.isa, grid, device)
    workspaces = None
    if place.num_ranks > 1:
        terms = _terms(type(model).__name__, geometry, context, tokens_per_request, grid)
        runtime = None if objects is None else objects.runtime
        workspaces = build_symmetric_workspace(terms, device, place.group, context.deadline_s, runtime).mapped
    kernels = Monokernels(
        geometry, weights.layers, cos_sin, isa=context.isa, grid=grid, widths=[(rows, tokens_per_request) for rows in context.widths],
        deadline_s=context.deadline_s / 2, rank=place.rank, workspaces=workspaces, objects=objects,
    )  # fmt: skip
    built = AmdStep(
        model=model, geometry=geometry, kernels=kernels, weights=weights, bounds=bounds, rope_table=functools.partial(rope_table, model),
        tokens_per_request=tokens_per_request,
        exchange=None if workspaces is None else lambda claim: exchange(claim, place.group, VERDICT_DEADLINE_S, "agreement on a step"),
    )  # fmt: skip
    model.forward = built.count_unrouted()
    logger.info("%s", built.summary())
    return built


def _objects(isa: str, grid: int, device: torch.device) -> tuple[MonokernelObjects | None, int]:
    """(the kernels on the GPU, or None in host emulation; workgroups of a launch)."""
    if device.type == "cpu" and config.get().emulate:
        return None, EMULATED_GRID
    if device.type != "cuda":
        raise ValueError(
            f"the model is on {device.type!r}: k1 and k2 run on a ROCm device, which torch calls cuda, or on the CPU in host emulation "
            "(SGL_LOWLATENCY_EMULATE=1)"
        )
    with torch.cuda.device(device):
        objects = MonokernelObjects(HipRuntime(), isa, torch.cuda.get_device_properties(device).multi_processor_count)
    objects.require_resident(grid)
    return objects, grid


def _terms(model: str, geometry: Geometry, context: BuildContext, tokens_per_request: int, grid: int) -> Terms:
    """What the ranks must have in common; there is no plan, so the hash is of what decides a step. That is the kernels too: of one release."""
    decides = {"version": sgl_lowlatency.__version__, "isa": context.isa, "tokens": tokens_per_request, **dataclasses.asdict(geometry)}
    return Terms(
        spec=f"monokernel ({model}, {geometry.vocab} tokens)",
        plan_hash=hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest(),
        grid=grid,
        widths=tuple(context.widths),
        max_rows=max(context.widths),
        hidden=EXCHANGES * geometry.hidden,
    )
