"""attention_out: a DeepSeek-V4.1 layer from attention's heads to the normed input of its MoE, in one persistent launch.

CUDA tensors run the CUDA kernel, CPU tensors the same source in host emulation.
"""

from __future__ import annotations

import dataclasses

import torch

from sgl_lowlatency.kernels import abi  # noqa: F401  first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import require_tensor
from sgl_lowlatency.kernels.fault import AttentionOutFault, describe_attention_out_fault
from sgl_lowlatency.kernels.host_words import FAULT_BYTES, HostWords, kernel_device

__all__ = ["MAX_ROWS", "MIXES", "POINTS", "STREAMS", "AttentionOut", "AttentionOutSizes", "AttentionOutWeights"]

MAX_ROWS: int = _C.abi.kSliceMaxRows
STREAMS: int = _C.abi.kStreams
MIXES: int = _C.abi.kMixes  # coefficients of a row: pre [4], post [4], comb [4, 4]
MAX_PANEL: int = _C.abi.kAttnOutMaxPanel
MAX_LATENT: int = _C.abi.kAttnOutMaxLatent
POINTS: tuple[str, ...] = tuple(_C.abi.kAttnOutPointNames)  # of a block's way through a launch: what it has begun or done
MAX_SCALE, MIN_SCALE = 2.0**7, 2.0**-100  # of wo_b
_BLOCK: int = _C.abi.kSliceScaleBlock


@dataclasses.dataclass(frozen=True)
class AttentionOutSizes:
    """hidden: a multiple of 128. heads of head_dim values, the last rope_dim of them rotated, in `groups` equal groups; each is projected to `lora`
    values. A group has up to 4,096 values, a multiple of 64, all groups' projections are up to 8,192, a multiple of 128; lora is one of 16."""

    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    groups: int
    lora: int

    @property
    def group_width(self) -> int:
        return self.heads // self.groups * self.head_dim

    @property
    def latent(self) -> int:
        return self.groups * self.lora

    def require(self) -> None:
        """Raises ValueError naming the first size that does not fit."""
        checks = (
            ("hidden", self.hidden, 128, None), ("groups", self.groups, 1, None), ("heads", self.heads, max(self.groups, 1), None),
            ("head_dim", self.head_dim, 8, None), ("rope_dim", self.rope_dim, 8, self.head_dim), ("lora", self.lora, 16, None),
            ("a group's width", self.group_width if self.groups > 0 else 0, 64, MAX_PANEL), ("latent", self.latent, 128, MAX_LATENT),
        )  # fmt: skip
        for name, value, multiple, most in checks:
            if value <= 0 or value % multiple or (most is not None and value > most):
                raise ValueError(f"{name} {value} is not a positive multiple of {multiple}{'' if most is None else f' up to {most}'}")


@dataclasses.dataclass(frozen=True)
class AttentionOutWeights:
    """A layer's tensors as SGLang holds them after load on sm_90, read in place. H hidden, G groups, L lora, K a group's width, P positions.

    wo_a: bf16 [G * L, K]. wo_b: float8_e4m3fn [H, G * L]; wo_b_scale: float32 [H / 32, G * L / 32], powers of two. freqs_cis: complex64 [P,
    rope_dim / 2]. Of the attention's hyper-connection: mix float32 [24, 4 H], mix_scale float32 [3], mix_base float32 [24]. norm: bf16 [H], of the
    sublayer behind.
    """

    wo_a: torch.Tensor
    wo_b: torch.Tensor
    wo_b_scale: torch.Tensor
    freqs_cis: torch.Tensor
    mix: torch.Tensor
    mix_scale: torch.Tensor
    mix_base: torch.Tensor
    norm: torch.Tensor
    sinkhorn_iterations: int
    mix_eps: float
    mix_rms_eps: float
    norm_eps: float


class AttentionOut:
    """Owns the workspace of the kernel and what outlives its launches, and launches it; the layers of a model share one.

    sizes: of every layer. max_rows: of a launch, up to MAX_ROWS. grid: blocks, at most one an SM. deadline_s: of every wait in the kernel. Raises
    ValueError for sizes that do not fit, RuntimeError when the grid cannot be resident on the GPU.
    """

    def __init__(
        self,
        sizes: AttentionOutSizes,
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
        self._geometry = _C.abi.AttnOutGeometry(*dataclasses.astuple(sizes))
        self._words = max(_C.attn_out_handover(self._geometry, rows).total_words for rows in range(1, max_rows + 1))
        self._workspace = torch.full((2 * self._words,), -1, dtype=torch.int32, device=self.device)  # abi::kUnwritten
        self._state = torch.zeros(_C.abi.kMoeStateBytes, dtype=torch.uint8, device=self.device)
        self._host = HostWords(self.device, FAULT_BYTES)
        self._deadline_ns, self._rank = int(deadline_s * 1e9), rank
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                blocks = min(_C.attention_out_max_blocks(rows, self._smem(rows).total_bytes) for rows in range(1, max_rows + 1))
            if blocks < grid:
                raise RuntimeError(f"attention_out needs {grid} blocks resident at once; this GPU holds {blocks}")

    @property
    def extra_bytes(self) -> int:
        """Device bytes that this object holds beside the tensors it was given; a layer adds 256."""
        return self._workspace.numel() * 4 + self._state.numel()

    def prepare(self, weights: AttentionOutWeights):
        """A layer for `launch`. Reads every scale once. Raises ValueError naming the tensor that does not fit."""
        self._require_weights(weights)
        w, params = weights, _C.abi.AttentionOutParams()
        params.geometry, params.rank, params.deadline_ns = self._geometry, self._rank, self._deadline_ns
        params.sinkhorn_iterations = w.sinkhorn_iterations
        params.mix_eps, params.mix_rms_eps, params.norm_eps = w.mix_eps, w.mix_rms_eps, w.norm_eps
        params.freqs, params.max_position = w.freqs_cis.data_ptr(), w.freqs_cis.shape[0]
        params.mix, params.mix_scale, params.mix_base, params.norm = (t.data_ptr() for t in (w.mix, w.mix_scale, w.mix_base, w.norm))
        matrices = [(w.wo_a.data_ptr(), *w.wo_a.shape, 1, 2), (w.wo_b.data_ptr(), *w.wo_b.shape, 1, 1)]
        packed = _C.pack_weight_maps(matrices, is_cuda=self.device.type == "cuda")
        maps = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self.device)
        params.maps, params.scales = maps.data_ptr(), w.wo_b_scale.data_ptr()
        params.workspace, params.generation_words = self._workspace.data_ptr(), self._words
        params.state, params.fault = self._state.data_ptr(), self._host.address
        return _Layer(params, weights, maps)

    def launch(
        self,
        layer: _Layer,
        x: torch.Tensor,
        positions: torch.Tensor,
        streams: torch.Tensor,
        streams_out: torch.Tensor,
        out: torch.Tensor,
        coefficients: torch.Tensor | None = None,
        stream: int = 0,
        trace: torch.Tensor | None = None,
    ) -> None:
        """x: bf16 [rows, heads, head_dim], attention's output, rotated still; its rows may be further apart. positions: int64 [rows]. streams: bf16
        [rows, 4, hidden], the residual that the layer was given; streams_out: another such tensor, receives the residual behind attention. out: bf16
        [rows, hidden], receives the input of the sublayer behind. coefficients: float32 [rows, 24], receives pre, post and comb [4, 4].
        stream: a cudaStream_t; capturable. trace: int64 [grid, len(POINTS)], receives each block's times at POINTS, in ns.

        Raises ValueError for a tensor that does not fit; on the CPU AttentionOutFault with the kernel's own record, or RuntimeError with the
        emulation's diagnosis. On CUDA see fault().
        """
        rows, z, bf16 = x.shape[0], self.sizes, torch.bfloat16
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"rows {rows} is outside 1..{self.max_rows}")
        self._require_heads(x)
        require_tensor("positions", positions, (rows,), torch.int64, self.device)
        require_tensor("streams", streams, (rows, STREAMS, z.hidden), bf16, self.device)
        require_tensor("streams_out", streams_out, (rows, STREAMS, z.hidden), bf16, self.device)
        require_tensor("out", out, (rows, z.hidden), bf16, self.device)
        if streams_out.data_ptr() == streams.data_ptr():
            raise ValueError("streams_out is streams, which other blocks still read when it is written")
        params = layer.params
        params.rows, params.shared, params.x_stride = rows, self._smem(rows), x.stride(0)
        params.x, params.positions, params.streams = x.data_ptr(), positions.data_ptr(), streams.data_ptr()
        params.streams_out, params.out, params.coefficients, params.trace = streams_out.data_ptr(), out.data_ptr(), 0, 0
        if coefficients is not None:
            require_tensor("coefficients", coefficients, (rows, MIXES), torch.float32, self.device)
            params.coefficients = coefficients.data_ptr()
        if trace is not None:
            require_tensor("trace", trace, (self.grid, len(POINTS)), torch.int64, self.device)
            params.trace = trace.data_ptr()
        if self.device.type == "cuda":
            _C.attention_out_launch_cuda(params, self.grid, stream)
        else:
            self._emulate(params, {"streams_out": streams_out, "out": out})

    def fault(self):
        """The FaultRecord of a launch that ended itself (kernels/fault.py puts it in words), or None."""
        return _C.read_fault(self._host.address)

    def acknowledge_fault(self) -> None:
        """Tells the waiting kernel that its record was read; it then traps."""
        _C.acknowledge_fault(self._host.address)

    def _smem(self, rows: int):
        return _C.attn_out_smem(self._geometry, rows)

    def _require_heads(self, x: torch.Tensor) -> None:
        z = self.sizes
        if tuple(x.shape[1:]) != (z.heads, z.head_dim) or x.dtype != torch.bfloat16 or x.device.type != self.device.type:
            raise ValueError(f"x: {list(x.shape)} {x.dtype} on {x.device} is not [rows, {z.heads}, {z.head_dim}] bfloat16 on {self.device}")
        if not x[0].is_contiguous() or x.stride(0) % 8 or x.stride(0) < z.heads * z.head_dim or x.data_ptr() % 16:
            raise ValueError(f"x: strides {list(x.stride())} at {x.data_ptr():#x}: heads of a row must lie together, and rows be 16-byte aligned")

    def _require_weights(self, w: AttentionOutWeights) -> None:
        z, device, f32 = self.sizes, self.device, torch.float32
        require_tensor("wo_a", w.wo_a, (z.latent, z.group_width), torch.bfloat16, device)
        require_tensor("wo_b", w.wo_b, (z.hidden, z.latent), torch.float8_e4m3fn, device)
        require_tensor("wo_b_scale", w.wo_b_scale, (z.hidden // _BLOCK, z.latent // _BLOCK), f32, device)
        require_tensor("freqs_cis", w.freqs_cis, (w.freqs_cis.shape[0], z.rope_dim // 2), torch.complex64, device)
        if w.freqs_cis.data_ptr() % 16:
            raise ValueError(f"freqs_cis: address {w.freqs_cis.data_ptr():#x} is not 16-byte aligned")
        require_tensor("mix", w.mix, (MIXES, STREAMS * z.hidden), f32, device)
        require_tensor("mix_scale", w.mix_scale, (3,), f32, device)
        require_tensor("mix_base", w.mix_base, (MIXES,), f32, device)
        require_tensor("norm", w.norm, (z.hidden,), torch.bfloat16, device)
        if w.sinkhorn_iterations < 1:
            raise ValueError(f"sinkhorn_iterations {w.sinkhorn_iterations} is below 1")
        is_fit = (torch.frexp(w.wo_b_scale)[0] == 0.5) & (w.wo_b_scale >= MIN_SCALE) & (w.wo_b_scale <= MAX_SCALE)
        if not bool(is_fit.all()):
            raise ValueError(f"wo_b_scale: {w.wo_b_scale[~is_fit][0].item()} is no power of two from 2^-100 to 2^7")

    def _emulate(self, params, outputs: dict[str, torch.Tensor]) -> None:
        if self._failure is not None:  # what a launch that ended itself left is no state to start from
            raise AttentionOutFault(f"an earlier launch failed: {self._failure}")
        options, regions = self.emulation, []
        if options.check_order:
            named = {"workspace": self._workspace, "state": self._state, **outputs}
            regions = [(name, t.data_ptr(), t.numel() * t.element_size(), True) for name, t in named.items()]
        self.last_report = report = _C.attention_out_emulate(params, self.grid, options.seed, options.planted, options.starvation, regions)
        record = self.fault()
        if record is not None:
            self._failure = describe_attention_out_fault(record)
            raise AttentionOutFault(self._failure)
        if report.status != "ok":
            self._failure = f"attention_out in emulation: {report.status}: {report.message}"
            raise RuntimeError(self._failure)


class _Layer:
    """A layer's parameters, and its tensors, which it keeps alive."""

    def __init__(self, params, weights: AttentionOutWeights, maps: torch.Tensor):
        self.params, self.weights, self.maps = params, weights, maps
