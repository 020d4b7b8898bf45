"""Finds the AMDGPU compiler and disassembler of the machine. CI has neither: tests that need them skip with the reason."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

MIN_LLVM = 20
# As setup.py compiles csrc/launch/*.hip: no ROCm headers, no device libraries, one linked ELF.
CLANG_FLAGS = tuple(
    "-x hip --cuda-device-only -nogpuinc -nogpulib --no-gpu-bundle-output -O3 -std=c++20 -fno-exceptions -fuse-cuid=none".split()
)


@functools.cache
def find(tool: str) -> str | None:
    """Path of an LLVM tool from version 20 on, the newest by name before the plain one, or None."""
    for name in [*(f"{tool}-{version}" for version in range(30, MIN_LLVM - 1, -1)), tool]:
        path = shutil.which(name)
        if path is not None and llvm_version(path) >= MIN_LLVM:
            return path
    return None


def llvm_version(path: str) -> int:
    """Major version; 0 where the program does not say one."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    match = re.search(r"(?:clang|LLVM|LLD)(?: version)? (\d+)\.", done.stdout)
    return int(match[1]) if match else 0


def missing(*tools: str) -> str:
    """Why a test that needs these tools cannot run here, or an empty string."""
    absent = [tool for tool in tools if find(tool) is None]
    return f"no {', '.join(absent)} of LLVM {MIN_LLVM} or newer on PATH" if absent else ""


def compile_hip(source: Path, target: Path, isa: str, *options: str) -> Path:
    """Compiles one .hip source into a code object. Raises subprocess.CalledProcessError with the compiler's text in stderr."""
    command = [find("clang"), *CLANG_FLAGS, f"--offload-arch={isa}", *options, str(source), "-o", str(target)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    return target


def disassemble(path: Path | str) -> str:
    """llvm-objdump's text of a code object."""
    command = [find("llvm-objdump"), "-d", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
