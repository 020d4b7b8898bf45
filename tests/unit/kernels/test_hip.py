"""The launcher against a library that writes down its calls. Oracle: the log, and HIP's own header where one is installed."""

import ctypes
import re
import struct

import pytest
from hip_stub import build, hip_include, needs_compiler

from sgl_lowlatency.kernels import hip

pytestmark = needs_compiler


def test_a_kernel_is_loaded_and_launched(runtime, log):
    module = runtime.load(b"\x7fELF" + bytes(60), "k1.gfx950.co")
    function = module.function("k1", 8)
    function.launch(grid=256, threads=512, stream=0x77, params=b"hello\0\0\0")
    assert function.blocks_per_cu(512) == 3
    module.close()
    module.close()
    assert log() == [
        "load ELF",
        "function k1 of 0x1000",
        "launch 0x2000 256 1 1 512 1 1 0 stream 0x77 params hello extra (nil)",
        "occupancy 0x2000 512 0",
        "unload 0x1000",
    ]


def test_the_null_stream_is_a_stream(runtime, log):
    runtime.load(b"\x7fELF", "k1").function("k1", 5).launch(grid=1, threads=64, stream=0, params=b"hello")
    assert "stream (nil)" in log()[-1]


def test_a_struct_of_another_size_is_not_launched(runtime, log):
    function = runtime.load(b"\x7fELF", "k1").function("k1", 400)
    with pytest.raises(ValueError, match="k1 takes a struct of 400 bytes, not 8"):
        function.launch(grid=1, threads=64, stream=0, params=struct.pack("<Q", 1))
    assert not [line for line in log() if line.startswith("launch")]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("hipModuleLoadData", "hipModuleLoadData of k1.gfx950.co: hipErrorInvalidDeviceFunction (98): invalid device function"),
        ("hipModuleGetFunction", "hipModuleGetFunction of k1 in k1.gfx950.co: "),
        ("hipModuleLaunchKernel", "hipModuleLaunchKernel of k1: hipErrorInvalidDeviceFunction (98): invalid device function"),
        ("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", "MaxActiveBlocksPerMultiprocessor of k1: "),
        ("hipModuleUnload", "hipModuleUnload of k1.gfx950.co: "),
    ],
)
def test_a_call_that_fails_is_named(runtime, monkeypatch, call, message):
    monkeypatch.setenv("STUB_FAILS", call)
    with pytest.raises(hip.HipError) as error:
        module = runtime.load(b"\x7fELF", "k1.gfx950.co")
        function = module.function("k1", 0)
        function.blocks_per_cu(512)
        function.launch(grid=1, threads=64, stream=0, params=b"")
        module.close()
    assert message in str(error.value)


def test_a_closed_module_gives_no_functions(runtime):
    module = runtime.load(b"\x7fELF", "k1.gfx950.co")
    module.close()
    with pytest.raises(hip.HipError, match="k1.gfx950.co is closed"):
        module.function("k1", 0)


def test_without_rocm_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(hip, "NAMES", ("libamdhip64-absent.so",))
    monkeypatch.setattr(hip, "loaded_library", lambda: None)
    with pytest.raises(hip.HipError, match=r"the HIP runtime does not load \(libamdhip64-absent\.so: .*\): install ROCm, or torch's ROCm build"):
        hip.HipRuntime()


def test_another_library_is_no_hip_runtime(tmp_path):
    path = build(tmp_path, "-DSTUB_IS_OLD")
    with pytest.raises(hip.HipError, match=r"libamdhip64\.so has no hipModuleLaunchKernel: it is no HIP runtime of version 6 or newer"):
        hip.HipRuntime(path)


def test_the_library_that_the_process_has_is_taken():
    """A second copy, beside the one in torch, would know neither its streams nor its memory."""
    maps = (
        "7f0000000000-7f0000001000 r--p 00000000 08:01 123   /usr/lib/libc.so.6\n"
        "7f1000000000-7f1000001000 r-xp 00000000 08:01 456   /venv/torch/lib/libamdhip64.so.7.0.1\n"
    )
    assert hip.loaded_library(maps) == "/venv/torch/lib/libamdhip64.so.7.0.1"
    assert hip.loaded_library(maps.splitlines()[0]) is None


PLAIN = {
    "int": ctypes.c_int, "unsigned int": ctypes.c_uint, "size_t": ctypes.c_size_t, "hipError_t": ctypes.c_int, "hipMemcpyKind": ctypes.c_int,
    "const char*": ctypes.c_char_p, "const void*": ctypes.c_void_p, "void*": ctypes.c_void_p, "hipIpcMemHandle_t": hip.IpcHandle,
    **dict.fromkeys(("hipModule_t", "hipFunction_t", "hipStream_t"), ctypes.c_void_p),
}  # fmt: skip


def as_ctypes(declaration):
    """The ctypes type of a parameter as the header declares it: "unsigned int flags __dparm(0)"."""
    words = re.sub(r"__dparm\(.*?\)|\benum\b", "", declaration).replace("*", "* ").split()
    kind = " ".join(words if len(words) == 1 else words[:-1]).replace(" *", "*")
    return PLAIN[kind] if kind in PLAIN else ctypes.POINTER(PLAIN[kind.removesuffix("*")])


def test_declarations_are_those_of_hips_header(tmp_path):
    """The stub is compiled with the header: a function that is declared in another way does not compile."""
    include = hip_include()
    if include is None:
        pytest.skip("no HIP header is installed (Triton's wheel has one)")
    build(tmp_path, "-DWITH_HIP_HEADER", "-D__HIP_PLATFORM_AMD__", "-w", f"-I{include}")
    header = (include / "hip/hip_runtime_api.h").read_text()
    for name, parameters in hip._FUNCTIONS.items():
        declared = re.search(rf"^(?:hipError_t|const char\*) {name}\((.*?)\);", header, re.MULTILINE | re.DOTALL)[1]
        types = [as_ctypes(each) for each in declared.split(",")]
        if name == "hipModuleLoadData":
            assert types.pop() is ctypes.c_void_p and parameters[-1] is ctypes.c_char_p, "the image, which is given as bytes"
        assert types == list(parameters[: len(types)]) and len(declared.split(",")) == len(parameters), name
