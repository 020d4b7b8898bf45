"""attention_in: a DeepSeek-V4.1 layer from its residual streams to rotated queries and the new KV row, in one persistent launch.

CUDA tensors run the CUDA kernel, CPU tensors the same source in host emulation.
"""

from __future__ import annotations

import dataclasses

import torch

from sgl_lowlatency.kernels import abi  # noqa: F401  first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.attention_out import MAX_ROWS, MAX_SCALE, MIN_SCALE, STREAMS
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.decode_step_tensors import require_tensor
from sgl_lowlatency.kernels.fault import AttentionInFault, describe_attention_in_fault
from sgl_lowlatency.kernels.host_words import FAULT_BYTES, HostWords, kernel_device

__all__ = ["HEAD_DIM", "HEAD_ROPE", "KV_DATA_BYTES", "KV_SCALE_BYTES", "POINTS", "AttentionIn", "AttentionInSizes", "AttentionInWeights", "KvPages"]

HEAD_DIM: int = _C.abi.kHeadDim
HEAD_ROPE: int = _C.abi.kHeadRope
KV_DATA_BYTES: int = _C.abi.kKvDataBytes  # of a slot: 448 e4m3, 64 bf16
KV_SCALE_BYTES: int = _C.abi.kKvScaleBytes  # of a slot: 7 e8m0 and a byte of padding
MAX_LORA: int = _C.abi.kAttnInMaxLora
POINTS: tuple[str, ...] = tuple(_C.abi.kAttnInPointNames)  # of a block's way through a launch: what it has begun or done
_BLOCK: int = _C.abi.kSliceScaleBlock


@dataclasses.dataclass(frozen=True)
class AttentionInSizes:
    """hidden: a multiple of 128. lora: of the queries, a multiple of 128 up to 1,408. heads: of 512 values, the last 64 rotated."""

    hidden: int
    lora: int
    heads: int

    def require(self) -> None:
        """Raises ValueError naming the first size that does not fit."""
        if self.hidden <= 0 or self.hidden % 128:
            raise ValueError(f"hidden {self.hidden} is not a positive multiple of 128")
        if not 0 < self.lora <= MAX_LORA or self.lora % 128:
            raise ValueError(f"lora {self.lora} is not a multiple of 128 up to {MAX_LORA}")
        if self.heads < 1:
            raise ValueError(f"heads {self.heads} is below 1")


@dataclasses.dataclass(frozen=True)
class AttentionInWeights:
    """A layer's tensors as SGLang holds them after load on sm_90, read in place. H hidden, L lora, N heads, P positions.

    norm: bf16 [H], in front of attention. wqkv_a: float8_e4m3fn [L + 512, H], rows q | kv; wq_b: float8_e4m3fn [N * 512, L]; their scales float32 of
    blocks of 32 x 32, powers of two. q_norm: bf16 [L]. kv_norm: bf16 [512]. freqs_cis: complex64 [P, 32].
    """

    norm: torch.Tensor
    wqkv_a: torch.Tensor
    wqkv_a_scale: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    wq_b: torch.Tensor
    wq_b_scale: torch.Tensor
    freqs_cis: torch.Tensor
    norm_eps: float
    q_norm_eps: float
    kv_norm_eps: float


@dataclasses.dataclass(frozen=True)
class KvPages:
    """A layer's KV rows in SGLang's V4 layout. pages: uint8 [pages, page_bytes], whose rows may be further apart than they are long: page_size slots'
    data, KV_DATA_BYTES each, then their scales, KV_SCALE_BYTES each."""

    pages: torch.Tensor
    page_size: int


class AttentionIn:
    """Owns the workspace of the kernel and what outlives its launches, and launches it; the layers of a model share one.

    sizes: of every layer. max_rows: of a launch, up to MAX_ROWS. grid: blocks, at most one an SM. deadline_s: of every wait in the kernel. Raises
    ValueError for sizes that do not fit, RuntimeError when the grid cannot be resident on the GPU.
    """

    def __init__(
        self,
        sizes: AttentionInSizes,
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
        self._geometry = _C.abi.AttnInGeometry(sizes.hidden, sizes.lora, sizes.heads)
        self._words = _C.attn_in_handover(self._geometry, max_rows).total_words
        self._workspace = torch.full((2 * self._words,), -1, dtype=torch.int32, device=self.device)  # abi::kUnwritten
        self._state = torch.zeros(_C.abi.kMoeStateBytes, dtype=torch.uint8, device=self.device)
        self._host = HostWords(self.device, FAULT_BYTES)
        self._deadline_ns, self._rank = int(deadline_s * 1e9), rank
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                blocks = min(_C.attention_in_max_blocks(rows, self._smem(rows).total_bytes) for rows in range(1, max_rows + 1))
            if blocks < grid:
                raise RuntimeError(f"attention_in needs {grid} blocks resident at once; this GPU holds {blocks}")

    @property
    def extra_bytes(self) -> int:
        """Device bytes that this object holds beside the tensors it was given; a layer adds 256."""
        return self._workspace.numel() * 4 + self._state.numel()

    def prepare(self, weights: AttentionInWeights):
        """A layer for `launch`. Reads every scale once. Raises ValueError naming the tensor that does not fit."""
        self._require_weights(weights)
        w, params = weights, _C.abi.AttentionInParams()
        params.geometry, params.rank, params.deadline_ns = self._geometry, self._rank, self._deadline_ns
        params.norm_eps, params.q_norm_eps, params.kv_norm_eps = w.norm_eps, w.q_norm_eps, w.kv_norm_eps
        params.freqs, params.max_position = w.freqs_cis.data_ptr(), w.freqs_cis.shape[0]
        params.norm, params.q_norm, params.kv_norm = w.norm.data_ptr(), w.q_norm.data_ptr(), w.kv_norm.data_ptr()
        matrices = [(w.wqkv_a.data_ptr(), *w.wqkv_a.shape, 1, 1), (w.wq_b.data_ptr(), *w.wq_b.shape, 1, 1)]
        packed = _C.pack_weight_maps(matrices, is_cuda=self.device.type == "cuda")
        maps = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self.device)
        params.maps = maps.data_ptr()
        params.set_scales(w.wqkv_a_scale.data_ptr(), w.wq_b_scale.data_ptr())
        params.workspace, params.generation_words = self._workspace.data_ptr(), self._words
        params.state, params.fault = self._state.data_ptr(), self._host.address
        return _Layer(params, weights, maps)

    def launch(
        self,
        layer: _Layer,
        streams: torch.Tensor,
        pre: torch.Tensor | None,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: KvPages,
        x: torch.Tensor,
        q_lora: torch.Tensor,
        q: torch.Tensor,
        stream: int = 0,
        trace: torch.Tensor | None = None,
    ) -> None:
        """streams: bf16 [rows, 4, hidden]. pre: float32 [rows, 4], whose rows may be further apart, or None: stream 0 is what is normed. positions:
        int64 [rows]. slots: int32 [rows], of cache; below 0: the row's keys are not stored. x: bf16 [rows, hidden], q_lora: bf16 [rows, lora],
        both normed, q: bf16 [rows, heads, 512], whose rows may be further apart: receive the results. stream: a cudaStream_t; capturable. trace:
        int64 [grid, len(POINTS)], receives each block's times at POINTS, in ns.

        Raises ValueError for a tensor that does not fit; on the CPU AttentionInFault with the kernel's own record, or RuntimeError with the
        emulation's diagnosis. On CUDA see fault().
        """
        rows, z, bf16 = streams.shape[0], self.sizes, torch.bfloat16
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"rows {rows} is outside 1..{self.max_rows}")
        require_tensor("streams", streams, (rows, STREAMS, z.hidden), bf16, self.device)
        require_tensor("positions", positions, (rows,), torch.int64, self.device)
        require_tensor("slots", slots, (rows,), torch.int32, self.device)
        require_tensor("x", x, (rows, z.hidden), bf16, self.device)
        require_tensor("q_lora", q_lora, (rows, z.lora), bf16, self.device)
        self._require_rows("q", q, (rows, z.heads, HEAD_DIM), bf16, 8)
        self._require_cache(cache)
        params = layer.params
        params.rows, params.shared, params.q_stride = rows, self._smem(rows), q.stride(0)
        params.pre = params.trace = 0
        params.pre_stride = STREAMS
        if pre is not None:
            self._require_rows("pre", pre, (rows, STREAMS), torch.float32, 4)
            params.pre, params.pre_stride = pre.data_ptr(), pre.stride(0)
        params.page_size, params.num_pages, params.page_bytes = cache.page_size, cache.pages.shape[0], cache.pages.stride(0)
        params.streams, params.positions, params.slots = streams.data_ptr(), positions.data_ptr(), slots.data_ptr()
        params.cache, params.x, params.q_lora, params.q = (t.data_ptr() for t in (cache.pages, x, q_lora, q))
        if trace is not None:
            require_tensor("trace", trace, (self.grid, len(POINTS)), torch.int64, self.device)
            params.trace = trace.data_ptr()
        if self.device.type == "cuda":
            _C.attention_in_launch_cuda(params, self.grid, stream)
        else:
            self._emulate(params, {"cache": cache.pages, "x": x, "q_lora": q_lora, "q": q})

    def fault(self):
        """The FaultRecord of a launch that ended itself (kernels/fault.py puts it in words), or None."""
        return _C.read_fault(self._host.address)

    def acknowledge_fault(self) -> None:
        """Tells the waiting kernel that its record was read; it then traps."""
        _C.acknowledge_fault(self._host.address)

    def _smem(self, rows: int):
        return _C.attn_in_smem(self._geometry, rows)

    def _require_rows(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, multiple: int) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != self.device.type:
            raise ValueError(f"{name}: {list(tensor.shape)} {tensor.dtype} on {tensor.device} is not {list(shape)} {dtype} on {self.device}")
        if not tensor[0].is_contiguous() or tensor.stride(0) % multiple or tensor.stride(0) < tensor[0].numel() or tensor.data_ptr() % 16:
            where = f"strides {list(tensor.stride())} at {tensor.data_ptr():#x}"
            raise ValueError(f"{name}: {where}: a row must lie together, and rows be 16-byte aligned")

    def _require_cache(self, cache: KvPages) -> None:
        pages, least = cache.pages, cache.page_size * (KV_DATA_BYTES + KV_SCALE_BYTES)
        if pages.dim() != 2 or pages.dtype != torch.uint8 or pages.device.type != self.device.type or pages.stride(1) != 1:
            raise ValueError(f"cache: {list(pages.shape)} {pages.dtype} on {pages.device} is not [pages, page_bytes] uint8 on {self.device}")
        if cache.page_size < 1 or pages.shape[1] < least:
            raise ValueError(f"cache: a page of {pages.shape[1]} bytes does not hold {cache.page_size} slots, {least} bytes")
        if pages.stride(0) % 16 or pages.data_ptr() % 16:
            raise ValueError(f"cache: pages {pages.stride(0)} bytes apart at {pages.data_ptr():#x} are not 16-byte aligned")

    def _require_weights(self, w: AttentionInWeights) -> None:
        z, device, f32, bf16, fp8 = self.sizes, self.device, torch.float32, torch.bfloat16, torch.float8_e4m3fn
        require_tensor("norm", w.norm, (z.hidden,), bf16, device)
        require_tensor("q_norm", w.q_norm, (z.lora,), bf16, device)
        require_tensor("kv_norm", w.kv_norm, (HEAD_DIM,), bf16, device)
        for name, rows, columns in (("wqkv_a", z.lora + HEAD_DIM, z.hidden), ("wq_b", z.heads * HEAD_DIM, z.lora)):
            scale = getattr(w, f"{name}_scale")
            require_tensor(name, getattr(w, name), (rows, columns), fp8, device)
            require_tensor(f"{name}_scale", scale, (rows // _BLOCK, columns // _BLOCK), f32, device)
            is_fit = (torch.frexp(scale)[0] == 0.5) & (scale >= MIN_SCALE) & (scale <= MAX_SCALE)
            if not bool(is_fit.all()):
                raise ValueError(f"{name}_scale: {scale[~is_fit][0].item()} is no power of two from 2^-100 to 2^7")
        require_tensor("freqs_cis", w.freqs_cis, (w.freqs_cis.shape[0], HEAD_ROPE // 2), torch.complex64, device)

    def _emulate(self, params, outputs: dict[str, torch.Tensor]) -> None:
        if self._failure is not None:  # what a launch that ended itself left is no state to start from
            raise AttentionInFault(f"an earlier launch failed: {self._failure}")
        options, regions = self.emulation, []
        if options.check_order:
            named = {"workspace": self._workspace, "state": self._state, **outputs}
            regions = [(name, t.data_ptr(), t.numel() * t.element_size(), True) for name, t in named.items()]
        self.last_report = report = _C.attention_in_emulate(params, self.grid, options.seed, options.planted, options.starvation, regions)
        record = self.fault()
        if record is not None:
            self._failure = describe_attention_in_fault(record)
            raise AttentionInFault(self._failure)
        if report.status != "ok":
            self._failure = f"attention_in in emulation: {report.status}: {report.message}"
            raise RuntimeError(self._failure)


class _Layer:
    """A layer's parameters, and its tensors, which it keeps alive."""

    def __init__(self, params, weights: AttentionInWeights, maps: torch.Tensor):
        self.params, self.weights, self.maps = params, weights, maps
