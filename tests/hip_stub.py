"""A HIP runtime that writes down its calls (unit/kernels/hip_stub.c), compiled where a C compiler is."""

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
