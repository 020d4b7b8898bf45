"""The code objects of k1 and k2 as loaded onto an AMD GPU. Written from HIP's headers and tried against a library that writes down its calls:
never run on hardware."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C
from sgl_lowlatency.kernels import code_objects
from sgl_lowlatency.kernels.hip import HipRuntime
from sgl_lowlatency.kernels.hip_memory import HipHostMemory

THREADS: int = _C.abi.kMonoThreads
_PARAM_BYTES = {"k1": _C.abi.kK1ParamsBytes, "k2": _C.abi.kK2ParamsBytes}


class MonokernelObjects:
    """k1 and k2 of one instruction set, on the current device; loaded as long as this object lives.

    isa: "gfx950". compute_units: of the device. Raises FileNotFoundError where this installation has no such kernel, HipError where the runtime
    refuses it.
    """

    def __init__(self, runtime: HipRuntime, isa: str, compute_units: int):
        self.runtime, self._compute_units = runtime, compute_units
        self._functions = {
            kernel: runtime.load(code_objects.read(kernel, isa), f"{kernel}.{isa}.co").function(kernel, num_bytes)
            for kernel, num_bytes in _PARAM_BYTES.items()
        }

    def require_resident(self, grid: int) -> None:
        """Raises RuntimeError unless all of `grid` workgroups run at once: they wait for each other, so that fewer would hang."""
        for kernel, function in self._functions.items():
            held = self._compute_units * function.blocks_per_cu(THREADS)
            if held < grid:
                raise RuntimeError(f"monokernel: {kernel} needs {grid} workgroups resident at once; this GPU, of {self._compute_units} CUs, holds {held}")

    def launch(self, launches: Sequence, stream: int) -> None:
        """Enqueues K1Params and K2Params, one launch each, in this order. stream: a hipStream_t.

        Raises ValueError, naming what does not fit, before the launch that it is about, HipError where the runtime refuses one.
        """
        for params in launches:
            kernel = "k1" if isinstance(params, _C.abi.K1Params) else "k2"
            self._functions[kernel].launch(grid=params.launch.grid, threads=THREADS, stream=stream, params=params.to_bytes())

    def host_memory(self, num_bytes: int) -> HipHostMemory:
        """`num_bytes` zeroed bytes of the host that the device sees."""
        return HipHostMemory(self.runtime, num_bytes)
