"""Memory that a HIP device shares: with the host, and with other processes' devices."""

from __future__ import annotations

import contextlib
import ctypes
import weakref

from sgl_lowlatency.kernels.hip import HipError, HipRuntime, IpcHandle

_UNCACHED = 0x3  # hipDeviceMallocUncached: what other GPUs store is seen without a copy in this one's L2
_LAZY_PEER_ACCESS = 0x1  # hipIpcMemLazyEnablePeerAccess
_TO_DEVICE, _TO_HOST = 1, 2  # hipMemcpyKind
_HOST_MAPPED, _HOST_COHERENT = 0x2, 0x40000000  # hipHostMallocMapped, hipHostMallocCoherent: the device sees it, uncached


class HipHostMemory:
    """`num_bytes` zeroed bytes of the host that the current device reads and writes at the same `address`, as long as this object lives.

    They outlive the interpreter's exit: a late launch may still write. Raises HipError where the device sees them elsewhere.
    """

    def __init__(self, runtime: HipRuntime, num_bytes: int):
        pointer, seen = ctypes.c_void_p(), ctypes.c_void_p()
        runtime.call("hipHostMalloc", ctypes.byref(pointer), num_bytes, _HOST_MAPPED | _HOST_COHERENT, what=f"{num_bytes} bytes")
        weakref.finalize(self, runtime.call, "hipHostFree", pointer).atexit = False
        ctypes.memset(pointer, 0, num_bytes)
        runtime.call("hipHostGetDevicePointer", ctypes.byref(seen), pointer, 0)
        if seen.value != pointer.value:
            raise HipError(f"the device sees host memory at {seen.value or 0:#x}, not at its own address {pointer.value or 0:#x}")
        self.address: int = pointer.value


class HipSharedMemory:
    """Memory of the current device that other processes map by `handle`, or another process's, mapped here: `address`.

    Of `allocate` it is given back by free(), which nobody may have mapped any more; of `map` it is unmapped by close().
    """

    def __init__(self, runtime: HipRuntime, address: int, handle: str):
        self._runtime, self.address, self.handle = runtime, address, handle

    @classmethod
    def allocate(cls, runtime: HipRuntime, num_bytes: int) -> HipSharedMemory:
        """Every byte is 0xff. Raises HipError, and then keeps none."""
        pointer, handle = ctypes.c_void_p(), IpcHandle()
        runtime.call("hipExtMallocWithFlags", ctypes.byref(pointer), num_bytes, _UNCACHED, what=f"{num_bytes} bytes")
        with contextlib.ExitStack() as undo:
            undo.callback(runtime.call, "hipFree", pointer)
            runtime.call("hipMemset", pointer, 0xFF, num_bytes)
            runtime.call("hipIpcGetMemHandle", ctypes.byref(handle), pointer)
            undo.pop_all()
        return cls(runtime, pointer.value, bytes(handle).hex())

    @classmethod
    def map(cls, runtime: HipRuntime, handle: str) -> HipSharedMemory:
        """Raises HipError where the device cannot reach it, ValueError for what is no handle."""
        pointer = ctypes.c_void_p()
        runtime.call("hipIpcOpenMemHandle", ctypes.byref(pointer), IpcHandle.from_buffer_copy(bytes.fromhex(handle)), _LAZY_PEER_ACCESS)
        return cls(runtime, pointer.value, handle)

    def write(self, offset: int, content: bytes) -> None:
        """Returns when it has been copied."""
        self._runtime.call("hipMemcpy", self.address + offset, content, len(content), _TO_DEVICE)

    def read(self, offset: int, num_bytes: int) -> bytes:
        content = ctypes.create_string_buffer(num_bytes)
        self._runtime.call("hipMemcpy", content, self.address + offset, num_bytes, _TO_HOST)
        return content.raw

    def close(self) -> None:
        """Unmaps it."""
        self._runtime.call("hipIpcCloseMemHandle", self.address)

    def free(self) -> None:
        """Gives it back."""
        self._runtime.call("hipFree", self.address)
