"""attention_in: a DeepSeek-V4.1 layer from its residual streams to rotated queries and the new KV row, in one persistent launch.

CUDA tensors run the CUDA kernel, CPU tensors the same source in host emulation.
"""

from __future__ import annotations

import dataclasses

import torch

from sgl_lowlatency.kernels import abi  # noqa: F401  first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step_tensors import require_tensor
from sgl_lowlatency.kernels.fault import AttentionInFault, describe_attention_in_fault
from sgl_lowlatency.kernels.hyper_connection import STREAMS
from sgl_lowlatency.kernels.slice import Layer, Slice

__all__ = ["HEAD_DIM", "HEAD_ROPE", "KV_DATA_BYTES", "KV_SCALE_BYTES", "POINTS", "AttentionIn", "AttentionInSizes", "AttentionInWeights", "KvPages"]

HEAD_DIM: int = _C.abi.kHeadDim
HEAD_ROPE: int = _C.abi.kHeadRope
KV_DATA_BYTES: int = _C.abi.kKvDataBytes  # of a slot: 448 e4m3, 64 bf16
KV_SCALE_BYTES: int = _C.abi.kKvScaleBytes  # of a slot: 7 e8m0 and a byte of padding
MAX_LORA: int = _C.abi.kAttnInMaxLora
POINTS: tuple[str, ...] = tuple(_C.abi.kAttnInPointNames)  # of a block's way through a launch: what it has begun or done


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


class AttentionIn(Slice):
    """The kernel attention_in."""

    sizes: AttentionInSizes
    name, points, fault_type = "attention_in", POINTS, AttentionInFault

    def prepare(self, weights: AttentionInWeights) -> Layer:
        """A layer for `launch`. Reads every scale once. Raises ValueError naming the tensor that does not fit."""
        self._require_weights(weights)
        w, params = weights, _C.abi.AttentionInParams()
        params.norm_eps, params.q_norm_eps, params.kv_norm_eps = w.norm_eps, w.q_norm_eps, w.kv_norm_eps
        params.norm, params.q_norm, params.kv_norm = w.norm.data_ptr(), w.q_norm.data_ptr(), w.kv_norm.data_ptr()
        params.set_scales(w.wqkv_a_scale.data_ptr(), w.wq_b_scale.data_ptr())
        return self._layer(params, weights, [(w.wqkv_a, 1), (w.wq_b, 1)])

    def launch(
        self,
        layer: Layer,
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
        self._require_num_rows(rows)
        require_tensor("streams", streams, (rows, STREAMS, z.hidden), bf16, self.device)
        require_tensor("positions", positions, (rows,), torch.int64, self.device)
        require_tensor("slots", slots, (rows,), torch.int32, self.device)
        require_tensor("x", x, (rows, z.hidden), bf16, self.device)
        require_tensor("q_lora", q_lora, (rows, z.lora), bf16, self.device)
        self._require_rows("q", q, (rows, z.heads, HEAD_DIM), bf16, 8)
        self._require_cache(cache)
        params = layer.params
        self._begin(params, rows, trace)
        params.q_stride, params.pre, params.pre_stride = q.stride(0), 0, STREAMS
        if pre is not None:
            self._require_rows("pre", pre, (rows, STREAMS), torch.float32, 4)
            params.pre, params.pre_stride = pre.data_ptr(), pre.stride(0)
        params.page_size, params.num_pages, params.page_bytes = cache.page_size, cache.pages.shape[0], cache.pages.stride(0)
        params.streams, params.positions, params.slots = streams.data_ptr(), positions.data_ptr(), slots.data_ptr()
        params.cache, params.x, params.q_lora, params.q = (t.data_ptr() for t in (cache.pages, x, q_lora, q))
        self._run(params, stream, {"cache": cache.pages, "x": x, "q_lora": q_lora, "q": q})

    def _geometry_of(self, sizes: AttentionInSizes):
        return _C.abi.AttnInGeometry(sizes.hidden, sizes.lora, sizes.heads)

    def _handover(self, rows: int):
        return _C.attn_in_handover(self._geometry, rows, self.grid)

    def _smem(self, rows: int):
        return _C.attn_in_smem(self._geometry, rows)

    def _describe(self, record) -> str:
        return describe_attention_in_fault(record)

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
        z, device, bf16 = self.sizes, self.device, torch.bfloat16
        require_tensor("norm", w.norm, (z.hidden,), bf16, device)
        require_tensor("q_norm", w.q_norm, (z.lora,), bf16, device)
        require_tensor("kv_norm", w.kv_norm, (HEAD_DIM,), bf16, device)
        self._require_fp8("wqkv_a", w.wqkv_a, w.wqkv_a_scale, (z.lora + HEAD_DIM, z.hidden))
        self._require_fp8("wq_b", w.wq_b, w.wq_b_scale, (z.heads * HEAD_DIM, z.lora))
        require_tensor("freqs_cis", w.freqs_cis, (w.freqs_cis.shape[0], HEAD_ROPE // 2), torch.complex64, device)
