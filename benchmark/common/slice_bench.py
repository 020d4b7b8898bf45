"""What the benches of attention_in and attention_out have alike: launches of several layers in one graph, checked, timed, written and printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from benchmark.common import deadline
from benchmark.common.launches import point_times, poison, replay_problems
from sgl_lowlatency.bench import floors, read_bandwidth, stats, timing
from sgl_lowlatency.bench.results import Results
from sgl_lowlatency.cli.bench import missing, numbers
from sgl_lowlatency.kernels.slice import MAX_ROWS


class Ours(Protocol):
    """A slice of every layer, on rows of its own. results: all that a launch writes, of every layer, to compare replays by."""

    kernel: object
    results: Sequence[torch.Tensor]

    def launch(self, trace: torch.Tensor | None = None) -> None: ...
    def problems(self) -> list[str]: ...


def fp8_matrix(generator: torch.Generator, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3fn [rows, columns], scales of 32 x 32): normal, of standard deviation about 1 / sqrt(columns)."""
    device = generator.device
    exponents = torch.randint(0, 4, (rows // 32, columns // 32), generator=generator, device=device).float() - 5
    scale = torch.exp2(exponents - round(torch.tensor(columns**0.5).log2().item()))
    return torch.randn(rows, columns, generator=generator, device=device).mul_(8).to(torch.float8_e4m3fn), scale


def frequencies(device: torch.device, positions: int, pairs: int) -> torch.Tensor:
    """complex64 [positions, pairs] of the base 10,000."""
    angles = torch.arange(positions, device=device)[:, None] * 1e4 ** -(torch.arange(pairs, device=device) / pairs)
    return torch.polar(torch.ones_like(angles), angles)


def points_us(ours: Ours, names: tuple[str, ...]) -> dict[str, list[float]]:
    """Of the last launch, by point: when the median block and the last one were there, in us from the first block's begin."""
    trace = torch.zeros(ours.kernel.grid, len(names), dtype=torch.int64, device=ours.results[0].device)
    ours.launch(trace)
    torch.cuda.synchronize()
    return point_times(trace.cpu(), names)


def measure(ours: Ours, layers: int, groups: int, group_ms: float) -> tuple[list[float], list[str]]:
    """(ms of a launch, problems)."""
    poison(ours.results)
    ours.launch()
    torch.cuda.synchronize()
    found, before = ours.problems(), [t.clone() for t in ours.results]
    graph = timing.capture(ours.launch)
    found += replay_problems(graph.replay, ours.results, before)
    (times,) = timing.in_turn([graph.replay], groups=groups, target_ms=group_ms)
    if not all(torch.equal(a, b) for a, b in zip(before, ours.results, strict=True)):
        found.append("timed replays differ from the first launch")
    return [t / layers for t in times], found


def row_of(kernel: str, rows: int, floor_bytes: int, on_ms: list[float], read_gb_s: float, points: dict[str, list[float]], wrong: list[str]) -> dict:
    """The results row of one case."""
    return {
        "model": "deepseek-v4.1-flash", "dtype": "bf16, fp8", "tp": 1, "mode": "decode", "kernel": kernel, "metric": kernel, "rows": rows,
        "floor_ms": round(floors.floor_ms(floor_bytes, read_gb_s), 6), "on_ms": [round(t, 6) for t in on_ms], "points_us": points, "problems": wrong,
    }  # fmt: skip


def table(content: dict) -> str:
    """Two lines a case, times in microseconds."""
    lines = [f"{content['gpu']}, driver {content['driver']}, {content['versions']}"]
    lines.append(f"{'rows':>4} {'on us':>8} {'floor us':>8} {'share':>6}  problems")
    for row in content["rows"]:
        on, floor = 1e3 * stats.median(row["on_ms"]), 1e3 * row["floor_ms"]
        lines.append(f"{row['rows']:4d} {on:8.2f} {floor:8.2f} {row['on_floor_share']:6.2f}  {'; '.join(row['problems']) or '-'}")
        lines.append("     us, median and last block: " + ", ".join(f"{name} {a:.1f} {b:.1f}" for name, (a, b) in row["points_us"].items()))
    return "\n".join(lines)


def main(
    kernel: str, description: str, weights_text: str, points: tuple[str, ...], floor_bytes: Callable[[int], int],
    random_weights: Callable[[torch.device, int], object], make: Callable[[list, int], Ours],
) -> int:  # fmt: skip
    """The bench of one slice. random_weights(device, seed); make(weights of every layer, rows)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default=f"kernel-{kernel.replace('_', '-')}", help="results file name")
    parser.add_argument("--rows", type=numbers(1, MAX_ROWS), default=(1, 6, 12, 48), help="rows of a launch, comma list")
    parser.add_argument("--layers", type=int, default=4, help="launches of one graph, each with weights and rows of its own")
    parser.add_argument("--groups", type=int, default=7, help="times taken of every case")
    parser.add_argument("--group-ms", type=float, default=30.0, help="how long each replays")
    parser.add_argument("--commit", default=None, help="HASH or HASH-dirty of the code, for a copy without git")
    parser.add_argument("--deadline", type=float, default=120, help="seconds after which everything is killed")
    args = parser.parse_args()
    if refusal := missing():
        print(f"{kernel}: {refusal}", file=sys.stderr)
        return 2
    command = ["python3", "-m", f"benchmark.kernels.{kernel}", *sys.argv[1:]]
    results = Results(args.out, what="kernel", name=args.name, weights=weights_text, command=command, commit=args.commit)
    deadline.watchdog(args.deadline, lambda: print(table(results.content)))
    device = torch.device("cuda", torch.cuda.current_device())
    bandwidth = read_bandwidth.measure(4.0)
    results.set(bandwidth_gb_s={key: round(value) for key, value in bandwidth.items()})
    with torch.no_grad():
        weights = [random_weights(device, seed) for seed in range(args.layers)]
        for rows in args.rows:
            ours = make(weights, rows)
            on_ms, wrong = measure(ours, args.layers, args.groups, args.group_ms)
            row = results.add(**row_of(kernel, rows, floor_bytes(rows), on_ms, bandwidth["read_gb_s"], points_us(ours, points), wrong))
            us = 1e3 * stats.median(on_ms)
            deadline.say(f"{rows} rows: {us:.1f} us, share of the floor {row['on_floor_share']}; {'; '.join(wrong) or 'checked'}")
    print(table(results.content))
    return 1 if any(row["problems"] for row in results.content["rows"]) else 0
