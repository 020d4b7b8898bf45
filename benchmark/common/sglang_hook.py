"""Hooks of the benchmark for SGLang's processes: entry points of the group `sglang.srt.plugins` that a folder on PYTHONPATH makes it load."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def install(folder: Path, name: str, function: str) -> str:
    """Writes a dist-info with the entry point `name`, MODULE:FUNCTION, into `folder`; returns the PYTHONPATH that makes it load, in a server and every
    process that it spawns."""
    info = folder / f"{name}-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {function}\n")
    (info / "RECORD").write_text("")
    return f"{folder.resolve()}{os.pathsep}{REPOSITORY}"
