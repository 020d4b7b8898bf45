"""fused_moe: the MoE of a DeepSeek-V4.1 layer, router to combined output, in one persistent launch; or a rank's share of it, and the sum over ranks.
If asked to, mHC's mix and post of the layer's second hyper-connection are in it.

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
from sgl_lowlatency.kernels.host_words import FAULT_BYTES, GROUP_BYTES, HostWords, LaunchCounts, kernel_device
from sgl_lowlatency.kernels.hyper_connection import HyperConnection, fill_streams
from sgl_lowlatency.kernels.symmetric_workspace import MAX_RANKS, MappedWorkspaces

__all__ = ["MAX_ROWS", "MAX_TOP_K", "POINTS", "FusedMoe", "FusedMoeWeights", "RoutingRecord", "rank_intermediate"]

MAX_ROWS: int = _C.abi.kMoeMaxRows
MAX_TOP_K: int = _C.abi.kMoeMaxTopK
POINTS: tuple[str, ...] = tuple(_C.abi.kMoePointNames)  # of a block's way through a launch: what it has begun or done
MAX_HIDDEN: int = _C.abi.kMoeMaxHidden
MAX_INTERMEDIATE: int = _C.abi.kMoeMaxIntermediate
MAX_SCALE_BYTE: int = _C.abi.kMoeMaxScaleByte  # e8m0, of FP4: 2^1
SMEM_BYTES: int = _C.abi.kMoeSmemBytes  # of one block on sm_90a, sm_100a and sm_103a
MAX_SHARED_SCALE = 2.0**7  # of FP8
MIN_SHARED_SCALE = 2.0**-100


def rank_intermediate(intermediate: int, num_ranks: int) -> int:
    """Channels of every expert, and of the shared one, that each of num_ranks ranks has. Raises ValueError where the kernel has no tiles for them."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"num_ranks {num_ranks} is outside 1..{MAX_RANKS}")
    share, rest = divmod(intermediate, num_ranks)
    if rest or share % _C.abi.kMoeStepK or not 0 < share <= MAX_INTERMEDIATE:
        raise ValueError(
            f"intermediate {intermediate} over {num_ranks} ranks is {intermediate / num_ranks:g} channels a rank, not a multiple of "
            f"{_C.abi.kMoeStepK} up to {MAX_INTERMEDIATE}: FP4 is stored in blocks of so many; use fewer ranks, or expert parallelism"
        )
    return share


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

    symmetric: of a tensor-parallel group, whose rank `symmetric.rank` this object is: workspaces of `hidden`, at least max_rows and three copies, for
    this kernel alone. intermediate and weights are then the rank's share (rank_intermediate), router and biases whole. All ranks launch the same
    rows in the same order; out is the sum over ranks, the same bits on each. A wait for a rank lasts half of deadline_s.

    counts: launches of the layers that it was told to count. smem_limit: bytes of shared memory that a block is to stay within; with fewer the rings
    are shorter.
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
        symmetric: MappedWorkspaces | None = None,
        smem_limit: int = SMEM_BYTES,
    ):
        self.device = kernel_device(device)
        self._smem_limit = smem_limit
        self.hidden, self.intermediate, self.num_experts, self.top_k = hidden, intermediate, num_experts, top_k
        self.max_rows, self.grid, self.symmetric = max_rows, grid, symmetric
        if not 1 <= max_rows <= MAX_ROWS:
            raise ValueError(f"max_rows {max_rows} is outside 1..{MAX_ROWS}")
        for name, value, most in (("hidden", hidden, MAX_HIDDEN), ("intermediate", intermediate, MAX_INTERMEDIATE)):
            if not 0 < value <= most or value % _C.abi.kMoeStepK:
                raise ValueError(f"{name} {value} is not a multiple of {_C.abi.kMoeStepK} up to {most}")
        if symmetric is not None:
            rank = self._require_symmetric(symmetric, rank)
        self.emulation = emulation or EmulationOptions()
        self.last_report = None  # of the newest emulated launch
        self._failure: str | None = None
        self._geometry = _C.abi.MoeGeometry(hidden, intermediate, num_experts, top_k)
        self._words = _C.moe_handover(self._geometry, max_rows).total_words
        self._workspace = torch.full((2 * self._words,), -1, dtype=torch.int32, device=self.device)  # abi::kUnwritten
        self._state = torch.zeros(_C.abi.kMoeStateBytes, dtype=torch.uint8, device=self.device)
        self._host = HostWords(self.device, FAULT_BYTES + GROUP_BYTES + (MAX_ROWS + 1) * 8)  # the fault record, whom it must tell, counts
        self.counts = LaunchCounts(self._host.address + FAULT_BYTES + GROUP_BYTES, MAX_ROWS)
        if symmetric is not None:
            symmetric.name_in(self._host.address, self._host.address + FAULT_BYTES)
        self._deadline_ns, self._rank = int(deadline_s * 1e9), rank
        shared_bytes = self.shared_bytes
        if shared_bytes > smem_limit:
            raise ValueError(f"hidden {hidden} and intermediate {intermediate} need {shared_bytes} bytes of shared memory; a block has {smem_limit}")
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                blocks = _C.fused_moe_max_blocks(shared_bytes) if symmetric is None else _C.parallel_moe_max_blocks(shared_bytes, False)
            if blocks < grid:
                raise RuntimeError(f"fused_moe needs {grid} blocks resident at once; this GPU holds {blocks}")

    @property
    def extra_bytes(self) -> int:
        """Device bytes that this object holds beside the tensors and workspaces it was given."""
        return self._workspace.numel() * 4 + self._state.numel()

    @property
    def shared_bytes(self) -> int:
        """Of a block's shared memory, at most: fewer rows leave more for the rings."""
        return max(self._shared(rows).total_bytes for rows in range(1, self.max_rows + 1))

    def _shared(self, rows: int):
        return _C.moe_smem(self._geometry, rows, self._smem_limit)

    def prepare(self, weights: FusedMoeWeights, layer: int = 0, hyper: HyperConnection | None = None):
        """A layer for `launch`. Reads every scale once. layer: its number in fault records of ranks, 0..65535. hyper: the MoE's, whole on every rank;
        without it no launch takes streams. Raises ValueError naming the tensor that does not fit."""
        self._require_weights(weights)
        if hyper is not None:
            hyper.require(self.hidden, self.device)
        params = _C.abi.FusedMoeParams() if self.symmetric is None else _C.abi.ParallelMoeParams()
        if self.symmetric is not None:
            params.symmetric, params.layer = self.symmetric.layout, layer
            for rank, address in enumerate(self.symmetric.addresses):
                params.set_workspace(rank, address)
        params.geometry, params.rank, params.deadline_ns = self._geometry, self._rank, self._deadline_ns
        params.routed_scaling, params.swiglu_limit, params.alt_token_id = weights.routed_scaling, weights.swiglu_limit, weights.alt_token_id
        for name in ("bias", "gate_up_scale", "down_scale", "shared_gate_up_scale", "shared_down_scale"):
            setattr(params, name, getattr(weights, name).data_ptr())
        maps = self._maps(weights)
        params.maps = maps.data_ptr()
        params.bias_alt = 0 if weights.bias_alt is None else weights.bias_alt.data_ptr()
        params.workspace, params.generation_words = self._workspace.data_ptr(), self._words
        params.state, params.fault = self._state.data_ptr(), self._host.address
        if hyper is not None:
            hyper.prepare(params.hyper)
        return _Layer(params, weights, maps, hyper)

    def launch(
        self,
        layer: _Layer,
        x: torch.Tensor,
        out: torch.Tensor | None,
        token_ids: torch.Tensor | None = None,
        num_live_rows: torch.Tensor | None = None,
        record: RoutingRecord | None = None,
        stream: int = 0,
        trace: torch.Tensor | None = None,
        streams: torch.Tensor | None = None,
        streams_out: torch.Tensor | None = None,
        coefficients: torch.Tensor | None = None,
    ) -> None:
        """out[r] = MoE of x[r], bf16 [rows, hidden] both. token_ids: int64 [rows], with a layer that has bias_alt. num_live_rows: int32 [1]; rows
        from there on have no experts, only the shared one. record: receives the choices. stream: a cudaStream_t; capturable. trace: int64 [grid,
        len(POINTS)], receives each block's times at POINTS, in ns.

        streams: bf16 [rows, 4, hidden], with a layer that has a hyper-connection: what x was combined of. streams_out, another such tensor, receives
        the residual behind the MoE, and coefficients, float32 [rows, 24], pre, post and comb [4, 4]; out may then be None.

        Raises ValueError for a tensor that does not fit; on the CPU FusedMoeFault with the kernel's own record, or RuntimeError with the emulation's
        diagnosis. On CUDA see fault(). On the CPU a rank of several is a process of its own; those of one process are VirtualMoe's.
        """
        params = self.params(layer, x, out, token_ids, num_live_rows, record, trace, streams, streams_out, coefficients)
        if self.device.type == "cpu":
            self._emulate(params, out, streams_out, coefficients)
        elif self.symmetric is None:
            _C.fused_moe_launch_cuda(params, self.grid, stream)
        else:
            _C.parallel_moe_launch_cuda(params, self.grid, stream)

    def params(
        self,
        layer: _Layer,
        x: torch.Tensor,
        out: torch.Tensor | None,
        token_ids: torch.Tensor | None = None,
        num_live_rows: torch.Tensor | None = None,
        record: RoutingRecord | None = None,
        trace: torch.Tensor | None = None,
        streams: torch.Tensor | None = None,
        streams_out: torch.Tensor | None = None,
        coefficients: torch.Tensor | None = None,
    ):
        """abi::FusedMoeParams of a launch, of a rank abi::ParallelMoeParams: the layer's own, until its next launch. Raises as launch does."""
        rows = x.shape[0]
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"rows {rows} is outside 1..{self.max_rows}")
        require_tensor("x", x, (rows, self.hidden), torch.bfloat16, self.device)
        if out is not None:
            require_tensor("out", out, (rows, self.hidden), torch.bfloat16, self.device)
        params = layer.params
        self._fill_hyper(layer, rows, out, streams, streams_out, coefficients)
        params.rows, params.shared = rows, self._shared(rows)
        params.x, params.out = x.data_ptr(), 0 if out is None else out.data_ptr()
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
        return params

    def fault(self):
        """The FaultRecord of a launch that ended itself (kernels/fault.py puts it in words), or None."""
        return _C.read_fault(self._host.address)

    def acknowledge_fault(self) -> None:
        """Tells the waiting kernel that its record was read; it then traps."""
        _C.acknowledge_fault(self._host.address)

    def regions(
        self, out: torch.Tensor | None, streams_out: torch.Tensor | None = None, coefficients: torch.Tensor | None = None
    ) -> list[tuple[str, int, int, bool]]:
        """Memory whose ordering host emulation checks: (name, address, bytes, reads too). Of what a launch writes, what is there."""
        named = {"workspace": self._workspace, "state": self._state, "out": out, "streams_out": streams_out, "coefficients": coefficients}
        found = [(name, t.data_ptr(), t.numel() * t.element_size(), True) for name, t in named.items() if t is not None]
        if self.symmetric is not None:
            found.append(("symmetric", self.symmetric.addresses[self.symmetric.rank], self.symmetric.layout.total_bytes, True))
        return found

    def _fill_hyper(
        self, layer: _Layer, rows: int, out: torch.Tensor | None, streams: torch.Tensor | None, streams_out: torch.Tensor | None,
        coefficients: torch.Tensor | None,
    ) -> None:  # fmt: skip
        params = layer.params.hyper
        params.streams = params.streams_out = params.coefficients = 0
        if streams is None:
            named = {"out": out is None, "streams_out": streams_out is not None, "coefficients": coefficients is not None}
            for name, is_wrong in named.items():
                if is_wrong:
                    raise ValueError(f"{name} is {'missing' if name == 'out' else 'there'} in a launch without streams: pass streams too")
            return
        if layer.hyper is None:
            raise ValueError("streams are there, but the layer was prepared without a hyper-connection: pass prepare its hyper")
        if streams_out is None:
            raise ValueError("streams_out is missing: a launch with streams leaves those behind the MoE there")
        fill_streams(params, streams, streams_out, coefficients, (rows, self.hidden), self.device)

    def _require_symmetric(self, symmetric: MappedWorkspaces, rank: int) -> int:
        """The rank."""
        at = symmetric.layout
        if at.hidden != self.hidden or at.max_rows < self.max_rows:
            raise ValueError(f"the workspaces have hidden {at.hidden} and {at.max_rows} rows; needed are {self.hidden} and {self.max_rows}")
        if rank not in (0, symmetric.rank):
            raise ValueError(f"rank {rank} is not {symmetric.rank}, the workspaces' own")
        return symmetric.rank

    def _maps(self, w: FusedMoeWeights) -> torch.Tensor:
        """abi::FusedMoeParams::maps, in the order of abi::MoeOp."""
        box = _C.abi.WeightBox
        matrices = (
            (w.router, self.num_experts, 1, 2, box.wide),
            (w.shared_gate_up, 2 * self.intermediate, 2, 1, box.pair),
            (w.gate_up, self.num_experts * 2 * self.intermediate, 2 * self.num_experts, 1, box.fp4_pair),
            (w.shared_down, self.hidden, 1, 1, box.pair),
            (w.down, self.num_experts * self.hidden, 1, 1, box.fp4_pair),
        )
        is_cuda = self.device.type == "cuda"
        packed = b"".join(
            _C.pack_weight_maps([(tensor.data_ptr(), rows, tensor.shape[-1], parts, element_bytes)], is_cuda=is_cuda, box=of)
            for tensor, rows, parts, element_bytes, of in matrices
        )
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self.device)

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

    def _emulate(self, params, *outputs: torch.Tensor | None) -> None:
        if self._failure is not None:  # what a launch that ended itself left is no state to start from
            raise FusedMoeFault(f"an earlier launch failed: {self._failure}")
        options = self.emulation
        regions = self.regions(*outputs) if options.check_order else []
        if self.symmetric is None:
            self.last_report = report = _C.fused_moe_emulate(params, self.grid, options.seed, options.planted, options.starvation, regions)
        else:
            self.last_report = report = _C.parallel_moe_emulate(
                [[params]], [self.grid], seed=options.seed, planted=options.planted, starvation=options.starvation, regions=regions,
                is_shared=self.symmetric.layout.num_ranks > 1,
            )
        record = self.fault()
        if record is not None:
            self._failure = describe_moe_fault(record)
            raise FusedMoeFault(self._failure)
        if report.status != "ok":
            self._failure = f"fused_moe in emulation: {report.status}: {report.message}"
            raise RuntimeError(self._failure)


class _Layer:
    """A layer's parameters, and its tensors, which it keeps alive."""

    def __init__(self, params, weights: FusedMoeWeights, maps: torch.Tensor, hyper: HyperConnection | None):
        self.params, self.weights, self._maps, self.hyper = params, weights, maps, hyper
