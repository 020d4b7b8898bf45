"""Seconds from launch to ready of a real SGLang server, plugin off and on, one server at a time, and the memory that the plugin takes.

    python3 -m benchmark.serve.start_ab --out OUT [--model qwen3-8b] [--repeats 3]

A first pair, started together, fills the caches of compiled kernels and is not counted. Then servers start alone, off/on, on/off, ..., and
are ended as soon as they answer. A start that compiled a kernel was not warm: its time is kept, and no difference is taken from the run.
`added_s` is the difference of the medians; memory is what the plugin allocated over the model's weights, both as the servers' logs tell
(startup.py). Writes OUT/NAME.json after every start; exit status 0 if all started warm and the plugin adds at most --limit-s.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmark import models
from benchmark.common import deadline
from benchmark.common.parts import Parts
from benchmark.serve import arguments, server, startup
from sgl_lowlatency.bench import stats
from sgl_lowlatency.bench.results import Results

ARMS = ("off", "on")
STOP_GRACE_S = 1.0  # the server has served nothing: what it has not ended by then is killed
CONTEXT, POOL_TOKENS = 2048, 65536  # the self-check needs lengths up to 1,000, and slots for sixteen requests of them


def parse() -> argparse.Namespace:
    parser = arguments.parser(__doc__, deadline_s=420)
    parser.add_argument("--name", default=None, help="results file name (default: start-MODEL)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=5.0, help="seconds that the plugin may add")
    args = arguments.parse(parser)
    if args.repeats < 1:
        parser.error("--repeats is at least 1")
    return args


def server_arguments(args) -> list[str]:
    """Arguments of both arms, the plugin's flag apart; decode graphs of every width that the plugin checks at start."""
    make = server.gpu_arguments if args.device == "cuda" else server.cpu_arguments
    return make(context=CONTEXT, max_batch=server.MAX_RUNNING, max_tokens=POOL_TOKENS) + args.server_arg


def started(arm: str, name: str, model: Path, args) -> server.Server:
    """A server of `arm`, not ready yet."""
    return server.Server(name, model, [*server_arguments(args), *([server.FLAG] if arm == "on" else [])], work=args.work)


def one_start(arm: str, repeat: int, model: Path, args) -> dict:
    """A row: what one start alone cost. Raises RuntimeError as server.wait_ready."""
    before = startup.cached_kernels()
    one = started(arm, f"{arm}-{repeat}", model, args)
    server.wait_ready((one,), args.start_limit)
    costs = startup.arm(one.ready_s, one.log())
    code = one.stop(STOP_GRACE_S)
    row = {"mode": "start", "arm": arm, "repeat": repeat, **costs, "compiled_kernels": startup.cached_kernels() - before, "exit_code": code}
    deadline.say(f"{arm}: ready after {costs.get('ready_s')} s, {row['compiled_kernels']} kernels compiled")
    return row


def warm_up(model: Path, args) -> int:
    """Starts and ends a pair; returns the kernels that it compiled."""
    before = startup.cached_kernels()
    pair = [started(arm, f"{arm}-warm-up", model, args) for arm in ARMS]
    server.wait_ready(pair, args.start_limit)
    for one in pair:
        one.stop(STOP_GRACE_S)
    return startup.cached_kernels() - before


def summary(rows: list[dict]) -> dict:
    """JSON field `start`: off_s and on_s of every repeat, added_s of the medians unless a start compiled, and the plugin's memory."""
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}
    found = {f"{arm}_s": [row["ready_s"] for row in by_arm[arm]] for arm in ARMS}
    compiled = sum(row["compiled_kernels"] for row in rows)
    found |= {"compiled_kernels": compiled, "cold": compiled > 0}
    if not all(by_arm.values()):
        return found
    if not compiled:
        found["added_s"] = round(stats.median(found["on_s"]) - stats.median(found["off_s"]), 2)
    return found | startup.memory(by_arm["off"][0], by_arm["on"][0])


def problems_of(start: dict, args) -> list[str]:
    """What is wrong with a run of this summary."""
    problems = [f"arm {arm} started {len(start[f'{arm}_s'])} of {args.repeats} times" for arm in ARMS if len(start[f"{arm}_s"]) < args.repeats]
    if start["cold"]:
        problems.append(f"{start['compiled_kernels']} kernels compiled after the warm-up: no difference taken")
    elif "added_s" in start and start["added_s"] > args.limit_s:
        problems.append(f"the plugin adds {start['added_s']} s to a start, {args.limit_s:g} s are allowed")
    if "plugin_memory_share" not in start:
        problems.append("the logs do not tell the plugin's memory and the model's")
    return problems


def table(results: Results) -> str:
    """The run as text."""
    start = results.content.get("start", {})
    lines = [f"{results.content['gpu']}, {results.content['versions']}, seconds from launch to ready"]
    lines += [f"{arm}: {start.get(f'{arm}_s')}" for arm in ARMS]
    if "added_s" in start:
        lines.append(f"the plugin adds {start['added_s']:+.2f} s")
    for row in results.content["rows"]:
        parts = {key: row[key] for key in ("timings_s", "built_s", "self_check_s") if key in row}
        lines.append(f"{row['arm']} {row['repeat']}: {row.get('ready_s')} s, {parts}")
    if "plugin_memory_share" in start:
        lines.append(f"memory: {start['plugin_mib']} MiB, {start['plugin_memory_share']:.2%} of {start['weights_gib']} GiB of weights")
    return "\n".join(lines)


def run(model: Path, args, results: Results, parts: Parts) -> None:
    """The warm-up, then `repeats` starts of each arm, the one that goes first alternating; a row each."""
    with parts.part("warm-up"):
        results.set(compiled_by_warm_up=warm_up(model, args))
    with parts.part("measure"):
        for repeat in range(args.repeats):
            for arm in ARMS if repeat % 2 == 0 else ARMS[::-1]:
                results.add(**one_start(arm, repeat, model, args))
                results.set(start=summary(results.content["rows"]))


def main() -> int:
    args, parts = parse(), Parts()
    results = Results(
        args.out,
        what="check",
        name=args.name or f"start-{args.model}",
        weights="real-scale random, seed 0, drawn on the GPU at load",
        command=["python3", "-m", "benchmark.serve.start_ab", *sys.argv[1:]],
        commit=args.commit,
    )
    deadline.watchdog(args.deadline, lambda: print(table(results), parts, sep="\n"))
    model = models.write_model(args.work / "model", models.named_shape(args.model, args.layers))
    problems = []
    try:
        run(model, args, results, parts)
    except (RuntimeError, OSError) as error:  # keep what was measured
        deadline.say(f"{type(error).__name__}: {error}")
        problems.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")  # a log's end may follow
    finally:
        deadline.kill_all()
    problems += problems_of(summary(results.content["rows"]), args)
    results.set(problems=problems, seconds=parts.seconds())
    print(table(results), parts, sep="\n")
    print("problems:", *(f"\n  - {problem}" for problem in problems)) if problems else print("ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
