"""Concurrency scenarios on two real servers of one model: the plugin's tokens against the standard path's.

    python3 -m benchmark.serve.scenarios --out OUT [--model qwen3-8b] [--deadline 400]

Scenarios (`traffic.py`): requests of different lengths arriving and leaving, prefix-cache hits, chunked prefill beside
decode, aborts in mid-stream, one-token requests, requests that end at the context limit. Every text must equal the
standard path's wherever float32 decides it (tokens.py), have exactly its length, and every decode step of the plugin's
server must have been executed by the plugin (its own counters). Exit status 0 if all of that holds.
"""

from __future__ import annotations

import argparse
import sys

from benchmark import models
from benchmark.common import deadline
from benchmark.serve import arguments, coverage, server, tokens, traffic
from sgl_lowlatency.bench.results import Results


def parse() -> argparse.Namespace:
    parser = arguments.parser(__doc__, deadline_s=480)
    parser.add_argument("--context", type=int, default=2048, help="the servers' context length")
    parser.add_argument("--scale", type=float, default=1.0, help="scales prompt and output lengths")
    parser.add_argument("--only", default=None, help="comma list of scenario names")
    parser.add_argument("--bound", type=float, default=None, help="nats; default: twice the standard path's own error")
    return arguments.parse(parser)


def run_scenario(name: str, pair, plan: traffic.Plan, oracle, bound: float | None) -> dict:
    """One results row: run on both servers, compare, count the plugin's steps."""
    off = traffic.SCENARIOS[name](pair[0].client, plan)
    before = coverage.read(pair[1])
    on = traffic.SCENARIOS[name](pair[1].client, plan)
    gained = coverage.read(pair[1]).since(before)
    problems = [f"{label}: cached {item.reply.cached}" for label, item in on.items() if item.must_hit and not item.reply.cached]
    problems += traffic.length_problems(off, on)
    prompts, left, right = traffic.paired(off, on)
    row = {"scenario": name, "requests": len(on)}
    try:
        verdict = tokens.judge(
            prompts, left, right, oracle=oracle, bound=bound, client=pair[1].client, longest_prompt=plan.longest_prompt
        )
        row |= verdict.summary()
        problems += [f"wrong token: {vars(d)}" for d in verdict.wrong]
    except ValueError as error:
        problems.append(str(error))
    needed = sum(max(len(item.reply.ids) - 1, 0) for item in on.values())
    problems += gained.problems(needed)
    return row | {"decode_rows_needed": needed, "coverage": gained.summary(), "problems": problems}


def warm_widths(pair, plan: traffic.Plan) -> None:
    """One batch of every size on both servers: without decode graphs a width is self-checked at its first live step."""
    for batch in range(1, 9):
        prompts = [plan.prompt(4, 500 + i) for i in range(batch)]
        for one in pair:
            one.client.timed(prompts, 3)


def table(results: Results) -> str:
    lines = [
        f"{results.content['gpu']}",
        f"{'scenario':16s} {'reqs':>4} {'tokens':>6} {'diff':>4} {'wrong':>5} {'bound':>6} {'rows on':>8} problems",
    ]
    for row in results.content["rows"]:
        lines.append(
            f"{row['scenario']:16s} {row['requests']:4d} {row.get('tokens_compared', 0):6d} {row.get('differences', 0):4d}"
            f" {row.get('wrong', 0):5d} {row.get('bound_nats', 0):6.3f} {row['coverage'].get('rows', 0):8.0f} {row['problems'][:3] or '-'}"
        )
    return "\n".join(lines)


def main() -> int:
    args = parse()
    shape = models.named_shape(args.model, args.layers)
    results = Results(
        args.out,
        what="check",
        name="scenarios",
        weights="real-scale random, seed 0",
        command=["python3", "-m", "benchmark.serve.scenarios", *sys.argv[1:]],
        commit=args.commit,
    )
    deadline.watchdog(args.deadline, lambda: print(table(results)))
    import torch

    from benchmark.oracle import Oracle

    model = models.write_model(args.work / "model", shape)
    oracle = Oracle(model, torch.device(args.device))
    plan = traffic.Plan(vocab=shape.vocab, context=args.context, chunk=max(args.context // 4, 16), scale=args.scale)
    make = server.gpu_arguments if args.device == "cuda" else server.cpu_arguments
    server_arguments = make(context=plan.context, max_batch=8, max_tokens=plan.context * 10, radix=True)
    server_arguments += ["--chunked-prefill-size", str(plan.chunk)]
    names = args.only.split(",") if args.only else list(traffic.SCENARIOS)
    try:
        pair = server.start_pair(model, server_arguments + args.server_arg, work=args.work, limit_s=args.start_limit)
        warm_widths(pair, plan)
        for name in names:
            try:
                row = results.add(**run_scenario(name, pair, plan, oracle, args.bound))
            except (OSError, RuntimeError) as error:  # the others still run; the row carries the failure
                row = results.add(scenario=name, requests=0, coverage={}, problems=[f"{type(error).__name__}: {error}"])
            deadline.say(name, "ok" if not row["problems"] else row["problems"])
        codes = {one.name: one.stop() for one in pair}
        results.set(exit_codes=codes, exit_lines=coverage.exit_lines(pair[1]))
    finally:
        deadline.kill_all()
    print(table(results))
    print("exit lines:", results.content.get("exit_lines"))
    return 1 if any(row["problems"] for row in results.content["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
