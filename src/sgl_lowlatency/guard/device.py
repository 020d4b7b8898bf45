"""Refusals that depend on the GPU and on what this installation was compiled for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sgl_lowlatency.config import CUDA_ARCHS
from sgl_lowlatency.kernels import code_objects
from sgl_lowlatency.kernels.backends import compiled_backends

EMULATION = "emulation"
CUDA = "cuda"


def backend_reasons(isa: str | None, backends: Mapping[str, Sequence[str]], *, emulate: bool) -> list[str]:
    """Why the compiled backends cannot run on this device; [] when they can.

    isa: "sm_90", or None without a GPU. backends: compiled_backends(), e.g. {"emulation": ["host"], "cuda":
    ["sm_90a"]}. emulate: host emulation is on, and the GPU is not used.
    """
    if emulate:
        return [] if backends.get(EMULATION) else ["this installation was built without host emulation"]
    archs = list(backends.get(CUDA, ()))
    if not archs:
        return [
            "this installation has no CUDA kernels (it was built without nvcc): reinstall sgl-lowlatency where nvcc "
            "is on PATH"
        ]
    if isa is None or f"{isa}a" in archs:
        return []
    missing = f"this installation has kernels for {', '.join(archs)}, not for {isa}"
    if f"{isa}a" in CUDA_ARCHS:
        missing += f": reinstall sgl-lowlatency with an nvcc that compiles {isa}a, and SGL_LOWLATENCY_CUDA_ARCHS unset"
    return [missing]


def installation_reasons(isa: str | None, *, emulate: bool) -> list[str]:
    """backend_reasons of the installed extension; one reason when it is missing or does not load."""
    try:
        backends = compiled_backends()
    except ImportError as error:
        return [str(error)]
    return backend_reasons(isa, backends, emulate=emulate)


def extension_reasons() -> list[str]:
    """One reason when the extension, which lays out the parameters of every launch, is missing or does not load."""
    try:
        compiled_backends()
    except ImportError as error:
        return [str(error)]
    return []


def code_object_reasons(isa: str, built: Mapping[str, Sequence[str]]) -> list[str]:
    """Why AMD's kernels cannot run on this GPU ("gfx950"); [] when all of them can. built: code_objects.installed()."""
    missing = [kernel for kernel, isas in built.items() if isa not in isas]
    return [f"kernels {'/'.join(missing)} not built for {isa}: {code_objects.HOW_TO_BUILD}"] if missing else []
