"""A HIP runtime that writes down its calls (unit/kernels/hip_stub.c), compiled where a C compiler is."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "unit/kernels/hip_stub.c"
COMPILER = os.environ.get("CC", "gcc")
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C compiler {COMPILER}")


def build(folder, *options):
    """The path of the library."""
    path = folder / "libamdhip64.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", *options, str(SOURCE), "-o", str(path)], check=True, capture_output=True, text=True)
    return str(path)


def hip_include():
    """The folder of HIP's own headers, which Triton's wheel has; None without."""
    triton = importlib.util.find_spec("triton")
    folder = Path(triton.origin).parent / "backends/amd/include" if triton else None
    return folder if folder is not None and (folder / "hip/hip_runtime_api.h").exists() else None
