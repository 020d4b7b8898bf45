"""Milliseconds per decode step of a real SGLang server, plugin off and on, side by side on one GPU.

    python3 -m benchmark.serve.decode_ab --out OUT [--model qwen3-8b] [--batches 1,2,4,8] [--contexts 1024]

Two servers of the same random-weight model run at once; idle, neither launches GPU work (the idle GPU load is recorded).
Measurements alternate off/on, on/off, ...; a step's time is the slope between a short and a long generation, so prefill,
HTTP and tokenisation cancel. Greedy tokens of the two servers are compared under the float32 oracle (tokens.py).
Writes OUT/NAME.json after every row; prints one table at the end. Exit status 0 if every token check passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmark import models
from benchmark.common import deadline
from benchmark.serve import arguments, coverage, server, tokens, trace
from benchmark.serve.client import greedy, random_prompt
from sgl_lowlatency.bench import floors, provenance, stats
from sgl_lowlatency.bench.results import Results


def parse() -> argparse.Namespace:
    parser = arguments.parser(__doc__, deadline_s=560)
    parser.add_argument("--name", default=None, help="results file name (default: served-MODEL)")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--contexts", default="1024")
    parser.add_argument("--short", type=int, default=16, help="new tokens of the short generation")
    parser.add_argument("--long", type=int, default=272)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compare-tokens", type=int, default=128, help="tokens compared a request, 0: none")
    parser.add_argument("--bound", type=float, default=None, help="nats; default: twice the standard path's own error")
    parser.add_argument("--read-gb-s", type=float, default=None, help="measured read bandwidth (default: measure)")
    parser.add_argument("--profile", action="store_true", help="also GPU-only step times from a trace")
    return arguments.parse(parser)


def gpu_load_idle() -> list[int]:
    """Per-cent GPU load in three samples while both servers are idle; empty without nvidia-smi."""
    samples = []
    for _ in range(3):
        time.sleep(0.7)
        query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            deadline.say("idle load not read:", error)
            return []
        samples.append(int(done.stdout.split()[0]))
    return samples


def startup_lines(one: server.Server) -> list[str]:
    """What the plugin and SGLang's binding of it logged at start."""
    return [line[:500] for line in one.grep(server.STARTUP) if "server_args=" not in line][:20]


def step_times(pair, prompts, args) -> tuple[list[float], list[float]]:
    """(off, on) ms per step, `repeats` each, the arm that goes first alternating."""
    found = ([], [])
    for repeat in range(args.repeats):
        for arm in (0, 1) if repeat % 2 == 0 else (1, 0):
            client = pair[arm].client
            short, long = client.timed(prompts, args.short), client.timed(prompts, args.long)
            found[arm].append((long - short) / (args.long - args.short) * 1e3)
    return found


def measure(pair, shape, args, results: Results, read_gb_s: float | None) -> None:
    """One results row for every context and batch size."""
    for context in map(int, args.contexts.split(",")):
        for batch in map(int, args.batches.split(",")):
            prompts = [random_prompt(context, vocab=shape.vocab, seed=100 * batch + i) for i in range(batch)]
            for one in pair:
                one.client.timed(prompts, args.short)
            off, on = step_times(pair, prompts, args)
            mean_context = context + (args.short + args.long) // 2
            num_bytes = floors.step_bytes(shape, rows=batch, context=mean_context, with_head=True)
            row = {"model": args.model, "dtype": "bf16", "tp": 1, "mode": "decode", "batch": batch, "rows": batch}
            row |= {"context": context, "off_ms": [round(x, 4) for x in off], "on_ms": [round(x, 4) for x in on]}
            row |= {"floor_bytes": num_bytes, "layers": shape.num_layers}
            if read_gb_s:
                row |= {"floor_ms": round(floors.floor_ms(num_bytes, read_gb_s), 4), "read_gb_s": round(read_gb_s)}
            row = results.add(**row)
            deadline.say(f"bs {batch} context {context}: off {off} on {on} ratio {row['ratio']}")


def gpu_only(pair, shape, args, results: Results) -> None:
    """GPU-only step times of every batch size at the first context, as top-level field `gpu_only`."""
    context, found = int(args.contexts.split(",")[0]), []
    for batch in map(int, args.batches.split(",")):
        for one in pair:
            folder = args.work / f"trace-{one.name}-{batch}"
            try:
                step = trace.profile(one.client, folder, batch=batch, context=context, vocab=shape.vocab)
            except (TimeoutError, ValueError, OSError) as error:
                step = {"error": str(error)}
            found.append({"arm": one.name, "batch": batch, "context": context, **step})
            results.set(gpu_only=found)
            deadline.say("gpu-only:", found[-1])


def compare(pair, model: Path, shape, args, results: Results) -> list[tokens.Verdict]:
    """Greedy tokens of both servers at every batch size, at mixed lengths around the first context."""
    import torch

    from benchmark.oracle import Oracle

    oracle = Oracle(model, torch.device(args.device))
    context, verdicts, rows = int(args.contexts.split(",")[0]), [], []
    for batch in map(int, args.batches.split(",")):
        prompts = [random_prompt(max(context - 37 * i, 8), vocab=shape.vocab, seed=7000 + 10 * batch + i) for i in range(batch)]
        off, on = (one.client.generate(prompts, greedy(args.compare_tokens), top=tokens.TOP) for one in pair)
        verdict = tokens.judge(prompts, off, on, oracle=oracle, bound=args.bound, client=pair[1].client)
        verdicts.append(verdict)
        rows.append({"batch": batch, **verdict.summary(), "wrong_at": [vars(d) for d in verdict.wrong]})
        results.set(tokens=rows)
        deadline.say(f"tokens bs {batch}:", verdict.summary())
    return verdicts


def table(results: Results) -> str:
    """The rows as text."""
    lines = [f"{results.content['gpu']}, {results.content['versions']}"]
    lines += [
        f"{'bs':>3} {'ctx':>6} {'off ms':>8} {'on ms':>8} {'ratio':>6} {'ci95':>15} {'floor':>7} {'share':>6} spread off/on"
    ]
    for row in results.content["rows"]:
        low, high = row["ratio_ci95"]
        off, on = row["off_ms"], row["on_ms"]
        lines.append(
            f"{row['batch']:3d} {row['context']:6d} {stats.median(off):8.3f} {stats.median(on):8.3f} {row['ratio']:6.3f}"
            f" [{low:.3f}, {high:.3f}] {row.get('floor_ms', 0):7.3f} {row.get('on_floor_share', 0):6.2f}"
            f" {stats.spread(off):.1%}/{stats.spread(on):.1%}"
        )
    for row in results.content.get("gpu_only", []):
        lines.append(f"gpu-only {row}")
    for row in results.content.get("tokens", []):
        lines.append(f"tokens { ({k: v for k, v in row.items() if k != 'wrong_at'}) } {row['wrong_at'][:2]}")
    return "\n".join(lines)


def main() -> int:
    args = parse()
    shape = models.named_shape(args.model, args.layers)
    results = Results(
        args.out,
        what="served-decode",
        name=args.name or f"served-{args.model}",
        weights="real-scale random, seed 0",
        command=["python3", "-m", "benchmark.serve.decode_ab", *sys.argv[1:]],
        commit=args.commit,
    )
    deadline.watchdog(args.deadline, lambda: print(table(results)))
    model = models.write_model(args.work / "model", shape)
    read_gb_s = args.read_gb_s
    if read_gb_s is None and args.device == "cuda":
        from sgl_lowlatency.bench import read_bandwidth

        bandwidth = read_bandwidth.measure()
        results.set(bandwidth_gb_s={k: round(v) for k, v in bandwidth.items()})
        read_gb_s = bandwidth["read_gb_s"]
    batches, longest = (
        list(map(int, args.batches.split(","))),
        max(map(int, args.contexts.split(","))) + args.long + args.short,
    )
    make = server.gpu_arguments if args.device == "cuda" else server.cpu_arguments
    server_arguments = make(context=longest + 64, max_batch=max(batches), max_tokens=(longest + 64) * max(batches) + 8192)
    try:
        pair = server.start_pair(model, server_arguments + args.server_arg, work=args.work, limit_s=args.start_limit)
        results.set(startup=startup_lines(pair[1]), idle_gpu_load=gpu_load_idle())
        measure(pair, shape, args, results, read_gb_s)
        results.set(clocks_mhz=provenance.gpu()["clocks_mhz"])
        verdicts = compare(pair, model, shape, args, results) if args.compare_tokens else []
        if args.profile:
            gpu_only(pair, shape, args, results)
        counts, uncovered = coverage.read(pair[1]), coverage.uncovered_graphs(pair[1]) if args.device == "cuda" else []
        problems = counts.problems(needed_rows=1) + uncovered
        codes = {one.name: one.stop() for one in pair}
        results.set(
            coverage=counts.summary(),
            coverage_problems=problems,
            exit_lines=coverage.exit_lines(pair[1]),
            exit_codes=codes,
        )
    finally:
        deadline.kill_all()
    print(table(results))
    print(
        "coverage:",
        results.content["coverage"],
        results.content["coverage_problems"] or "ok",
        "exit",
        results.content["exit_codes"],
    )
    return 1 if problems or any(v.wrong for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
