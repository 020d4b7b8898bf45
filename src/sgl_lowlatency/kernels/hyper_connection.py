"""A hyper-connection of mHC around a sublayer, as the kernels that close one take it: attention_out, and fused_moe where it is asked to."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sgl_lowlatency.kernels import abi  # noqa: F401  first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.decode_step_tensors import require_tensor

__all__ = ["MIXES", "STREAMS", "HyperConnection", "fill_streams"]

STREAMS: int = _C.abi.kStreams  # parallel residual streams of a row
MIXES: int = _C.abi.kMixes  # coefficients of a row: pre [4], post [4], comb [4, 4]


@dataclasses.dataclass(frozen=True)
class HyperConnection:
    """A sublayer's tensors as SGLang holds them after load, read in place. mix: float32 [24, 4 H]. mix_scale: float32 [3]. mix_base: float32 [24].
    sinkhorn_iterations: at least 1. mix_eps and mix_rms_eps: not negative."""

    mix: torch.Tensor
    mix_scale: torch.Tensor
    mix_base: torch.Tensor
    sinkhorn_iterations: int
    mix_eps: float
    mix_rms_eps: float

    def require(self, hidden: int, device: torch.device) -> None:
        """Raises ValueError naming the first tensor or value that does not fit."""
        require_tensor("mix", self.mix, (MIXES, STREAMS * hidden), torch.float32, device)
        require_tensor("mix_scale", self.mix_scale, (3,), torch.float32, device)
        require_tensor("mix_base", self.mix_base, (MIXES,), torch.float32, device)
        if self.sinkhorn_iterations < 1:
            raise ValueError(f"sinkhorn_iterations {self.sinkhorn_iterations} is below 1")
        for name in ("mix_eps", "mix_rms_eps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative or no number")

    def prepare(self, params: Any) -> None:
        """Fills in what every launch has alike. params: abi::HyperConnection."""
        params.sinkhorn_iterations, params.mix_eps, params.mix_rms_eps = self.sinkhorn_iterations, self.mix_eps, self.mix_rms_eps
        params.mix, params.mix_scale, params.mix_base = self.mix.data_ptr(), self.mix_scale.data_ptr(), self.mix_base.data_ptr()


def fill_streams(
    params: Any, streams: torch.Tensor, streams_out: torch.Tensor, coefficients: torch.Tensor | None, shape: tuple[int, int], device: torch.device
) -> dict[str, torch.Tensor]:
    """Fills in one launch's streams bf16 [rows, 4, hidden], streams_out, another such tensor, and coefficients, float32 [rows, 24] or None. params:
    abi::HyperConnection. shape: rows and hidden. Returns the tensors that are written, by name. Raises ValueError naming the tensor that does not
    fit."""
    rows, hidden = shape
    require_tensor("streams", streams, (rows, STREAMS, hidden), torch.bfloat16, device)
    require_tensor("streams_out", streams_out, (rows, STREAMS, hidden), torch.bfloat16, device)
    if streams_out.data_ptr() == streams.data_ptr():
        raise ValueError("streams_out is streams, which other blocks still read when it is written")
    params.streams, params.streams_out, params.coefficients = streams.data_ptr(), streams_out.data_ptr(), 0
    outputs = {"streams_out": streams_out}
    if coefficients is not None:
        require_tensor("coefficients", coefficients, (rows, MIXES), torch.float32, device)
        params.coefficients = coefficients.data_ptr()
        outputs["coefficients"] = coefficients
    return outputs
