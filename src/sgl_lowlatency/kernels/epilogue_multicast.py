"""epilogue_multicast: a row-parallel product whose tiles go to every rank as they are finished, summed in rank order, with residual and norm.

CUDA tensors run the CUDA kernels, CPU tensors the same source in host emulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import require_tensor
from sgl_lowlatency.kernels.fault import EpilogueMulticastFault, describe_fault
from sgl_lowlatency.kernels.host_words import HostWords, kernel_device
from sgl_lowlatency.kernels.symmetric_workspace import MAX_RANKS, MappedWorkspaces, virtual_workspaces

__all__ = ["MAX_ROWS", "EpilogueMulticast", "RankTensors"]

MAX_ROWS: int = _C.abi.kMaxPushedRows
NUM_STAGES = 4  # of the weight ring: enough to saturate memory
SHARED_MEMORY_BYTES = 227 * 1024  # of a block: sm_90's, the least of the architectures
_RECORD_BYTES: int = _C.abi.kFaultRecordBytes


@dataclasses.dataclass(frozen=True)
class RankTensors:
    """What one rank brings and gets. bf16, contiguous, aligned to 16 bytes.

    input [rows, K]: its share of the activations. residual [rows, hidden]: the same on every rank. sum [rows, hidden]: gets residual + the
    sum of all ranks' products; may be `residual`. normed [rows, hidden]: gets its RMSNorm.
    """

    input: torch.Tensor
    residual: torch.Tensor
    sum: torch.Tensor
    normed: torch.Tensor


class EpilogueMulticast:
    """sum = residual + sum over ranks of input @ weight.T, in rank order; normed = rms_norm(sum) * norm_weight. Two launches a call.

    weights: bf16 [hidden, K] of each rank that this object launches, one after the other from workspaces.rank on: the process's own, or several
    virtual ranks that share a device. norm_weight: bf16 [hidden]. Either workspaces, of the group (build/symmetric_workspace.py); or virtual_ranks,
    as many as there are weights, and workspaces are made for them, of max_rows. blocks_per_rank: of the product's grid, at most the device's SMs
    over all its ranks; other ranks may have another number. live_ranks: fewer than there are weights leaves out the last ones: dead ranks, for tests
    of the deadline. Raises ValueError for what does not fit.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        norm_weight: torch.Tensor,
        *,
        blocks_per_rank: int,
        deadline_s: float,
        workspaces: MappedWorkspaces | None = None,
        virtual_ranks: int = 0,
        max_rows: int = MAX_ROWS,
        live_ranks: int | None = None,
        rms_eps: float = 1e-6,
        emulation: EmulationOptions | None = None,
    ):
        if (workspaces is None) != (virtual_ranks > 0):
            raise ValueError("it takes either workspaces or virtual_ranks")
        if not 1 <= len(weights) <= MAX_RANKS:
            raise ValueError(f"{len(weights)} weights are not those of 1..{MAX_RANKS} ranks")
        if workspaces is None and len(weights) != virtual_ranks:
            raise ValueError(f"{len(weights)} weights are not those of {virtual_ranks} ranks")
        self.device = kernel_device(weights[0].device)
        self.hidden, self.k_extent = weights[0].shape
        if self.k_extent % 64:
            raise ValueError(f"K {self.k_extent} is not a multiple of 64")
        for rank, weight in enumerate(weights):
            require_tensor(f"weight {rank}", weight, (self.hidden, self.k_extent), torch.bfloat16, self.device)
        require_tensor("norm_weight", norm_weight, (self.hidden,), torch.bfloat16, self.device)
        self.workspaces = workspaces or virtual_workspaces(virtual_ranks, max_rows, self.hidden, self.device)
        if self.workspaces.layout.hidden != self.hidden:
            raise ValueError(f"the workspaces have hidden {self.workspaces.layout.hidden}, the weights {self.hidden}")
        if self.workspaces.rank + len(weights) > self.workspaces.layout.num_ranks:
            raise ValueError(f"{len(weights)} ranks from {self.workspaces.rank} on are not among the {self.workspaces.layout.num_ranks}")
        self.num_ranks = live_ranks or len(weights)
        if not 1 <= self.num_ranks <= len(weights):
            raise ValueError(f"live_ranks {live_ranks} is outside 1..{len(weights)}")
        if not 1 <= blocks_per_rank * len(weights) <= 1024:
            raise ValueError(f"blocks_per_rank {blocks_per_rank} is out of range")
        self.blocks_per_rank, self.deadline_s, self.rms_eps = blocks_per_rank, deadline_s, rms_eps
        self.emulation = emulation or EmulationOptions()
        self.last_report = None  # of the newest emulated launch
        self._weights, self._norm_weight = list(weights), norm_weight
        matrices = [(weight.data_ptr(), self.hidden, self.k_extent, 1, 2) for weight in weights]
        packed = _C.pack_weight_maps(matrices, self.device.type == "cuda")
        padded = torch.empty(len(packed) + 128, dtype=torch.uint8, device=self.device)
        begin = -padded.data_ptr() % 128
        self._maps = padded[begin : begin + len(packed)]
        self._maps.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        self._host = HostWords(self.device, MAX_RANKS * _RECORD_BYTES)

    def run(self, tensors: Sequence[RankTensors], layer: int = 0, stream: int = 0) -> None:
        """Launches both kernels. tensors: of the process's ranks, in order. layer: for fault records. stream: a cudaStream_t; capturable.

        Raises ValueError for a tensor that does not fit; on the CPU EpilogueMulticastFault when a rank waited in vain, on CUDA see faults().
        """
        params = self.params(tensors, layer)
        if self.device.type == "cuda":
            _C.epilogue_multicast_launch_cuda(params, stream)
            return
        if self.faults():
            raise EpilogueMulticastFault(f"an earlier launch failed: {describe_fault(self.faults()[0], 'epilogue_multicast')}")
        options = self.emulation
        self.last_report = report = _C.epilogue_multicast_emulate(
            [[params]], seed=options.seed, planted=options.planted, starvation=options.starvation,
            is_shared=len(self._weights) < self.workspaces.layout.num_ranks,
        )
        if self.faults():
            raise EpilogueMulticastFault("; ".join(describe_fault(record, "epilogue_multicast") for record in self.faults()))
        if report.status != "ok":
            raise RuntimeError(f"epilogue_multicast in emulation: {report.status}: {report.message}")

    def faults(self) -> list:
        """FaultRecords (kernels/fault.py puts them in words) that the process's ranks have left."""
        records = (_C.read_fault(self._host.address + rank * _RECORD_BYTES) for rank in range(self.num_ranks))
        return [record for record in records if record is not None]

    def acknowledge_faults(self) -> None:
        """Tells the waiting kernels that their records were read; they then trap."""
        for rank in range(self.num_ranks):
            _C.acknowledge_fault(self._host.address + rank * _RECORD_BYTES)

    def params(self, tensors: Sequence[RankTensors], layer: int = 0):
        """abi::EpilogueMulticastParams of a launch. Raises ValueError as run does."""
        if len(tensors) != self.num_ranks:
            raise ValueError(f"{len(tensors)} ranks' tensors are not those of {self.num_ranks}")
        rows = tensors[0].input.shape[0]
        at = self.workspaces.layout
        if not 1 <= rows <= at.max_rows:
            raise ValueError(f"rows {rows} is outside 1..{at.max_rows}")
        params = _C.abi.EpilogueMulticastParams()
        params.product, params.at, params.ranks_in_launch = self._product(rows), at, self.num_ranks
        params.blocks_per_rank, params.layer, params.rms_eps = self.blocks_per_rank, layer, self.rms_eps
        params.norm_weight, params.multicast = self._norm_weight.data_ptr(), self.workspaces.multicast
        for rank, address in enumerate(self.workspaces.addresses):
            params.set_workspace(rank, address)
        for index, one in enumerate(tensors):
            of = f" of rank {self.workspaces.rank + index}"
            require_tensor("input" + of, one.input, (rows, self.k_extent), torch.bfloat16, self.device)
            for name in ("residual", "sum", "normed"):
                require_tensor(name + of, getattr(one, name), (rows, self.hidden), torch.bfloat16, self.device)
            params.set_tensors(index, one.input.data_ptr(), one.residual.data_ptr(), one.sum.data_ptr(), one.normed.data_ptr())
        return params

    def _product(self, rows: int):
        """What tiles and ring read of a step."""
        product = _C.abi.DecodeStepParams()
        product.rows, product.num_stages, product.rank = rows, NUM_STAGES, self.workspaces.rank
        num_tiles = self.hidden // abi.TILE_ROWS
        k_panel, product.max_tiles_multi_panel, product.max_panel_bytes, product.shared = self._panel(rows, -(-num_tiles // self.blocks_per_rank))
        product.set_op(abi.OP_INDEX["out_proj"], self.k_extent, k_panel, num_tiles)
        product.deadline_ns = int(self.deadline_s * 1e9)
        product.maps, product.fault = self._maps.data_ptr(), self._host.address
        return product

    def _panel(self, rows: int, tiles_of_block: int):
        """(k_panel, accumulators, panel bytes, shared memory) with the largest panel that fits: all of K, or stages of it."""
        stage_k = abi.stage_k(2)
        for k_panel in (self.k_extent, *range((self.k_extent - 1) // stage_k * stage_k, 0, -stage_k)):
            tiles = 0 if k_panel == self.k_extent else tiles_of_block
            panel_bytes = abi.panel_bytes(rows, k_panel)
            shared = abi.smem_layout(rows, panel_bytes, tiles, NUM_STAGES)
            if shared.total_bytes <= SHARED_MEMORY_BYTES:
                return k_panel, tiles, panel_bytes, shared
        raise ValueError(f"{tiles_of_block} tiles a block of K {self.k_extent} and {rows} rows do not fit {SHARED_MEMORY_BYTES} bytes of shared memory")
