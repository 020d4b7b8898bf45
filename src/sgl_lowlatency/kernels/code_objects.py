"""The code objects of AMD's kernels in this installation: ELF files beside the extension, one a kernel and instruction set."""

from __future__ import annotations

from pathlib import Path

KERNELS = ("k1", "k2")
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}  # MI300X and MI325X; MI350X and MI355X: the most workgroups that run at once
ISAS = tuple(COMPUTE_UNITS)
FOLDER = Path(__file__).resolve().parent.parent / "code_objects"
HOW_TO_BUILD = "reinstall sgl-lowlatency where ROCm 7's hipcc is on PATH, or clang 20 or newer with lld"


def installed() -> dict[str, list[str]]:
    """Kernel -> the instruction sets that it was compiled for, e.g. {"k1": ["gfx942", "gfx950"], "k2": []}."""
    return {kernel: [isa for isa in ISAS if (FOLDER / f"{kernel}.{isa}.co").is_file()] for kernel in KERNELS}


def read(kernel: str, isa: str) -> bytes:
    """The code object. Raises FileNotFoundError, with what to do, where this installation has none."""
    path = FOLDER / f"{kernel}.{isa}.co"
    if not path.is_file():
        raise FileNotFoundError(f"kernel {kernel} is not built for {isa} in this installation ({path}): {HOW_TO_BUILD}")
    return path.read_bytes()


def line() -> str:
    """One line for people: which objects are there."""
    there = {kernel: isas for kernel, isas in installed().items() if isas}
    if not there:
        return f"none; {HOW_TO_BUILD}"
    return "; ".join(f"{kernel}: {', '.join(isas)}" for kernel, isas in there.items())
