"""Hands `sgl-lowlatency bench serve` and `bench replay` to the scripts of a checkout: they start servers and are not installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sgl_lowlatency.bench import provenance

SCRIPTS = {"serve": "benchmark.serve.decode_ab", "replay": "benchmark.replay"}


def find() -> Path | None:
    """The checkout that this package runs from, or the one that is the current folder."""
    return next((root for root in (provenance.REPOSITORY, Path.cwd()) if (root / "benchmark" / "replay.py").is_file()), None)


def hand_over(name: str, words: list[str]) -> None:
    """Becomes the script called `name`, one of SCRIPTS. Ends the process with status 2 where there is no checkout."""
    root = find()
    if root is None:
        print(f"sgl-lowlatency bench {name}: run it from a checkout: its scripts, benchmark/, are not part of an installed package", file=sys.stderr)
        raise SystemExit(2)
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", SCRIPTS[name], *words], os.environ | {"PYTHONPATH": path})
