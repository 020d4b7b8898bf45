"""Loads code objects and launches their kernels through libamdhip64, which is opened at run time: the package installs without ROCm.

A kernel takes one parameter, a struct by value. Launches are asynchronous, on the stream that the caller names, and can be captured in a graph.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

# Tried in this order where the process has not loaded the library yet; torch's ROCm build brings its own.
NAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so")
_SUCCESS = 0
_pointer, _int, _unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_out = ctypes.POINTER(ctypes.c_void_p)


class IpcHandle(ctypes.Structure):
    """hipIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


# hip_runtime_api.h of HIP 6 and 7: name -> parameters. Each returns hipError_t; the two last ones text.
_FUNCTIONS: dict[str, tuple] = {
    "hipModuleLoadData": (_out, ctypes.c_char_p),
    "hipModuleUnload": (_pointer,),
    "hipModuleGetFunction": (_out, _pointer, ctypes.c_char_p),
    "hipModuleLaunchKernel": (_pointer, *[_unsigned] * 7, _pointer, _out, _out),
    "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor": (ctypes.POINTER(_int), _pointer, _int, ctypes.c_size_t),
    "hipHostMalloc": (_out, ctypes.c_size_t, _unsigned),
    "hipHostGetDevicePointer": (_out, _pointer, _unsigned),
    "hipHostFree": (_pointer,),
    "hipExtMallocWithFlags": (_out, ctypes.c_size_t, _unsigned),
    "hipFree": (_pointer,),
    "hipMemset": (_pointer, _int, ctypes.c_size_t),
    "hipMemcpy": (_pointer, _pointer, ctypes.c_size_t, _int),
    "hipIpcGetMemHandle": (ctypes.POINTER(IpcHandle), _pointer),
    "hipIpcOpenMemHandle": (_out, IpcHandle, _unsigned),
    "hipIpcCloseMemHandle": (_pointer,),
    "hipGetErrorName": (_int,),
    "hipGetErrorString": (_int,),
}


class HipError(RuntimeError):
    """libamdhip64 is not there, is not what it should be, or refused a call; the text says which call and why."""


def loaded_library(maps: str | None = None) -> str | None:
    """Path of the libamdhip64 that this process has mapped, or None. maps: in the form of /proc/self/maps, its default."""
    if maps is None:
        maps = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
    found = re.search(r"^\S+ .* (/\S*/libamdhip64\.so\S*)$", maps, re.MULTILINE)
    return found[1] if found else None


class HipRuntime:
    """The calls of one libamdhip64."""

    def __init__(self, path: str | None = None):
        """path: of the library; None takes the one that is loaded, else the first of NAMES that the loader finds. Raises HipError."""
        self.path, self._library = _open(path)
        for name, parameters in _FUNCTIONS.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                raise HipError(f"{self.path} has no {name}: it is no HIP runtime of version 6 or newer") from None
            function.argtypes = parameters
            function.restype = ctypes.c_char_p if name.startswith("hipGetError") else _int

    def call(self, name: str, *arguments, what: str = "") -> None:
        """Calls a function of _FUNCTIONS. Raises HipError with the runtime's name of the error; what: on what it was called."""
        status = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            error, text = (getattr(self._library, f"hipGetError{kind}")(status) for kind in ("Name", "String"))
            of = f" of {what}" if what else ""
            raise HipError(f"{name}{of}: {_text(error)} ({status}): {_text(text)}")

    def load(self, code_object: bytes, what: str) -> HipModule:
        """Loads a code object onto the current device. what: its name in messages."""
        return HipModule(self, code_object, what)


def _text(value: bytes | None) -> str:
    return "no text" if value is None else value.decode(errors="replace")


def _open(path: str | None) -> tuple[str, ctypes.CDLL]:
    known = path or loaded_library()
    failures = []
    for name in [known] if known else NAMES:
        try:
            return name, ctypes.CDLL(name)
        except OSError as error:
            failures.append(f"{name}: {error}")
    raise HipError(f"the HIP runtime does not load ({'; '.join(failures)}): install ROCm, or torch's ROCm build")


class HipModule:
    """A loaded code object, until close()."""

    def __init__(self, runtime: HipRuntime, code_object: bytes, what: str):
        self.runtime, self.what = runtime, what
        self._handle = ctypes.c_void_p()
        runtime.call("hipModuleLoadData", ctypes.byref(self._handle), code_object, what=what)

    def function(self, name: str, params_bytes: int) -> HipFunction:
        """A kernel of it. params_bytes: of its one parameter. Raises HipError where there is none of this name."""
        if not self._handle:
            raise HipError(f"{self.what} is closed")
        handle = ctypes.c_void_p()
        self.runtime.call("hipModuleGetFunction", ctypes.byref(handle), self._handle, name.encode(), what=f"{name} in {self.what}")
        return HipFunction(self, handle, name, params_bytes)

    def close(self) -> None:
        """Unloads it; no launch of its functions may be running or captured any more."""
        if self._handle:
            self.runtime.call("hipModuleUnload", self._handle, what=self.what)
            self._handle = ctypes.c_void_p()


class HipFunction:
    """A kernel that takes one struct by value."""

    def __init__(self, module: HipModule, handle: ctypes.c_void_p, name: str, params_bytes: int):
        self.name, self.params_bytes = name, params_bytes
        self._module, self._handle = module, handle  # the module stays loaded as long as its functions are used

    def blocks_per_cu(self, threads: int) -> int:
        """Workgroups of so many threads that a compute unit holds at once, by the runtime's own count."""
        count = ctypes.c_int()
        call = "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor"
        self._module.runtime.call(call, ctypes.byref(count), self._handle, threads, 0, what=self.name)
        return count.value

    def launch(self, *, grid: int, threads: int, stream: int, params: bytes) -> None:
        """Enqueues grid workgroups of threads each. stream: hipStream_t as an integer; params: the struct, copied before this returns.

        Raises ValueError where params is not of the kernel's size, HipError where the runtime refuses.
        """
        if len(params) != self.params_bytes:
            raise ValueError(f"{self.name} takes a struct of {self.params_bytes} bytes, not {len(params)}")
        content = ctypes.create_string_buffer(params, len(params))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(content))
        sizes = grid, 1, 1, threads, 1, 1, 0
        self._module.runtime.call("hipModuleLaunchKernel", self._handle, *sizes, stream, pointers, None, what=self.name)
