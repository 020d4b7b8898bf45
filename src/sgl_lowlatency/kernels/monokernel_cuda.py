"""k1 and k2 on an NVIDIA GPU, in waves of two warps (dialect/cuda_waves.cuh): what runs AMD's stages on hardware that is there. No server offers it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels.host_words import HostWords, kernel_device

ISA = "gfx950"  # as of which shared memory is laid out


class MonokernelCuda:
    """What monokernel_objects.MonokernelObjects is on AMD, of the current CUDA device. Raises ValueError without CUDA kernels."""

    def __init__(self):
        self._device = kernel_device(torch.device("cuda"))

    def require_resident(self, grid: int) -> None:
        """Raises RuntimeError unless all of `grid` blocks run at once."""
        if (held := _C.monokernel_max_blocks()) < grid:
            raise RuntimeError(f"monokernel needs {grid} blocks resident at once; this GPU holds {held}")

    def launch(self, launches: Sequence, stream: int) -> None:
        """Enqueues K1Params and K2Params, one launch each, in this order. stream: a cudaStream_t.

        Raises ValueError naming what does not fit, RuntimeError naming the CUDA error.
        """
        for params in launches:
            (_C.k1_launch_cuda if isinstance(params, _C.abi.K1Params) else _C.k2_launch_cuda)(params, stream)

    def host_memory(self, num_bytes: int) -> HostWords:
        """`num_bytes` zeroed bytes of the host that the device sees."""
        return HostWords(self._device, num_bytes)
