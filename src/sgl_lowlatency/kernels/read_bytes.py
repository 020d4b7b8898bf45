"""read_bytes: reads device memory and does nothing with it, for the bandwidth that a floor is measured against."""

from __future__ import annotations

import torch

from sgl_lowlatency import _C


def read_bytes(source: torch.Tensor, out: torch.Tensor) -> None:
    """out[0] = exclusive or of all 32-bit words of `source`, on the current stream.

    source: contiguous CUDA tensor, 16-byte aligned, a multiple of 16 bytes. out: int32 [1], CUDA.
    Raises ValueError for memory that does not fit, RuntimeError with the CUDA error's text.
    """
    if not source.is_contiguous() or not source.is_cuda:
        raise ValueError("source is not a contiguous CUDA tensor")
    stream = torch.cuda.current_stream(source.device).cuda_stream
    _C.read_bytes_cuda(source.data_ptr(), source.numel() * source.element_size(), out.data_ptr(), stream)
