"""Results files: written anew after every row, so that a run cut short keeps what it measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sgl_lowlatency.bench import provenance, stats

SCHEMA = 1
KINDS = ("served-decode", "served-verify", "kernel-step", "kernel", "replay", "fixed-length", "check")


class Results:
    """One run's file, `<out>/<name>.json`; without `out` the run is kept in `content` only.

    `what` is one of KINDS. Raises ValueError for another one.
    """

    def __init__(
        self, out: Path | None, *, what: str, name: str, weights: str, command: list[str], commit: str | None, notes=""
    ) -> None:
        if what not in KINDS:
            raise ValueError(f"what {what!r} is not one of {KINDS}")
        self.path = None
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            self.path = out / f"{name}.json"
        self.content = {"schema": SCHEMA, "what": what, "name": name, **provenance.describe(commit, command)}
        self.content |= {"weights": weights, "notes": notes, "rows": []}

    def add(self, **row) -> dict:
        """Append a row (a ratio and its interval are added when both arms are there) and write the file."""
        if row.get("off_ms") and row.get("on_ms"):
            row["ratio"] = round(stats.ratio(row["off_ms"], row["on_ms"]), 4)
            row["ratio_ci95"] = [round(x, 4) for x in stats.ratio_ci95(row["off_ms"], row["on_ms"])]
        if row.get("floor_ms") and row.get("on_ms"):
            row["on_floor_share"] = round(row["floor_ms"] / stats.median(row["on_ms"]), 4)
        self.content["rows"].append(row)
        self.write()
        return row

    def set(self, **fields) -> None:
        """Set top-level fields and write the file."""
        self.content |= fields
        self.write()

    def write(self) -> None:
        """Replace the file in one step; a reader never sees half of it."""
        if self.path is None:
            return
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(partial, self.path)
