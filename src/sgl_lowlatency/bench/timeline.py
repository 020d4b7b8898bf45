"""Where a layer of a tensor-parallel step spends its time: what the clock said at points of each layer, as phases.

A timeline is int64 [grid, num_layers, points], ns of one GPU's timer at the points of abi::TimelinePoint, by thread 0 of each block. Timers of two
GPUs have nothing in common: a phase is a difference of one block's points."""

from __future__ import annotations

import dataclasses

import torch

from sgl_lowlatency.bench import stats
from sgl_lowlatency.kernels.rank_group import TIMELINE_POINTS as POINTS

# (phase, whether it only waits, from, to). Together they are a layer, but for the fence, which lies in gate_up's tiles.
PHASES = (
    ("qkv: wait for the stream", True, "Begin", "QkvOperand"),
    ("qkv: tiles", False, "QkvOperand", "Qkv"),
    ("attention", False, "Qkv", "Attention"),
    ("out_proj: wait for attention", True, "Attention", "OutProjOperand"),
    ("out_proj: tiles and push", False, "OutProjOperand", "OutProj"),
    ("out_proj: wait for all ranks", True, "OutProj", "Mid"),
    ("gate_up: wait for the stream", True, "Mid", "GateUpOperand"),
    ("gate_up: tiles, upkeep", False, "GateUpOperand", "GateUp"),
    ("down: wait for activations", True, "GateUp", "DownOperand"),
    ("down: tiles and push", False, "DownOperand", "Down"),
    ("down: wait for all ranks", True, "Down", "End"),
)
INSIDE = (("of gate_up: fence", True, "Fence", "Fenced"),)
LAYER = ("layer", "Begin", "End")


@dataclasses.dataclass(frozen=True)
class Phase:
    """Microseconds over all blocks and layers. is_wait: nothing is multiplied meanwhile. share: of the layer's mean."""

    name: str
    is_wait: bool
    median_us: float
    p90_us: float
    mean_us: float
    share: float


def phases(timeline: torch.Tensor) -> list[Phase]:
    """The phases of a layer, in order; then what lies inside of one; then the layer. The first layer, whose stream is the embedding, is left out
    where there are others. Raises ValueError for a timeline that a launch has not filled, or whose clock ran backwards."""
    if timeline.dim() != 3 or timeline.shape[2] != len(POINTS):
        raise ValueError(f"a timeline is [grid, layers, {len(POINTS)}], not {list(timeline.shape)}")
    times = timeline.cpu()[:, min(1, timeline.shape[1] - 1) :]
    if bool((times == 0).any()):
        raise ValueError("a point of the timeline was not passed")

    def lasted_us(name: str, begin: str, end: str) -> list[float]:
        lasted = (times[..., POINTS[end]] - times[..., POINTS[begin]]).flatten()
        if bool((lasted < 0).any()):
            raise ValueError(f"{name} ends before it begins")
        return [ns / 1e3 for ns in lasted.tolist()]

    layer_us = sum(lasted_us(*LAYER))
    found = []
    for name, is_wait, begin, end in (*PHASES, *INSIDE, (LAYER[0], False, *LAYER[1:])):
        us = lasted_us(name, begin, end)
        found.append(Phase(name, is_wait, stats.median(us), stats.quantile(us, 0.9), sum(us) / len(us), sum(us) / layer_us if layer_us else 0.0))
    return found


def rows(timeline: torch.Tensor, rank: int) -> list[dict]:
    """The phases as fields of results."""
    return [
        {"phase": one.name, "waits": one.is_wait, "rank": rank, "median_us": round(one.median_us, 3), "p90_us": round(one.p90_us, 3),
         "mean_us": round(one.mean_us, 3), "layer_share": round(one.share, 4)}
        for one in phases(timeline)
    ]  # fmt: skip


def table(found: list[dict]) -> str:
    """Phase, then of every rank median, p90 and mean in microseconds."""
    ranks = sorted({row["rank"] for row in found})
    lines = [f"{'us a layer':32}" + "".join(f" | rank {rank}: {'median':>6} {'p90':>6} {'mean':>6}" for rank in ranks)]
    for name in dict.fromkeys(row["phase"] for row in found):
        of_ranks = [next(row for row in found if row["phase"] == name and row["rank"] == rank) for rank in ranks]
        mark = "*" if of_ranks[0]["waits"] else " "
        cells = (f" |         {row['median_us']:6.2f} {row['p90_us']:6.2f} {row['mean_us']:6.2f}" for row in of_ranks)
        lines.append(f"{mark} {name:30}" + "".join(cells))
    waiting = {name for name, is_wait, *_ in PHASES if is_wait}
    waits = {rank: sum(row["mean_us"] for row in found if row["rank"] == rank and row["phase"] in waiting) for rank in ranks}
    lines.append("* waits; together " + ", ".join(f"{waited:.2f} on rank {rank}" for rank, waited in waits.items()))
    return "\n".join(lines)
