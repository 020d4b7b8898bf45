"""Prints the versions in use and the backends compiled into this installation."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import sgl_lowlatency
from sgl_lowlatency.kernels import code_objects
from sgl_lowlatency.kernels.backends import compiled_backends

PACKAGES = ("sglang", "torch", "flashinfer-python", "triton")


def versions() -> dict[str, str | None]:
    """Package name -> installed version, None when it is not installed; imports none of them."""
    found: dict[str, str | None] = {"sgl-lowlatency": sgl_lowlatency.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def backends_line() -> str:
    """One line on what the extension can run, or why it does not load."""
    try:
        backends = compiled_backends()
    except ImportError as error:
        return str(error)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in backends.items() if names)


def lines() -> list[str]:
    """What `sgl-lowlatency version` prints."""
    shown = [f"{name} {version or 'not installed'}" for name, version in versions().items()]
    built = [f"compiled backends: {backends_line()}", f"AMD code objects: {code_objects.line()}"]
    return [", ".join(shown), *built, f"tested with sglang {sgl_lowlatency.TESTED_SGLANG}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`version` takes no arguments."""


def run(args: argparse.Namespace) -> int:
    print("\n".join(lines()))
    return 0
