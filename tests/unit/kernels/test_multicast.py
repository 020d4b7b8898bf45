"""The question about NVLink multicast to a driver that writes down its calls. Oracle: the log, and CUDA's own header where one is installed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sgl_lowlatency.kernels import multicast

SOURCE = Path(__file__).with_name("cuda_stub.c")
COMPILER = os.environ.get("CC", "gcc")
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C compiler {COMPILER}")


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """driver(gpus, offered, *options) -> (path of a stub of libcuda, its log's path)."""
    def build(gpus, offered=0, *options):
        path = tmp_path / "libcuda.so.1"
        subprocess.run([COMPILER, "-shared", "-fPIC", *options, str(SOURCE), "-o", str(path)], check=True, capture_output=True, text=True)
        for name, value in {"GPUS": gpus, "OFFERED": offered, "LOG": tmp_path / "log"}.items():
            monkeypatch.setenv(f"STUB_{name}", str(value))
        return str(path), tmp_path / "log"

    return build


@needs_compiler
@pytest.mark.parametrize(("gpus", "offered", "line"), [
    (2, 2, "offered by 2 of 2 GPUs; unused: servers store once a rank"), (4, 1, "offered by 1 of 4 GPUs; unused: servers store once a rank"),
    (1, 0, "offered by 0 of 1 GPU; unused: servers store once a rank"),
])
def test_every_gpu_is_asked_and_nothing_is_made(driver, gpus, offered, line):
    path, log = driver(gpus, offered)
    found = multicast.probe(path)
    assert found.offered == tuple(gpu < offered for gpu in range(gpus)) and found.line() == line
    assert log.read_text().splitlines() == ["cuInit 0 0", *(f"cuDeviceGetAttribute 132 {40 + gpu}" for gpu in range(gpus))]


@needs_compiler
def test_an_older_driver_does_not_know(driver):
    assert multicast.probe(driver(2, 0, "-DOLD")[0]).line() == "this driver does not know of it; unused: servers store once a rank"


@needs_compiler
def test_a_driver_without_gpus_is_no_answer(driver):
    assert multicast.probe(driver(0)[0]) is None


@needs_compiler
def test_a_driver_that_refuses_is_an_error(driver):
    with pytest.raises(multicast.DriverError, match="cuDeviceGetAttribute of GPU 0 failed with 201"):
        multicast.probe(driver(1, 1, "-DBROKEN")[0])


def test_no_driver_is_no_answer(tmp_path):
    assert multicast.probe(str(tmp_path / "libcuda.so.1")) is None


@needs_compiler
def test_another_library_is_not_taken_for_a_driver(tmp_path):
    source, path = tmp_path / "other.c", tmp_path / "libcuda.so.1"
    source.write_text("int other(void) { return 0; }\n")
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    with pytest.raises(multicast.DriverError, match="the CUDA driver has no cuInit"):
        multicast.probe(str(path))


def test_the_attribute_is_cudas():
    headers = [Path(root, "include/cuda.h") for root in (os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/usr")]
    header = next((path for path in headers if path.exists()), None)
    if header is None:
        pytest.skip("no cuda.h here")
    assert int(re.search(r"CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = (\d+)", header.read_text())[1]) == multicast._MULTICAST_SUPPORTED
