"""Memory that a HIP device shares, on a library that writes down its calls. Oracle: the log, and HIP's own header where one is installed."""

import ctypes
import re

import pytest
from hip_stub import hip_include, needs_compiler

from sgl_lowlatency.kernels import hip_memory
from sgl_lowlatency.kernels.hip import HipError, IpcHandle
from sgl_lowlatency.kernels.hip_memory import HipHostMemory, HipSharedMemory

pytestmark = needs_compiler


def test_flags_are_those_of_hips_header():
    include = hip_include()
    if include is None:
        pytest.skip("no HIP header is installed (Triton's wheel has one)")
    text = "".join((include / "hip" / name).read_text() for name in ("hip_runtime_api.h", "driver_types.h"))

    def value(name):
        return int(re.search(rf"(?:#define {name}|\b{name} =) +(0x[0-9a-fA-F]+|\d+)", text)[1], 0)

    assert (hip_memory._UNCACHED, hip_memory._LAZY_PEER_ACCESS) == (value("hipDeviceMallocUncached"), value("hipIpcMemLazyEnablePeerAccess"))
    assert (hip_memory._TO_DEVICE, hip_memory._TO_HOST) == (value("hipMemcpyHostToDevice"), value("hipMemcpyDeviceToHost"))
    assert (hip_memory._HOST_MAPPED, hip_memory._HOST_COHERENT) == (value("hipHostMallocMapped"), value("hipHostMallocCoherent"))
    assert ctypes.sizeof(IpcHandle) == value("HIP_IPC_HANDLE_SIZE")


def test_host_memory_is_zero_and_seen_where_it_is(runtime, log):
    memory = HipHostMemory(runtime, 256)
    assert ctypes.string_at(memory.address, 256) == bytes(256)
    del memory
    assert log() == ["host malloc 256 flags 0x40000002", "host free"]


def test_host_memory_that_the_device_sees_elsewhere_is_refused(runtime, monkeypatch):
    monkeypatch.setenv("STUB_ELSEWHERE", "1")
    with pytest.raises(HipError, match="the device sees host memory at 0x[0-9a-f]+, not at its own address 0x"):
        HipHostMemory(runtime, 64)


def test_memory_that_processes_share(runtime, log):
    """The stub's handle is the address, so that both are one memory."""
    own = HipSharedMemory.allocate(runtime, 256)
    assert own.read(0, 256) == b"\xff" * 256
    own.write(64, b"words")
    peer = HipSharedMemory.map(runtime, own.handle)
    assert peer.address == own.address and peer.read(62, 9) == b"\xff\xffwords\xff\xff"
    peer.close()
    own.free()
    assert log() == ["malloc 256 flags 0x3", "copy 256 kind 2", "copy 5 kind 1", "map flags 0x1", "copy 9 kind 2", "unmap", "free"]
    with pytest.raises(ValueError):
        HipSharedMemory.map(runtime, "00" * 8)


@pytest.mark.parametrize("call", ["hipMemset", "hipIpcGetMemHandle"])
def test_memory_that_cannot_be_shared_is_given_back(runtime, log, monkeypatch, call):
    monkeypatch.setenv("STUB_FAILS", call)
    with pytest.raises(HipError, match=f"^{call}: hipErrorInvalidDeviceFunction"):
        HipSharedMemory.allocate(runtime, 256)
    assert log() == ["malloc 256 flags 0x3", "free"]
