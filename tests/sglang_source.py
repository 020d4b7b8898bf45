"""The text of SGLang's modules, for tests that pin what only runs on a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def source(module: str, suffix: str = ".py") -> str:
    """The text of a module of SGLang, named below the package, which need not be importable here; or of another file, by its suffix."""
    folder = importlib.util.find_spec("sglang").submodule_search_locations[0]
    return (Path(folder) / f"{module.replace('.', '/')}{suffix}").read_text()
