"""Ranks of a tensor-parallel decode_step that share one device: the real protocol, for tests and benchmarks of machines with one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import DecodeStep, EmulationOptions
from sgl_lowlatency.kernels.fault import DecodeStepFault, describe_fault
from sgl_lowlatency.kernels.rank_group import MAX_VIRTUAL_RANKS, PEER_COPIES, RankGroup
from sgl_lowlatency.kernels.symmetric_workspace import views_of_ranks, virtual_workspaces

__all__ = ["VirtualRanks", "virtual_groups"]


def virtual_groups(num_ranks: int, max_rows: int, hidden: int, num_tokens: int, device: torch.device) -> list[RankGroup]:
    """The RankGroup of every virtual rank, over workspaces in one device's memory. Raises ValueError for sizes out of range."""
    mapped = virtual_workspaces(num_ranks, max_rows, hidden, device, PEER_COPIES)
    return [RankGroup(view, num_tokens) for view in views_of_ranks(mapped)]


class VirtualRanks:
    """Launches the steps of all ranks of a group at once: on CUDA in one launch, whose grid all of them share, and which is of decode steps in bf16;
    in emulation as GPUs of their own. On CUDA the ranks of other steps have a launch and a stream each, that of DecodeStep.

    steps: of rank 0, 1, .., alike in grid and device. emulation: of the launches; the steps' own is not looked at. Raises ValueError for steps
    that are not a group's, and on CUDA RuntimeError when their blocks cannot be resident at once.
    """

    def __init__(self, steps: Sequence[DecodeStep], emulation: EmulationOptions | None = None):
        groups = [step.group for step in steps]
        if any(group is None or group.rank != rank or group.workspaces.layout.num_ranks != len(steps) for rank, group in enumerate(groups)):
            raise ValueError(f"these {len(steps)} steps are not the ranks of one group, in order")
        if len({step.timeline is None for step in steps}) != 1:
            raise ValueError("virtual ranks disagree: some are timed")
        if len({(step.grid, step.device) for step in steps}) != 1:
            raise ValueError(f"virtual ranks disagree: grids {[step.grid for step in steps]}")
        self.steps, self.device, self.grid = list(steps), steps[0].device, steps[0].grid
        if self.device.type == "cuda" and len(steps) > MAX_VIRTUAL_RANKS:
            raise ValueError(f"{len(steps)} virtual ranks are more than {MAX_VIRTUAL_RANKS}, the most of one launch")
        self.emulation = emulation or EmulationOptions()
        self.last_report = None  # of the newest emulated launch

    def launch(self, arguments: Sequence[Mapping[str, Any]], stream: int = 0) -> None:
        """One step of every rank. arguments: of each, what DecodeStep.prepare takes, rows alike. Raises as DecodeStep.launch."""
        if self.device.type == "cuda" and self.steps[0].timeline is not None:
            raise ValueError("timed virtual ranks have no launch in common on CUDA; each has its own")
        prepared = [step.prepare(**one) for step, one in zip(self.steps, arguments, strict=True)]
        if self.device.type == "cuda":
            _C.virtual_step_launch_cuda([params for params, _ in prepared], self.grid, stream)
            return
        if faults := self.faults():
            raise DecodeStepFault(f"an earlier launch failed: {faults[0]}")
        options = self.emulation
        emulate = _C.parallel_step_emulate if self.steps[0].timeline is None else _C.timed_step_emulate
        self.last_report = report = emulate(
            [[params] for params, _ in prepared], self.grid, seed=options.seed, planted=options.planted, starvation=options.starvation,
            regions=self.regions([outputs for _, outputs in prepared]) if options.check_order else [],
        )
        if faults := self.faults():
            raise DecodeStepFault("; ".join(faults))
        if report.status != "ok":
            raise RuntimeError(f"decode_step in emulation: {report.status}: {report.message}")

    def regions(self, outputs: Sequence[Mapping[str, torch.Tensor]]) -> list[tuple[str, int, int, bool]]:
        """Memory whose ordering host emulation checks, of all ranks: (name, address, bytes, reads too)."""
        regions = []
        for rank, (step, written) in enumerate(zip(self.steps, outputs, strict=True)):
            regions += [(f"rank {rank} {name}", *rest) for name, *rest in step.regions(dict(written))]
            mapped = step.group.workspaces
            at, bytes_of_tiles = mapped.layout.tiles, mapped.layout.total_bytes - mapped.layout.tiles
            regions.append((f"rank {rank} workspace", mapped.addresses[rank] + at, bytes_of_tiles, True))
        return regions

    def faults(self) -> list[str]:
        """The records that ranks have left, in words."""
        return [describe_fault(record) for record in (step.fault() for step in self.steps) if record is not None]

    def require_resident(self) -> None:
        """Raises RuntimeError when the GPU does not hold all ranks' blocks at once. Call behind attach_kv."""
        for rows, params in self.steps[0]._params.items():
            with torch.cuda.device(self.device):
                blocks = _C.parallel_step_max_blocks(params, True)
            if blocks < self.grid * len(self.steps):
                needed = f"{len(self.steps)} virtual ranks of {self.grid} blocks"
                raise RuntimeError(f"{needed} need more than the {blocks} that this GPU holds at {rows} rows")
