"""Do the GPUs offer NVLink multicast objects? A question to the CUDA driver, opened at run time, about an attribute: no context, no object is made.

Nothing in this package makes a multicast object. epilogue_multicast stores through one where its host hands it the address
(MappedWorkspaces.multicast): that is the opt-in. decode_step stores once a rank.
"""

from __future__ import annotations

import ctypes
import dataclasses

NAMES = ("libcuda.so.1", "libcuda.so")
_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h, CUDA 12.1 and newer
_SUCCESS, _INVALID_VALUE = 0, 1  # CUresult; an older driver does not know the attribute


class DriverError(RuntimeError):
    """libcuda is not what it should be, or refused a call; the text says which call and why."""


@dataclasses.dataclass(frozen=True)
class Multicast:
    """offered: whether each visible GPU's driver says that it supports multicast objects; None: it does not know the question."""

    offered: tuple[bool | None, ...]

    def line(self) -> str:
        """For an operator: what is offered, and that it stays unused."""
        count = len(self.offered)
        if None in self.offered:
            said = "this driver does not know of it"
        else:
            said = f"offered by {sum(map(bool, self.offered))} of {count} GPU{'' if count == 1 else 's'}"
        return f"{said}; unused: servers store once a rank"


def probe(path: str | None = None) -> Multicast | None:
    """What the driver says of the visible GPUs; None where there is no driver or no GPU. path: of libcuda. Raises DriverError."""
    library = _open(path)
    if library is None:
        return None
    if _call(library, "cuInit", 0) != _SUCCESS:
        return None  # a driver that has no GPU to speak of
    count, device, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _require(library, "cuDeviceGetCount", ctypes.byref(count))
    offered: list[bool | None] = []
    for ordinal in range(count.value):
        _require(library, "cuDeviceGet", ctypes.byref(device), ordinal)
        status = _call(library, "cuDeviceGetAttribute", ctypes.byref(value), _MULTICAST_SUPPORTED, device)
        if status not in (_SUCCESS, _INVALID_VALUE):
            raise DriverError(f"cuDeviceGetAttribute of GPU {ordinal} failed with {status}")
        offered.append(bool(value.value) if status == _SUCCESS else None)
    return Multicast(tuple(offered)) if offered else None


def _open(path: str | None) -> ctypes.CDLL | None:
    for name in (path,) if path else NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _call(library: ctypes.CDLL, name: str, *arguments) -> int:
    try:
        return getattr(library, name)(*arguments)
    except AttributeError:
        raise DriverError(f"the CUDA driver has no {name}") from None


def _require(library: ctypes.CDLL, name: str, *arguments) -> None:
    if status := _call(library, name, *arguments):
        raise DriverError(f"{name} failed with {status}")
