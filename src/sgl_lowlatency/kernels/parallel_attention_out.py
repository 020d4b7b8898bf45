"""attention_out of a tensor-parallel group: a rank's kernel, and ranks that share one device, for tests and benchmarks of machines with one GPU.

CUDA tensors run the CUDA kernels, CPU tensors the same source in host emulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sgl_lowlatency.kernels import abi  # noqa: F401  first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.attention_out import AttentionOut, AttentionOutSizes, AttentionOutWeights
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.fault import AttentionOutFault, describe_attention_out_fault
from sgl_lowlatency.kernels.host_words import FAULT_BYTES, GROUP_BYTES
from sgl_lowlatency.kernels.slice import MAX_ROWS, Layer
from sgl_lowlatency.kernels.symmetric_workspace import MappedWorkspaces, views_of_ranks, virtual_workspaces

__all__ = ["ParallelAttentionOut", "VirtualAttentionOut", "virtual_attention_out_views"]


class ParallelAttentionOut(AttentionOut):
    """The kernel attention_out of one rank of several: the sums of wo_b are those over all ranks, so that what it writes is the same bits on each.

    sizes: the rank's share (AttentionOutSizes.shard), and so are wo_a, the rows of its groups, wo_b and its scales, their columns, and x, its heads.
    workspaces: of all ranks, symmetric_layout(num_ranks, max_rows, hidden); `rank` is the own one. All ranks launch the same rows in the same order.
    Raises as AttentionOut, and ValueError for workspaces that do not fit.
    """

    name, host_bytes = "parallel_attention_out", FAULT_BYTES + GROUP_BYTES

    def __init__(
        self,
        sizes: AttentionOutSizes,
        max_rows: int,
        device: torch.device,
        grid: int,
        deadline_s: float,
        workspaces: MappedWorkspaces,
        emulation: EmulationOptions | None = None,
    ):
        at = workspaces.layout
        if at.hidden != sizes.hidden:
            raise ValueError(f"the workspaces have hidden {at.hidden}, the layer {sizes.hidden}")
        if at.max_rows < max_rows:
            raise ValueError(f"the workspaces have room for {at.max_rows} rows, max_rows is {max_rows}")
        if not 0 <= workspaces.rank < at.num_ranks or len(workspaces.addresses) != at.num_ranks:
            raise ValueError(f"rank {workspaces.rank} and {len(workspaces.addresses)} workspaces are not those of {at.num_ranks} ranks")
        super().__init__(sizes, max_rows, device, grid, deadline_s, workspaces.rank, emulation)
        self.workspaces = workspaces
        workspaces.name_in(self._host.address, self._host.address + FAULT_BYTES)

    def prepare(self, weights: AttentionOutWeights, layer_idx: int = 0) -> Layer:
        """As AttentionOut's. layer_idx: for fault records, 0..65535."""
        layer = super().prepare(weights)
        layer.params.symmetric, layer.params.layer = self.workspaces.layout, layer_idx
        for rank, address in enumerate(self.workspaces.addresses):
            layer.params.set_workspace(rank, address)
        return layer

    def regions(self, outputs: dict[str, torch.Tensor]) -> list[tuple[str, int, int, bool]]:
        """As Slice's, with the rank's own symmetric workspace; names begin with the rank."""
        rank, total_bytes = self.workspaces.rank, self.workspaces.layout.total_bytes
        own = [("symmetric workspace", self.workspaces.addresses[rank], total_bytes, True)]
        return [(f"rank {rank} {name}", *rest) for name, *rest in super().regions(outputs) + own]

    def _new_params(self) -> Any:
        return _C.abi.ParallelAttentionOutParams()

    def _call_emulation(self, params: Any, options: EmulationOptions, regions: list[tuple[str, int, int, bool]]) -> Any:
        return _C.parallel_attention_out_emulate(
            [[params]], self.grid, seed=options.seed, planted=options.planted, starvation=options.starvation, regions=regions,
            is_shared=self.workspaces.layout.num_ranks > 1,
        )


def virtual_attention_out_views(num_ranks: int, max_rows: int, hidden: int, device: torch.device) -> list[MappedWorkspaces]:
    """What each virtual rank sees of workspaces in one device's memory. Raises ValueError for sizes out of range."""
    return views_of_ranks(virtual_workspaces(num_ranks, max_rows, hidden, device, most_rows=MAX_ROWS))


class VirtualAttentionOut:
    """Launches all ranks of a group at once: on CUDA in one launch, whose grid all of them share; in emulation as GPUs of their own.

    ranks: rank 0, 1, .., alike in sizes, grid and device. emulation: of the launches; the ranks' own is not looked at. Raises ValueError for ranks that
    are not a group's, and on CUDA RuntimeError when their blocks cannot be resident at once.
    """

    def __init__(self, ranks: Sequence[ParallelAttentionOut], emulation: EmulationOptions | None = None):
        if any(one.workspaces.rank != rank or one.workspaces.layout.num_ranks != len(ranks) for rank, one in enumerate(ranks)):
            raise ValueError(f"these {len(ranks)} kernels are not the ranks of one group, in order")
        if len({(one.sizes, one.grid, one.device) for one in ranks}) != 1:
            raise ValueError(f"virtual ranks disagree in sizes, grid or device: grids {[one.grid for one in ranks]}")
        self.ranks, self.device, self.grid = list(ranks), ranks[0].device, ranks[0].grid
        self.emulation = emulation or EmulationOptions()
        self.last_report = None  # of the newest emulated launch
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                smem = (ranks[0]._smem(rows).total_bytes for rows in range(1, ranks[0].max_rows + 1))
                blocks = min(_C.virtual_attention_out_max_blocks(rows, total_bytes) for rows, total_bytes in enumerate(smem, 1))
            if blocks < self.grid * len(ranks):
                raise RuntimeError(f"{len(ranks)} virtual ranks of {self.grid} blocks need more than the {blocks} that this GPU holds at once")

    def launch(self, layers: Sequence[Layer], arguments: Sequence[Mapping[str, Any]], stream: int = 0) -> None:
        """One launch of every rank. layers: of each, what its prepare gave; arguments: of each, what AttentionOut.fill takes behind the layer, rows alike.
        Raises as AttentionOut.launch, of every rank that has left a record."""
        filled = [one.fill(layer, **its) for one, layer, its in zip(self.ranks, layers, arguments, strict=True)]
        if self.device.type == "cuda":
            _C.virtual_attention_out_launch_cuda([params for params, _ in filled], self.grid, stream)
            return
        if faults := self.faults():
            raise AttentionOutFault(f"an earlier launch failed: {faults[0]}")
        self.last_report = report = self.emulate([[params] for params, _ in filled], [outputs for _, outputs in filled])
        if faults := self.faults():
            raise AttentionOutFault("; ".join(faults))
        if report.status != "ok":
            raise RuntimeError(f"attention_out in emulation: {report.status}: {report.message}")

    def emulate(self, launches: Sequence[Sequence[Any]], outputs: Sequence[dict[str, torch.Tensor]], slowness: Sequence[int] = ()) -> Any:
        """The report of streams of launches, one a rank, that run on by themselves. launches: copies of parameters; none: a rank that never comes.
        outputs: of each rank, every tensor that its launches write. slowness: of each rank, how many times slower it is."""
        options = self.emulation
        regions = [region for one, its in zip(self.ranks, outputs, strict=True) for region in one.regions(its)] if options.check_order else []
        return _C.parallel_attention_out_emulate(
            [list(of_rank) for of_rank in launches], self.grid, slowness=list(slowness), seed=options.seed, planted=options.planted,
            starvation=options.starvation, regions=regions,
        )

    def faults(self) -> list[str]:
        """The records that ranks have left, in words."""
        return [describe_attention_out_fault(record) for record in (one.fault() for one in self.ranks) if record is not None]
