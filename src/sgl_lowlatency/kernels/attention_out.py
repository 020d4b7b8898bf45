"""attention_out: a DeepSeek-V4.1 layer from attention's heads to the normed input of its MoE, in one persistent launch.

CUDA tensors run the CUDA kernel, CPU tensors the same source in host emulation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sgl_lowlatency.kernels import abi  # noqa: F401  first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step_tensors import require_tensor
from sgl_lowlatency.kernels.fault import AttentionOutFault, describe_attention_out_fault
from sgl_lowlatency.kernels.hyper_connection import HyperConnection, fill_streams
from sgl_lowlatency.kernels.slice import Layer, Slice

__all__ = ["POINTS", "AttentionOut", "AttentionOutSizes", "AttentionOutWeights"]

MAX_PANEL: int = _C.abi.kAttnOutMaxPanel
MAX_LATENT: int = _C.abi.kAttnOutMaxLatent
POINTS: tuple[str, ...] = tuple(_C.abi.kAttnOutPointNames)  # of a block's way through a launch: what it has begun or done


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

    def shard(self, num_ranks: int) -> AttentionOutSizes:
        """A rank's share, whole groups and their heads. Raises ValueError when the groups do not divide."""
        if num_ranks < 1 or self.groups % num_ranks:
            raise ValueError(f"groups {self.groups} are not a multiple of the {num_ranks} ranks: each has whole ones")
        return dataclasses.replace(self, heads=self.heads // num_ranks, groups=self.groups // num_ranks)

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
    rope_dim / 2]. hyper: the attention's. norm: bf16 [H], of the sublayer behind.
    """

    wo_a: torch.Tensor
    wo_b: torch.Tensor
    wo_b_scale: torch.Tensor
    freqs_cis: torch.Tensor
    hyper: HyperConnection
    norm: torch.Tensor
    norm_eps: float


class AttentionOut(Slice):
    """The kernel attention_out."""

    sizes: AttentionOutSizes
    name, points, fault_type = "attention_out", POINTS, AttentionOutFault

    def prepare(self, weights: AttentionOutWeights) -> Layer:
        """A layer for `launch`. Reads every scale once. Raises ValueError naming the tensor that does not fit."""
        self._require_weights(weights)
        w, params = weights, self._new_params()
        w.hyper.prepare(params.hyper)
        params.norm, params.norm_eps, params.scales = w.norm.data_ptr(), w.norm_eps, w.wo_b_scale.data_ptr()
        return self._layer(params, weights, [(w.wo_a, 2), (w.wo_b, 1)])

    def launch(
        self,
        layer: Layer,
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
        params, outputs = self.fill(layer, x, positions, streams, streams_out, out, coefficients, trace)
        self._run(params, stream, outputs)

    def fill(
        self,
        layer: Layer,
        x: torch.Tensor,
        positions: torch.Tensor,
        streams: torch.Tensor,
        streams_out: torch.Tensor,
        out: torch.Tensor,
        coefficients: torch.Tensor | None = None,
        trace: torch.Tensor | None = None,
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """(the layer's parameters, filled in for one launch, the tensors it writes by name). Takes and raises as launch."""
        rows, z = x.shape[0], self.sizes
        self._require_num_rows(rows)
        self._require_heads(x)
        require_tensor("positions", positions, (rows,), torch.int64, self.device)
        require_tensor("out", out, (rows, z.hidden), torch.bfloat16, self.device)
        params = layer.params
        self._begin(params, rows, trace)
        params.x, params.x_stride, params.positions, params.out = x.data_ptr(), x.stride(0), positions.data_ptr(), out.data_ptr()
        return params, {"out": out, **fill_streams(params.hyper, streams, streams_out, coefficients, (rows, z.hidden), self.device)}

    def _new_params(self) -> Any:
        return _C.abi.AttentionOutParams()

    def _geometry_of(self, sizes: AttentionOutSizes):
        return _C.abi.AttnOutGeometry(*dataclasses.astuple(sizes))

    def _handover(self, rows: int):
        return _C.attn_out_handover(self._geometry, rows, self.grid)

    def _smem(self, rows: int):
        return _C.attn_out_smem(self._geometry, rows)

    def _describe(self, record) -> str:
        return describe_attention_out_fault(record)

    def _require_heads(self, x: torch.Tensor) -> None:
        z = self.sizes
        if tuple(x.shape[1:]) != (z.heads, z.head_dim) or x.dtype != torch.bfloat16 or x.device.type != self.device.type:
            raise ValueError(f"x: {list(x.shape)} {x.dtype} on {x.device} is not [rows, {z.heads}, {z.head_dim}] bfloat16 on {self.device}")
        if not x[0].is_contiguous() or x.stride(0) % 8 or x.stride(0) < z.heads * z.head_dim or x.data_ptr() % 16:
            raise ValueError(f"x: strides {list(x.stride())} at {x.data_ptr():#x}: heads of a row must lie together, and rows be 16-byte aligned")

    def _require_weights(self, w: AttentionOutWeights) -> None:
        z, device = self.sizes, self.device
        require_tensor("wo_a", w.wo_a, (z.latent, z.group_width), torch.bfloat16, device)
        self._require_fp8("wo_b", w.wo_b, w.wo_b_scale, (z.hidden, z.latent))
        require_tensor("freqs_cis", w.freqs_cis, (w.freqs_cis.shape[0], z.rope_dim // 2), torch.complex64, device)
        if w.freqs_cis.data_ptr() % 16:
            raise ValueError(f"freqs_cis: address {w.freqs_cis.data_ptr():#x} is not 16-byte aligned")
        w.hyper.require(z.hidden, device)
        require_tensor("norm", w.norm, (z.hidden,), torch.bfloat16, device)
