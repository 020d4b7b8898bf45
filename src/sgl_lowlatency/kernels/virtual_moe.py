"""Ranks of a tensor-parallel fused_moe that share one device: the real protocol, for tests and benchmarks of machines with one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import FusedMoeFault, describe_moe_fault
from sgl_lowlatency.kernels.fused_moe import MAX_ROWS, FusedMoe
from sgl_lowlatency.kernels.symmetric_workspace import MappedWorkspaces, views_of_ranks, virtual_workspaces

__all__ = ["VirtualMoe", "virtual_moe_workspaces"]


def virtual_moe_workspaces(num_ranks: int, max_rows: int, hidden: int, device: torch.device) -> list[MappedWorkspaces]:
    """What FusedMoe takes as `symmetric`, of every virtual rank, in one device's memory. Raises ValueError for sizes out of range."""
    return views_of_ranks(virtual_workspaces(num_ranks, max_rows, hidden, device, most_rows=MAX_ROWS))


class VirtualMoe:
    """Launches fused_moe of all ranks of a group at once: on CUDA in one launch, whose grid all of them share; in emulation as GPUs of their own.

    kernels: of rank 0, 1, .., on one device, of one grid. emulation: of the launches; the kernels' own is not looked at. Raises ValueError for
    kernels that are not a group's, and on CUDA RuntimeError when their blocks cannot be resident at once.
    """

    def __init__(self, kernels: Sequence[FusedMoe], emulation: EmulationOptions | None = None):
        groups = [kernel.symmetric for kernel in kernels]
        if any(group is None or group.rank != rank or group.layout.num_ranks != len(kernels) for rank, group in enumerate(groups)):
            raise ValueError(f"these {len(kernels)} kernels are not the ranks of one group, in order")
        if len({(kernel.grid, kernel.device) for kernel in kernels}) != 1:
            raise ValueError(f"virtual ranks disagree: grids {[kernel.grid for kernel in kernels]}")
        self.kernels, self.device, self.grid = list(kernels), kernels[0].device, kernels[0].grid
        self.emulation = emulation or EmulationOptions()
        self.last_report = None  # of the newest emulated launch
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                blocks = _C.parallel_moe_max_blocks(max(kernel.shared_bytes for kernel in kernels), True)
            if blocks < self.grid * len(kernels):
                raise RuntimeError(f"{len(kernels)} virtual ranks of {self.grid} blocks need more than the {blocks} that this GPU holds")

    def launch(self, layers: Sequence[Any], arguments: Sequence[Mapping[str, Any]], stream: int = 0) -> None:
        """One launch of every rank. layers: what each rank's FusedMoe.prepare gave. arguments: of each, what FusedMoe.params takes beside it, rows
        alike. Raises as FusedMoe.launch."""
        params = [kernel.params(layer, **one) for kernel, layer, one in zip(self.kernels, layers, arguments, strict=True)]
        _C.check_virtual_moe(params, self.grid)
        if self.device.type == "cuda":
            _C.virtual_moe_launch_cuda(params, self.grid, stream)
            return
        if faults := self.faults():
            raise FusedMoeFault(f"an earlier launch failed: {faults[0]}")
        options, regions = self.emulation, []
        if options.check_order:
            regions = self.regions([{name: one.get(name) for name in ("out", "streams_out", "coefficients")} for one in arguments])
        self.last_report = report = _C.parallel_moe_emulate(
            [[one] for one in params], [self.grid] * len(params), seed=options.seed, planted=options.planted, starvation=options.starvation,
            regions=regions,
        )
        if faults := self.faults():
            raise FusedMoeFault("; ".join(faults))
        if report.status != "ok":
            raise RuntimeError(f"fused_moe in emulation: {report.status}: {report.message}")

    def regions(self, outputs: Sequence[Mapping[str, torch.Tensor | None]]) -> list[tuple[str, int, int, bool]]:
        """Memory whose ordering host emulation checks, of all ranks: (name, address, bytes, reads too). outputs: of each, what
        FusedMoe.regions takes."""
        per_rank = [kernel.regions(**of_rank) for kernel, of_rank in zip(self.kernels, outputs, strict=True)]
        return [(f"rank {rank} {name}", *rest) for rank, of_rank in enumerate(per_rank) for name, *rest in of_rank]

    def faults(self) -> list[str]:
        """The records that ranks have left, in words."""
        return [describe_moe_fault(record) for record in (kernel.fault() for kernel in self.kernels) if record is not None]
