"""What the commands of the kernel benches have alike: where results go, how long a case is timed, what ends everything."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmark.common import deadline
from sgl_lowlatency.bench import read_bandwidth
from sgl_lowlatency.bench.results import Results
from sgl_lowlatency.cli.bench import missing

Table = Callable[[dict], str]


def parser(description: str | None, name: str, *, groups: int = 7, group_ms: float = 30.0, deadline_s: float = 300) -> argparse.ArgumentParser:
    """With --out, --name, --groups, --group-ms, --commit and --deadline. name: of the results file."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True, help="folder of the results")
    made.add_argument("--name", default=name, help="results file name")
    made.add_argument("--groups", type=int, default=groups, help="times taken of every case")
    made.add_argument("--group-ms", type=float, default=group_ms, help="how long each replays")
    made.add_argument("--commit", default=None, help="HASH or HASH-dirty of the code, for a copy without git")
    made.add_argument("--deadline", type=float, default=deadline_s, help="seconds after which everything is killed")
    return made


def refused(bench: str) -> bool:
    """Whether this machine cannot run a bench, which is said; the exit status is 2 then."""
    if refusal := missing():
        print(f"{bench}: {refusal}", file=sys.stderr)
    return bool(refusal)


def begin(args: argparse.Namespace, bench: str, weights: str, table: Table, what: str = "kernel") -> Results:
    """The results file of a bench, and its deadline, at which `table` shows what there is. bench: its module's name."""
    command = ["python3", "-m", f"benchmark.kernels.{bench}", *sys.argv[1:]]
    results = Results(args.out, what=what, name=args.name, weights=weights, command=command, commit=args.commit)
    deadline.watchdog(args.deadline, lambda: print(table(results.content)))
    return results


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def measure_bandwidth(results: Results, *gigabytes: float) -> float:
    """The read bandwidth in GB/s, which the results file then tells. gigabytes: read_bandwidth.measure's."""
    bandwidth = read_bandwidth.measure(*gigabytes)
    results.set(bandwidth_gb_s={key: round(value) for key, value in bandwidth.items()})
    return bandwidth["read_gb_s"]


def end(results: Results, table: Table) -> int:
    """Prints the table; the exit status."""
    print(table(results.content))
    return 1 if any(row["problems"] for row in results.content["rows"]) else 0
