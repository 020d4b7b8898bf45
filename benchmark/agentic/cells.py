"""The runs of a replay on disk: one cell an arm, concurrency and repeat. A replay that was cut short goes on where it stopped.

    OUT/plan.json                  what is measured: another plan in the same folder is refused
    OUT/servers.json               what the servers are, by their own account
    OUT/traces/                    the replayed traces themselves
    OUT/cells/r1-c4-on/records.jsonl   the requests
    OUT/cells/r1-c4-on/cell.json       written last: the cell is complete
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmark.agentic import records
from benchmark.agentic.arms import OFF, ON
from benchmark.agentic.records import Record


class PlanRefused(ValueError):
    """The folder's runs and those asked for cannot stand in one report; the message says what differs."""


@dataclass(frozen=True)
class Cell:
    """One finished run. repeat counts from 1. first: this arm ran first of its pair. session: names the pair of servers that ran it. date:
    when it began.

    seconds: from the first request sent until the last answer. steps, rows, fallbacks: the plugin's counters gained meanwhile, empty when
    off; rows counts padded rows of a graph too. machine: gpu, driver and clocks_mhz, read after the run.
    """

    arm: str
    concurrency: int
    repeat: int
    first: bool
    session: str
    date: str
    seconds: float
    machine: dict
    steps: dict[str, float] = field(default_factory=dict)
    rows: float = 0.0
    fallbacks: dict[str, float] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)


def folder(out: Path, repeat: int, concurrency: int, arm: str) -> Path:
    return out / "cells" / f"r{repeat}-c{concurrency}-{arm}"


def save(out: Path, cell: Cell, found: list[Record]) -> None:
    """Writes the cell; only a whole one counts."""
    place = folder(out, cell.repeat, cell.concurrency, cell.arm)
    place.mkdir(parents=True, exist_ok=True)
    records.write(place / "records.jsonl", found)
    _replace(place / "cell.json", asdict(cell))


def head(place: Path) -> Cell | None:
    """A finished cell without its requests, None for one that was not finished. Raises ValueError for one that cannot be read."""
    if not (place / "cell.json").exists():
        return None
    try:
        return Cell(**json.loads((place / "cell.json").read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place / 'cell.json'}: {error}") from None


def done(out: Path, repeat: int, concurrency: int) -> bool:
    """Whether both arms of a pair were run by one pair of servers: halves of two starts were not measured in turn."""
    both = [head(folder(out, repeat, concurrency, arm)) for arm in (OFF, ON)]
    return None not in both and both[0].session == both[1].session


def clear(out: Path, repeat: int, concurrency: int) -> None:
    """Forgets what there is of a pair that is to be run."""
    for arm in (OFF, ON):
        shutil.rmtree(folder(out, repeat, concurrency, arm), ignore_errors=True)


def every(out: Path) -> list[tuple[Cell, list[Record]]]:
    """All finished cells of finished pairs with their requests, ordered by repeat, concurrency and arm."""
    found = [(cell, place) for place in (out / "cells").glob("r*-c*-*") if (cell := head(place)) and done(out, cell.repeat, cell.concurrency)]
    found.sort(key=lambda item: (item[0].repeat, item[0].concurrency, item[0].arm))
    return [(cell, records.read(place / "records.jsonl")) for cell, place in found]


def keep_plan(out: Path, plan: dict) -> None:
    """Writes OUT/plan.json or, where runs of one are there, compares with that. Raises PlanRefused with every difference."""
    path = out / "plan.json"
    if not path.exists() or not any((out / "cells").glob("*/cell.json")):
        out.mkdir(parents=True, exist_ok=True)
        _replace(path, plan)
        return
    before = json.loads(path.read_text())
    wrong = [f"{key} was {before.get(key)}, is {plan.get(key)}" for key in sorted(before.keys() | plan.keys()) if before.get(key) != plan.get(key)]
    if wrong:
        raise PlanRefused(f"{out} holds runs of another plan; choose another --out:\n" + "\n".join(f"- {line}" for line in wrong))


def keep_servers(out: Path, account: dict) -> None:
    """Writes what the servers of the latest start said of themselves."""
    _replace(out / "servers.json", account)


def _replace(path: Path, value: dict) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)
