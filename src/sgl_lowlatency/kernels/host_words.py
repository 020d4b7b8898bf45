"""Where a kernel runs, and the host memory that it reads and writes meanwhile."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C

FAULT_BYTES = -(-_C.abi.kFaultRecordBytes // 64) * 64  # of a FaultRecord and what keeps the next words out of its line
GROUP_BYTES: int = _C.abi.kPeerGroupBytes  # of the PeerGroup that a record may name
COUNTER_BYTES = (abi.MAX_ROWS + 1) * 8  # of the executed counters, by rows


def kernel_device(device: torch.device) -> torch.device:
    """The device a kernel is to run on: CUDA, or the CPU in emulation. Raises ValueError for any other, and for CUDA without CUDA kernels."""
    device = torch.device(device)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device {device} is neither cuda nor cpu")
    if device.type == "cuda" and "cuda" not in _C.backends():
        raise ValueError("this installation of sgl-lowlatency has no CUDA kernels: reinstall it with nvcc on PATH")
    return device


class HostWords:
    """`num_bytes` zeroed bytes that `device` sees, from `address` on, as long as this object lives.

    On CUDA they outlive the interpreter's exit: the driver may be gone by then, and a late launch may still write.
    """

    def __init__(self, device: torch.device, num_bytes: int):
        if device.type == "cuda":
            self.address: int = _C.allocate_host_visible(num_bytes)
            weakref.finalize(self, _C.free_host_visible, self.address).atexit = False
        else:
            self._owner = torch.zeros(num_bytes, dtype=torch.uint8)
            self.address = self._owner.data_ptr()


class LaunchCounts:
    """Launches of the layers that are counted, by rows, up to max_rows: the kernel that closes one counts it at `address`, in (max_rows + 1) * 8 bytes of
    host memory that it sees. One layer of a model counts its steps, replays of a graph too."""

    def __init__(self, address: int, max_rows: int):
        self._address, self._max_rows = address, max_rows

    def count(self, layer: Any) -> None:
        """From now on. layer: as the kernel prepared it."""
        layer.params.executed_mirror = self._address

    def executed(self) -> dict[int, int]:
        """By rows. Orders nothing: the newest launch may not be in it yet."""
        return {rows: count for rows, count in enumerate(_C.read_executed(self._address, self._max_rows)) if count}
