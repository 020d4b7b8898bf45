"""What the slices of a DeepSeek-V4.1 layer have alike, attention_in and attention_out: limits, workspace, layers and launches."""

from __future__ import annotations

import abc
from typing import Any

import torch

from sgl_lowlatency.kernels import abi  # noqa: F401  first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import require_tensor
from sgl_lowlatency.kernels.host_words import FAULT_BYTES, HostWords, LaunchCounts, kernel_device

MAX_ROWS: int = _C.abi.kSliceMaxRows
SCALE_BLOCK: int = _C.abi.kSliceScaleBlock  # rows and columns of an FP8 matrix that share a scale
MIN_SCALE, MAX_SCALE = 2.0**-100, 2.0**7


class Slice(abc.ABC):
    """Owns the workspace of a kernel and what outlives its launches, and launches it; the layers of a model share one.

    sizes: of every layer. max_rows: of a launch, up to MAX_ROWS. grid: blocks, at most one an SM. deadline_s: of every wait in the kernel. Raises
    ValueError for sizes that do not fit, RuntimeError when the grid cannot be resident on the GPU.

    counts: launches of the layers that it was told to count.
    """

    name: str  # of the kernel
    points: tuple[str, ...]  # of a block's way through a launch
    fault_type: type[RuntimeError]
    host_bytes: int = FAULT_BYTES  # of the host memory that a launch sees: a FaultRecord, and what a kernel has behind it

    def __init__(
        self,
        sizes: Any,
        max_rows: int,
        device: torch.device,
        grid: int,
        deadline_s: float,
        rank: int = 0,
        emulation: EmulationOptions | None = None,
    ):
        self.device = kernel_device(device)
        self.sizes, self.max_rows, self.grid = sizes, max_rows, grid
        if not 1 <= max_rows <= MAX_ROWS:
            raise ValueError(f"max_rows {max_rows} is outside 1..{MAX_ROWS}")
        sizes.require()
        self.emulation = emulation or EmulationOptions()
        self.last_report = None  # of the newest emulated launch
        self._failure: str | None = None
        self._geometry = self._geometry_of(sizes)
        self._words = max(self._handover(rows).total_words for rows in range(1, max_rows + 1))
        self._workspace = torch.full((2 * self._words,), -1, dtype=torch.int32, device=self.device)  # abi::kUnwritten
        self._state = torch.zeros(_C.abi.kMoeStateBytes, dtype=torch.uint8, device=self.device)
        self._host = HostWords(self.device, self.host_bytes + (MAX_ROWS + 1) * 8)
        self.counts = LaunchCounts(self._host.address + self.host_bytes, MAX_ROWS)
        self._deadline_ns, self._rank = int(deadline_s * 1e9), rank
        if self.device.type == "cuda":
            max_blocks = getattr(_C, f"{self.name}_max_blocks")
            with torch.cuda.device(self.device):
                blocks = min(max_blocks(rows, self._smem(rows).total_bytes) for rows in range(1, max_rows + 1))
            if blocks < grid:
                raise RuntimeError(f"{self.name} needs {grid} blocks resident at once; this GPU holds {blocks}")

    @property
    def extra_bytes(self) -> int:
        """Device bytes that this object holds beside the tensors it was given; a layer adds 256."""
        return self._workspace.numel() * 4 + self._state.numel()

    def fault(self):
        """The FaultRecord of a launch that ended itself (kernels/fault.py puts it in words), or None."""
        return _C.read_fault(self._host.address)

    def acknowledge_fault(self) -> None:
        """Tells the waiting kernel that its record was read; it then traps."""
        _C.acknowledge_fault(self._host.address)

    @abc.abstractmethod
    def _geometry_of(self, sizes: Any) -> Any: ...

    @abc.abstractmethod
    def _handover(self, rows: int) -> Any: ...

    @abc.abstractmethod
    def _smem(self, rows: int) -> Any: ...

    @abc.abstractmethod
    def _describe(self, record: Any) -> str: ...

    def _layer(self, params: Any, weights: Any, matrices: list[tuple[torch.Tensor, int]]) -> Layer:
        """Fills in what params of every slice have alike. matrices: those that stream through the
        ring, and the bytes of an element; FP8 passes in tall stages."""
        params.geometry, params.rank, params.deadline_ns = self._geometry, self._rank, self._deadline_ns
        params.freqs, params.max_position = weights.freqs_cis.data_ptr(), weights.freqs_cis.shape[0]
        is_cuda = self.device.type == "cuda"
        packed = b"".join(
            _C.pack_weight_maps([(tensor.data_ptr(), *tensor.shape, 1, element_bytes)], is_cuda=is_cuda, box=_C.abi.WeightBox.tall if element_bytes == 1 else _C.abi.WeightBox.stage)
            for tensor, element_bytes in matrices
        )
        maps = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self.device)
        params.maps = maps.data_ptr()
        params.workspace, params.generation_words = self._workspace.data_ptr(), self._words
        params.state, params.fault = self._state.data_ptr(), self._host.address
        return Layer(params, weights, maps)

    def _begin(self, params: Any, rows: int, trace: torch.Tensor | None) -> None:
        """Fills in what the launches of every slice have alike. Behind _require_num_rows."""
        params.rows, params.shared, params.trace = rows, self._smem(rows), 0
        if trace is not None:
            require_tensor("trace", trace, (self.grid, len(self.points)), torch.int64, self.device)
            params.trace = trace.data_ptr()

    def _run(self, params: Any, stream: int, outputs: dict[str, torch.Tensor]) -> None:
        """outputs: every tensor that the launch writes, by the name that checks of order report."""
        if self.device.type == "cuda":
            getattr(_C, f"{self.name}_launch_cuda")(params, self.grid, stream)
        else:
            self._emulate(params, outputs)

    def regions(self, outputs: dict[str, torch.Tensor]) -> list[tuple[str, int, int, bool]]:
        """Memory whose ordering host emulation checks: (name, address, bytes, reads too). outputs: as _run's."""
        named = {"workspace": self._workspace, "state": self._state, **outputs}
        return [(name, t.data_ptr(), extent_bytes(t), True) for name, t in named.items()]

    def _call_emulation(self, params: Any, options: EmulationOptions, regions: list[tuple[str, int, int, bool]]) -> Any:
        emulate = getattr(_C, f"{self.name}_emulate")
        return emulate(params, self.grid, options.seed, options.planted, options.starvation, regions)

    def _require_num_rows(self, rows: int) -> None:
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"rows {rows} is outside 1..{self.max_rows}")

    def _require_fp8(self, name: str, matrix: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int]) -> None:
        """matrix: float8_e4m3fn of `shape`; scale: float32, powers of two, of blocks of SCALE_BLOCK rows and columns."""
        require_tensor(name, matrix, shape, torch.float8_e4m3fn, self.device)
        require_tensor(f"{name}_scale", scale, (shape[0] // SCALE_BLOCK, shape[1] // SCALE_BLOCK), torch.float32, self.device)
        is_fit = (torch.frexp(scale)[0] == 0.5) & (scale >= MIN_SCALE) & (scale <= MAX_SCALE)
        if not bool(is_fit.all()):
            raise ValueError(f"{name}_scale: {scale[~is_fit][0].item()} is no power of two from 2^-100 to 2^7")

    def _emulate(self, params: Any, outputs: dict[str, torch.Tensor]) -> None:
        if self._failure is not None:  # what a launch that ended itself left is no state to start from
            raise self.fault_type(f"an earlier launch failed: {self._failure}")
        options = self.emulation
        regions = self.regions(outputs) if options.check_order else []
        self.last_report = report = self._call_emulation(params, options, regions)
        record = self.fault()
        if record is not None:
            self._failure = self._describe(record)
            raise self.fault_type(self._failure)
        if report.status != "ok":
            self._failure = f"{self.name} in emulation: {report.status}: {report.message}"
            raise RuntimeError(self._failure)


class Layer:
    """A layer's parameters, and its tensors, which it keeps alive."""

    def __init__(self, params: Any, weights: Any, maps: torch.Tensor):
        self.params, self.weights, self.maps = params, weights, maps


def extent_bytes(tensor: torch.Tensor) -> int:
    """From a tensor's first element to behind its last one, rows that are apart included."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
