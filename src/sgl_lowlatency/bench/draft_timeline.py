"""Where a draft's proposal spends its time: what the clock said at points of a launch of draft_sampler, as phases.

A timeline is int64 [grid, points], ns of the GPU's timer at the points of abi::DraftPoint, then of abi::DraftStepPoint of each step, by thread 0 of
each block: it chooses columns of the first pair of warps, and sends and receives the candidates of the first request. Of the last step only block 0
of each rank has the tokens; the points that other blocks do not pass are 0."""

from __future__ import annotations

import torch

from sgl_lowlatency import _C
from sgl_lowlatency.bench import stats

POINTS, STEP_POINTS = _C.abi.kDraftPoints, _C.abi.kDraftStepPoints
BEGIN, PANEL, HEAD, BASE = range(POINTS)
HEAD_PHASES = (("start, first panel", BEGIN, PANEL), ("LM head, the warp's tiles", PANEL, HEAD), ("LM head, the block's", HEAD, BASE))
STEP_PHASES = ("columns", "to the candidate sent", "wait for all candidates", "latents, barrier")


def phases(timelines: torch.Tensor) -> list[dict]:
    """The phases of launches, in order, then the whole of one: int64 [launches, grid, points]. Fields phase, median_us, p90_us, max_us over launches
    and blocks. Raises ValueError for a timeline that a launch has not filled, or whose clock ran backwards."""
    if timelines.dim() != 3 or (timelines.shape[2] - POINTS) % STEP_POINTS or timelines.shape[2] <= POINTS:
        raise ValueError(f"timelines are [launches, grid, {POINTS} + gamma * {STEP_POINTS}], not {list(timelines.shape)}")
    times, gamma = timelines.cpu(), (timelines.shape[2] - POINTS) // STEP_POINTS
    passed = times != 0
    if not bool(passed[..., : -STEP_POINTS // 2].all()) or not bool(passed[:, 0].all()):
        raise ValueError("a point of the timeline was not passed")
    found = []

    def add(name: str, begin: torch.Tensor, end: torch.Tensor) -> None:
        ns = (end - begin)[(begin != 0) & (end != 0)]
        if bool((ns < 0).any()):
            raise ValueError(f"{name} ends before it begins")
        us = [value / 1e3 for value in ns.tolist()]
        figures = {"median_us": stats.median(us), "p90_us": stats.quantile(us, 0.9), "max_us": max(us)}
        found.append({"phase": name} | {field: round(value, 3) for field, value in figures.items()})

    first = times[..., BEGIN].min(1, keepdim=True).values
    add("begins behind the first block", first.expand_as(times[..., BEGIN]), times[..., BEGIN])
    for name, begin, end in HEAD_PHASES:
        add(name, times[..., begin], times[..., end])
    for step in range(gamma):
        at = POINTS + step * STEP_POINTS
        for i, name in enumerate(STEP_PHASES):
            add(f"step {step}: {name}", times[..., at + i - 1] if step or i else times[..., BASE], times[..., at + i])
    add("head, from the first block's begin", first[:, 0], times[..., BASE].max(1).values)
    add("launch, from the first block's begin to the last token", first[:, 0], times[..., -1].max(1).values)
    return found


def table(found: list[dict]) -> str:
    """A line a phase, microseconds."""
    lines = [f"{'us':54} {'median':>8} {'p90':>8} {'max':>8}"]
    return "\n".join([*lines, *(f"{row['phase']:54} {row['median_us']:8.2f} {row['p90_us']:8.2f} {row['max_us']:8.2f}" for row in found)])
