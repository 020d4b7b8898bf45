"""fused_moe: the MoE of a DeepSeek-V4.1 layer, router to combined output, in one persistent launch.

CUDA tensors run the CUDA kernel, CPU tensors the same source in host emulation.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import require_tensor
from sgl_lowlatency.kernels.fault import FusedMoeFault, describe_moe_fault
from sgl_lowlatency.kernels.host_words import FAULT_BYTES, HostWords, kernel_device

__all__ = ["MAX_ROWS", "MAX_TOP_K", "POINTS", "FusedMoe", "FusedMoeWeights", "RoutingRecord"]

MAX_ROWS: int = _C.abi.kMoeMaxRows
MAX_TOP_K: int = _C.abi.kMoeMaxTopK
POINTS: tuple[str, ...] = tuple(_C.abi.kMoePointNames)  # of a block's way through a launch: what it has begun or done
MAX_HIDDEN: int = _C.abi.kMoeMaxHidden
MAX_INTERMEDIATE: int = _C.abi.kMoeMaxIntermediate
MAX_SCALE_BYTE: int = _C.abi.kMoeMaxScaleByte  # e8m0, of FP4: 2^1
MAX_SHARED_SCALE = 2.0**7  # of FP8
MIN_SHARED_SCALE = 2.0**-100
_SMEM_BYTES = 232448  # of one block on sm_90a, sm_100a and sm_103a


@dataclasses.dataclass(frozen=True)
class FusedMoeWeights:
    """A layer's MoE as SGLang holds it after load on sm_90, read in place. E experts, H hidden, I intermediate, multiples of 128; E of 16.

    router: bf16 [E, H]. bias: float32 [E]. gate_up: uint8 [E, 2I, H / 2], FP4 e2m1, rows up | gate; gate_up_scale: uint8 [E, 2I / 64, H / 128, 16,
    16], e8m0 of 32 columns. down: uint8 [E, H, I / 2]; down_scale: uint8 [E, H / 64, I / 128, 16, 16]. FP4 and its scales are interleaved for sm_90.
    shared_gate_up: float8_e4m3fn [2I, H], rows gate | up; shared_gate_up_scale: float32 [2I / 32, H / 32]. shared_down: [H, I]; shared_down_scale:
    float32 [H / 32, I / 32]; powers of two. bias_alt: float32 [E], of tokens with id alt_token_id, or None. swiglu_limit: inf for none.
    """

    router: torch.Tensor
    bias: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    shared_gate_up: torch.Tensor
    shared_gate_up_scale: torch.Tensor
    shared_down: torch.Tensor
    shared_down_scale: torch.Tensor
    top_k: int
    routed_scaling: float
    swiglu_limit: float = math.inf
    bias_alt: torch.Tensor | None = None
    alt_token_id: int = -1


@dataclasses.dataclass(frozen=True)
class RoutingRecord:
    """What a launch chose. ids: int32 [rows, top_k] by rank, -1 for none. weights: float32 [rows, top_k]. logits: float32 [rows, E]."""

    ids: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor


class FusedMoe:
    """Owns the workspace of the kernel and what outlives its launches, and launches it; the layers of a model share one.

    geometry: of `weights`' shapes; every layer has them. max_rows: of a launch, up to MAX_ROWS. grid: blocks, at most one an SM. deadline_s: of every
    wait in the kernel. Raises ValueError for sizes that do not fit, RuntimeError when the grid cannot be resident on the GPU.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        max_rows: int,
        device: torch.device,
        grid: int,
        deadline_s: float,
        rank: int = 0,
        emulation: EmulationOptions | None = None,
    ):
        self.device = kernel_device(device)
        self.hidden, self.intermediate, self.num_experts, self.top_k = hidden, intermediate, num_experts, top_k
        self.max_rows, self.grid = max_rows, grid
        if not 1 <= max_rows <= MAX_ROWS:
            raise ValueError(f"max_rows {max_rows} is outside 1..{MAX_ROWS}")
        for name, value, most in (("hidden", hidden, MAX_HIDDEN), ("intermediate", intermediate, MAX_INTERMEDIATE)):
            if not 0 < value <= most or value % _C.abi.kMoeStepK:
                raise ValueError(f"{name} {value} is not a multiple of {_C.abi.kMoeStepK} up to {most}")
        self.emulation = emulation or EmulationOptions()
        self.last_report = None  # of the newest emulated launch
        self._failure: str | None = None
        self._geometry = _C.abi.MoeGeometry(hidden, intermediate, num_experts, top_k)
        self._words = _C.moe_handover(self._geometry, max_rows).total_words
        self._workspace = torch.full((2 * self._words,), -1, dtype=torch.int32, device=self.device)  # abi::kUnwritten
        self._state = torch.zeros(_C.abi.kMoeStateBytes, dtype=torch.uint8, device=self.device)
        self._host = HostWords(self.device, FAULT_BYTES)
        self._deadline_ns, self._rank = int(deadline_s * 1e9), rank
        shared_bytes = _C.moe_smem(self._geometry, max_rows).total_bytes
        if shared_bytes > _SMEM_BYTES:
            raise ValueError(f"hidden {hidden} and intermediate {intermediate} need {shared_bytes} bytes of shared memory; a block has {_SMEM_BYTES}")
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                blocks = _C.fused_moe_max_blocks(shared_bytes)
            if blocks < grid:
                raise RuntimeError(f"fused_moe needs {grid} blocks resident at once; this GPU holds {blocks}")

    @property
    def extra_bytes(self) -> int:
        """Device bytes that this object holds beside the tensors it was given."""
        return self._workspace.numel() * 4 + self._state.numel()

    def prepare(self, weights: FusedMoeWeights):
        """A layer for `launch`. Reads every scale once. Raises ValueError naming the tensor that does not fit."""
        self._require_weights(weights)
        params = _C.abi.FusedMoeParams()
        params.geometry, params.rank, params.deadline_ns = self._geometry, self._rank, self._deadline_ns
        params.routed_scaling, params.swiglu_limit, params.alt_token_id = weights.routed_scaling, weights.swiglu_limit, weights.alt_token_id
        for name in ("router", "bias", "gate_up", "gate_up_scale", "down", "down_scale", "shared_gate_up", "shared_gate_up_scale", "shared_down",
                     "shared_down_scale"):  # fmt: skip
            setattr(params, name, getattr(weights, name).data_ptr())
        params.bias_alt = 0 if weights.bias_alt is None else weights.bias_alt.data_ptr()
        params.workspace, params.generation_words = self._workspace.data_ptr(), self._words
        params.state, params.fault = self._state.data_ptr(), self._host.address
        return _Layer(params, weights)

    def launch(
        self,
        layer: _Layer,
        x: torch.Tensor,
        out: torch.Tensor,
        token_ids: torch.Tensor | None = None,
        num_live_rows: torch.Tensor | None = None,
        record: RoutingRecord | None = None,
        stream: int = 0,
        trace: torch.Tensor | None = None,
    ) -> None:
        """out[r] = MoE of x[r], bf16 [rows, hidden] both. token_ids: int64 [rows], with a layer that has bias_alt. num_live_rows: int32 [1]; rows
        from there on have no experts, only the shared one. record: receives the choices. stream: a cudaStream_t; capturable. trace: int64 [grid,
        len(POINTS)], receives each block's times at POINTS, in ns.

        Raises ValueError for a tensor that does not fit; on the CPU FusedMoeFault with the kernel's own record, or RuntimeError with the emulation's
        diagnosis. On CUDA see fault().
        """
        rows = x.shape[0]
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"rows {rows} is outside 1..{self.max_rows}")
        require_tensor("x", x, (rows, self.hidden), torch.bfloat16, self.device)
        require_tensor("out", out, (rows, self.hidden), torch.bfloat16, self.device)
        params = layer.params
        params.rows, params.shared = rows, _C.moe_smem(self._geometry, rows)
        params.x, params.out = x.data_ptr(), out.data_ptr()
        params.token_ids = params.num_live_rows = params.out_ids = params.out_weights = params.out_logits = 0
        if layer.weights.bias_alt is not None:
            if token_ids is None:
                raise ValueError("token_ids are missing: the layer has a bias_alt")
            require_tensor("token_ids", token_ids, (rows,), torch.int64, self.device)
            params.token_ids = token_ids.data_ptr()
        if num_live_rows is not None:
            require_tensor("num_live_rows", num_live_rows, (1,), torch.int32, self.device)
            params.num_live_rows = num_live_rows.data_ptr()
        if record is not None:
            require_tensor("record.ids", record.ids, (rows, self.top_k), torch.int32, self.device)
            require_tensor("record.weights", record.weights, (rows, self.top_k), torch.float32, self.device)
            require_tensor("record.logits", record.logits, (rows, self.num_experts), torch.float32, self.device)
            params.out_ids, params.out_weights, params.out_logits = record.ids.data_ptr(), record.weights.data_ptr(), record.logits.data_ptr()
        params.trace = 0
        if trace is not None:
            require_tensor("trace", trace, (self.grid, len(POINTS)), torch.int64, self.device)
            params.trace = trace.data_ptr()
        if self.device.type == "cuda":
            _C.fused_moe_launch_cuda(params, self.grid, stream)
        else:
            self._emulate(params, out)

    def fault(self):
        """The FaultRecord of a launch that ended itself (kernels/fault.py puts it in words), or None."""
        return _C.read_fault(self._host.address)

    def acknowledge_fault(self) -> None:
        """Tells the waiting kernel that its record was read; it then traps."""
        _C.acknowledge_fault(self._host.address)

    def _require_weights(self, w: FusedMoeWeights) -> None:
        e, h, i, device = self.num_experts, self.hidden, self.intermediate, self.device
        if w.top_k != self.top_k:
            raise ValueError(f"top_k {w.top_k} is not {self.top_k}")
        require_tensor("router", w.router, (e, h), torch.bfloat16, device)
        require_tensor("bias", w.bias, (e,), torch.float32, device)
        if w.bias_alt is not None:
            require_tensor("bias_alt", w.bias_alt, (e,), torch.float32, device)
        require_tensor("gate_up", w.gate_up, (e, 2 * i, h // 2), torch.uint8, device)
        require_tensor("gate_up_scale", w.gate_up_scale, (e, 2 * i // 64, h // 128, 16, 16), torch.uint8, device)
        require_tensor("down", w.down, (e, h, i // 2), torch.uint8, device)
        require_tensor("down_scale", w.down_scale, (e, h // 64, i // 128, 16, 16), torch.uint8, device)
        require_tensor("shared_gate_up", w.shared_gate_up, (2 * i, h), torch.float8_e4m3fn, device)
        require_tensor("shared_gate_up_scale", w.shared_gate_up_scale, (2 * i // 32, h // 32), torch.float32, device)
        require_tensor("shared_down", w.shared_down, (h, i), torch.float8_e4m3fn, device)
        require_tensor("shared_down_scale", w.shared_down_scale, (h // 32, i // 32), torch.float32, device)
        for name in ("gate_up", "gate_up_scale", "down", "down_scale"):
            if getattr(w, name).data_ptr() % 16:
                raise ValueError(f"{name}: address {getattr(w, name).data_ptr():#x} is not 16-byte aligned")
        for name in ("gate_up_scale", "down_scale"):
            largest = int(getattr(w, name).max())
            if largest > MAX_SCALE_BYTE:
                raise ValueError(f"{name}: e8m0 byte {largest} is above {MAX_SCALE_BYTE} (2^{MAX_SCALE_BYTE - 127})")
        for name in ("shared_gate_up_scale", "shared_down_scale"):
            scale = getattr(w, name)
            is_fit = (torch.frexp(scale)[0] == 0.5) & (scale >= MIN_SHARED_SCALE) & (scale <= MAX_SHARED_SCALE)
            if not bool(is_fit.all()):
                raise ValueError(f"{name}: {scale[~is_fit][0].item()} is no power of two from 2^-100 to 2^7")

    def _emulate(self, params, out: torch.Tensor) -> None:
        if self._failure is not None:  # what a launch that ended itself left is no state to start from
            raise FusedMoeFault(f"an earlier launch failed: {self._failure}")
        options, regions = self.emulation, []
        if options.check_order:
            named = {"workspace": self._workspace, "state": self._state, "out": out}
            regions = [(name, t.data_ptr(), t.numel() * t.element_size(), True) for name, t in named.items()]
        self.last_report = report = _C.fused_moe_emulate(params, self.grid, options.seed, options.planted, options.starvation, regions)
        record = self.fault()
        if record is not None:
            self._failure = describe_moe_fault(record)
            raise FusedMoeFault(self._failure)
        if report.status != "ok":
            self._failure = f"fused_moe in emulation: {report.status}: {report.message}"
            raise RuntimeError(self._failure)


class _Layer:
    """A layer's parameters, and its tensors, which it keeps alive."""

    def __init__(self, params, weights: FusedMoeWeights):
        self.params, self.weights = params, weights
