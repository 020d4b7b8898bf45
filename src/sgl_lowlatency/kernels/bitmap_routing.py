"""bitmap_routing: which experts a step's rows take, as bitmaps of rows, and the place of every expert that is taken.

CUDA tensors run the CUDA kernel, CPU tensors the same source in host emulation.
"""

from __future__ import annotations

import dataclasses

import torch

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import require_tensor
from sgl_lowlatency.kernels.fault import BitmapRoutingFault, describe_fault
from sgl_lowlatency.kernels.host_words import FAULT_BYTES, HostWords, kernel_device

__all__ = ["MAX_EXPERTS", "MAX_TOP_K", "BitmapRouting", "Routing"]

MAX_EXPERTS: int = _C.abi.kMaxExperts
MAX_TOP_K: int = _C.abi.kMaxTopK
_LOGITS_TYPES = {torch.float32: _C.abi.kLogitsTypes["float32"], torch.bfloat16: _C.abi.kLogitsTypes["bfloat16"]}


@dataclasses.dataclass(frozen=True)
class Routing:
    """A step's routing: views of one buffer, which every launch writes whole. int32 unless said otherwise.

    active_words [12]: the set of active experts, those that a row has chosen: expert e is bit e % 32 of word e // 32.
    num_active [1]: how many. row_bits [num_experts]: bit r is set where row r has chosen the expert.
    experts [num_experts]: the active experts, ascending, then -1; an expert's place is its index here.
    ids [rows, top_k]: the row's experts by rank, -1 for none. places [rows, top_k]: their places, -1 for none.
    weights [rows, top_k] float32: their weights, 0 for none.
    """

    buffer: torch.Tensor
    active_words: torch.Tensor
    num_active: torch.Tensor
    row_bits: torch.Tensor
    experts: torch.Tensor
    ids: torch.Tensor
    places: torch.Tensor
    weights: torch.Tensor


class BitmapRouting:
    """Routes steps of up to 32 rows: one launch of one block each.

    num_experts: 1..384. top_k: experts of a row, 1..32 and no more than there are. renormalizes: a row's weights are divided by their
    sum (norm_topk_prob). Raises ValueError for sizes out of range.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        device: torch.device,
        renormalizes: bool = True,
        rank: int = 0,
        emulation: EmulationOptions | None = None,
    ):
        device = kernel_device(device)
        if not 1 <= num_experts <= MAX_EXPERTS:
            raise ValueError(f"num_experts {num_experts} is outside 1..{MAX_EXPERTS}")
        if not 1 <= top_k <= min(num_experts, MAX_TOP_K):
            raise ValueError(f"top_k {top_k} is outside 1..{min(num_experts, MAX_TOP_K)}")
        self.num_experts, self.top_k, self.device, self.renormalizes, self._rank = num_experts, top_k, device, renormalizes, rank
        self.emulation = emulation or EmulationOptions()
        self.last_report = None  # of the newest emulated launch
        self._host = HostWords(device, FAULT_BYTES)

    def outputs(self, rows: int) -> Routing:
        """Memory for the routing of `rows` rows, 0..32. Raises ValueError outside that."""
        if not 0 <= rows <= abi.MAX_ROWS:
            raise ValueError(f"rows {rows} is outside 0..{abi.MAX_ROWS}")
        at = _C.routing_layout(rows, self.num_experts, self.top_k)
        buffer = torch.empty(at.out_bytes // 4, dtype=torch.int32, device=self.device)

        def words(begin: int, *shape: int) -> torch.Tensor:
            count = torch.Size(shape).numel()
            return buffer[begin // 4 : begin // 4 + count].view(shape)

        choices = (rows, self.top_k)
        return Routing(
            buffer,
            active_words=words(at.active, _C.abi.kExpertWords),
            num_active=words(at.active + _C.abi.kActiveCountOffset, 1),
            row_bits=words(at.row_bits, self.num_experts),
            experts=words(at.experts, self.num_experts),
            ids=words(at.ids, *choices),
            places=words(at.places, *choices),
            weights=words(at.weights, *choices).view(torch.float32),
        )

    def route(self, logits: torch.Tensor, out: Routing, num_live_rows: torch.Tensor | None = None, stream: int = 0) -> None:
        """Chooses as SGLang's softmax router does: by logit, equal ones by id, ascending; NaN ranks as -1e30.

        logits: [rows, num_experts] float32 or bfloat16; rows may be strided, a row is contiguous. out: of outputs(rows).
        num_live_rows: int32 [1] on the device; rows from there on choose nothing, as rows that pad a graph must. stream: a
        cudaStream_t; capturable. Raises ValueError for a tensor that does not fit.
        """
        rows = out.ids.shape[0]
        if logits.dtype not in _LOGITS_TYPES:
            raise ValueError(f"logits: dtype {logits.dtype} is neither float32 nor bfloat16")
        if tuple(logits.shape) != (rows, self.num_experts):
            raise ValueError(f"logits: shape {tuple(logits.shape)} is not {(rows, self.num_experts)}")
        if logits.device.type != self.device.type:
            raise ValueError(f"logits: device {logits.device} is not {self.device}")
        if rows and (logits.stride(1) != 1 or logits.stride(0) < self.num_experts):
            raise ValueError(f"logits: strides {tuple(logits.stride())} are not those of contiguous rows one after the other")
        params = self._params(out, num_live_rows)
        params.logits, params.logits_type = self._address(logits), _LOGITS_TYPES[logits.dtype]
        params.logits_stride = max(logits.stride(0), self.num_experts)
        self._launch(params, stream)

    def route_ids(
        self, ids: torch.Tensor, weights: torch.Tensor, out: Routing, num_live_rows: torch.Tensor | None = None, stream: int = 0
    ) -> None:
        """Places choices that are made already. ids: int32 [rows, top_k], -1 for none; an id that comes twice in a row counts as one row of
        that expert and keeps both weights. weights: float32 [rows, top_k], taken as they are.

        The rest as in route. An id outside -1..num_experts - 1 ends the launch: on the CPU BitmapRoutingFault, on CUDA see fault().
        """
        shape = tuple(out.ids.shape)
        require_tensor("ids", ids, shape, torch.int32, self.device)
        require_tensor("weights", weights, shape, torch.float32, self.device)
        params = self._params(out, num_live_rows)
        params.ids, params.weights = self._address(ids), self._address(weights)
        self._launch(params, stream)

    def fault(self):
        """The FaultRecord of a launch that ended itself (kernels/fault.py puts it in words), or None."""
        return _C.read_fault(self._host.address)

    def acknowledge_fault(self) -> None:
        """Tells the waiting kernel that its record was read; it then traps."""
        _C.acknowledge_fault(self._host.address)

    def _address(self, tensor: torch.Tensor) -> int:
        """Of a tensor without elements torch gives none, and the kernel tells its two inputs by their addresses: nothing is read there."""
        return tensor.data_ptr() or self._host.address

    def _params(self, out: Routing, num_live_rows: torch.Tensor | None):
        rows = out.ids.shape[0]
        at = _C.routing_layout(rows, self.num_experts, self.top_k)
        require_tensor("out", out.buffer, (at.out_bytes // 4,), torch.int32, self.device)
        if num_live_rows is not None:
            require_tensor("num_live_rows", num_live_rows, (1,), torch.int32, self.device)
        params = _C.abi.BitmapRoutingParams()
        params.rows, params.num_experts, params.top_k, params.at = rows, self.num_experts, self.top_k, at
        params.renormalizes, params.rank = int(self.renormalizes), self._rank
        params.num_live_rows = 0 if num_live_rows is None else num_live_rows.data_ptr()
        params.out, params.fault = out.buffer.data_ptr(), self._host.address
        return params

    def _launch(self, params, stream: int) -> None:
        if self.device.type == "cuda":
            _C.bitmap_routing_launch_cuda(params, stream)
            return
        if self.fault() is not None:
            raise BitmapRoutingFault(f"an earlier launch failed: {describe_fault(self.fault())}")
        options = self.emulation
        self.last_report = report = _C.bitmap_routing_emulate(params, options.seed, options.planted, options.starvation)
        if self.fault() is not None:
            raise BitmapRoutingFault(describe_fault(self.fault()))
        if report.status != "ok":
            raise RuntimeError(f"bitmap_routing in emulation: {report.status}: {report.message}")
