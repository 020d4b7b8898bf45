"""Milliseconds per decode step of a real SGLang server, plugin off and on, side by side on one GPU, or with --tp on several.

    python3 -m benchmark.serve.decode_ab --out OUT [--model qwen3-8b] [--cases 1x1024,2x1024,4x1024,8x1024] [--quantization fp8]
    python3 -m benchmark.serve.decode_ab --out OUT --smoke               # the whole chain, tiny model, no GPU needed

Two servers of the same random-weight model run at once; idle, neither launches GPU work (the idle GPU load is recorded).
Measurements alternate off/on, on/off, ...; a step's time is the slope between a short and a long generation, so prefill,
HTTP and tokenisation cancel. A case ROWSxCONTEXT sends ROWS random prompts of CONTEXT tokens; SGLang prefills them, each time anew
or, with --radix, once and found in its prefix cache from then on, which long prompts want: their prefill takes longer than the steps.
Greedy tokens of the two servers are compared under the float32 oracle (token_check.py), and what the starts cost is read from the logs
(startup.py). The floor of a MoE model counts the distinct experts that the plugin's self-check counted for as many rows of random tokens.
Writes OUT/NAME.json after every row; prints one table at the end. Exit status 0 if every check passed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys

from benchmark import models
from benchmark.common import deadline
from benchmark.common.cases import parse_cases
from benchmark.common.parts import Parts
from benchmark.serve import arguments, coverage, server, startup, token_check, trace
from benchmark.serve import pair as pairs
from benchmark.serve.client import random_prompt
from sgl_lowlatency.bench import floors, provenance, stats
from sgl_lowlatency.bench.results import Results

SMOKE = {"model": "qwen3-tiny", "cases": [(1, 64), (2, 64)], "short": 2, "long": 6, "compare_tokens": 8, "deadline": 280.0}
EMULATION = {"SGL_LOWLATENCY_EMULATE": "1", "OMP_NUM_THREADS": "1"}  # of servers without a GPU
CASES = "1x1024,2x1024,4x1024,8x1024"
PREFILL_CHUNK = 8192  # SGLang's own choice on a card of this size
FP8_NOTES = "off: W8A8 by SGLang's own choice of backend (DeepGEMM on Hopper, kernels compiled at first use); on: W8A16"


def parse() -> argparse.Namespace:
    parser = arguments.parser(__doc__, deadline_s=560)
    parser.add_argument("--name", default=None, help="results file name (default: served-MODEL[-fp8])")
    parser.add_argument("--cases", type=parse_cases, default=parse_cases(CASES), help=f"ROWSxCONTEXT, comma list (default {CASES})")
    parser.add_argument("--quantization", choices=("fp8",), help="FP8 matrices with a scale for every 128 x 128, as Qwen3-8B-FP8 has")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that either server's model is split over; both servers share them")
    parser.add_argument("--radix", action="store_true", help="keep SGLang's prefix cache on")
    parser.add_argument("--short", type=int, default=16, help="new tokens of the short generation")
    parser.add_argument("--long", type=int, default=272)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compare-tokens", type=int, default=128, help="tokens compared a request, 0: none")
    parser.add_argument("--compare-up-to", type=int, default=8192, help="tokens of context up to which tokens are compared")
    parser.add_argument("--bound", type=float, default=None, help="nats; default: twice the standard path's own error")
    parser.add_argument("--read-gb-s", type=float, default=None, help="measured read bandwidth (default: measure)")
    parser.add_argument("--profile", action="store_true", help="also GPU-only step times from a trace")
    parser.add_argument("--smoke", action="store_true", help="tiny model, few tokens; on the CPU in host emulation without a GPU")
    parser.add_argument("--dry-run", action="store_true", help="print the servers' commands and the cases, start nothing")
    args = arguments.parse(parser, SMOKE | {"device": "cuda" if provenance.gpu()["num_gpus"] else "cpu"})
    args.slug = f"{args.model}-{args.quantization}" if args.quantization else args.model
    args.slug += f"-tp{args.tp}" if args.tp > 1 else ""
    return args


def step_times(pair, prompts, args) -> tuple[list[float], list[float], int]:
    """(off, on) ms per step, `repeats` each, the arm that goes first alternating; and the fewest prompt tokens that a long generation
    found cached."""
    found, cached = ([], []), []
    for repeat in range(args.repeats):
        for arm in (0, 1) if repeat % 2 == 0 else (1, 0):
            client = pair[arm].client
            short, (long, replies) = client.timed(prompts, args.short), client.timed_replies(prompts, args.long)
            found[arm].append((long - short) / (args.long - args.short) * 1e3)
            cached += [reply.cached for reply in replies]
    return *found, min(cached)


def measure(pair, shape, args, results: Results, read_gb_s: float | None) -> None:
    """One results row a case."""
    for batch, context in args.cases:
        prompts = [random_prompt(context, vocab=shape.vocab, seed=100 * batch + i) for i in range(batch)]
        for one in pair:
            one.client.timed(prompts, args.short)
        off, on, cached = step_times(pair, prompts, args)
        mean_context = context + (args.short + args.long) // 2
        experts = experts_a_layer(pair[1].log(), batch) if shape.is_moe else None
        case = {"rows": batch, "context": mean_context, "fp8": args.quantization == "fp8", "experts": experts}
        num_bytes = floors.step_bytes(shape, **case, with_head=True) // args.tp  # of one GPU; the norms that all read are nothing beside
        row = {"model": args.slug, "dtype": args.quantization or "bf16", "tp": args.tp, "mode": "decode", "batch": batch, "rows": batch}
        row |= {"context": context, "off_ms": [round(x, 4) for x in off], "on_ms": [round(x, 4) for x in on]}
        row |= {"cached_prompt_tokens": cached, "floor_bytes": num_bytes, "layers": shape.num_layers}
        row |= {"experts_a_layer": experts} if experts else {}
        if read_gb_s:
            row |= {"floor_ms": round(floors.floor_ms(num_bytes, read_gb_s), 4), "read_gb_s": round(read_gb_s)}
        row = results.add(**row)
        deadline.say(f"bs {batch} context {context}: off {off} on {on} ratio {row['ratio']}")


def experts_a_layer(log: str, rows: int) -> float | None:
    """Of a server's log, the distinct experts a layer that its self-check of so many rows met; None where there was none."""
    found = re.search(rf"self-check: {rows} rows, .*; ([\d.]+) experts a layer\)", log)
    return float(found[1]) if found else None


def gpu_only(pair, shape, args, results: Results) -> None:
    """GPU-only step times of every case, as top-level field `gpu_only`."""
    found = []
    for batch, context in args.cases:
        for one in pair:
            folder = args.work / f"trace-{one.name}-{batch}x{context}"
            try:
                step = trace.profile(one.client, folder, batch=batch, context=context, vocab=shape.vocab)
            except (TimeoutError, ValueError, OSError) as error:
                step = {"error": str(error)}
            found.append({"arm": one.name, "batch": batch, "context": context, **step})
            results.set(gpu_only=found)
            deadline.say("gpu-only:", found[-1])


def table(results: Results) -> str:
    """The rows as text."""
    content = results.content
    lines = [f"{content['gpu']}, {content['versions']}, {content['name']}"]
    lines += [
        f"{'bs':>3} {'ctx':>6} {'off ms':>8} {'on ms':>8} {'ratio':>6} {'ci95':>15} {'floor':>7} {'share':>6} spread off/on"
    ]
    for row in content["rows"]:
        low, high = row["ratio_ci95"]
        off, on = row["off_ms"], row["on_ms"]
        lines.append(
            f"{row['batch']:3d} {row['context']:6d} {stats.median(off):8.3f} {stats.median(on):8.3f} {row['ratio']:6.3f}"
            f" [{low:.3f}, {high:.3f}] {row.get('floor_ms', 0):7.3f} {row.get('on_floor_share', 0):6.2f}"
            f" {stats.spread(off):.1%}/{stats.spread(on):.1%}"
        )
    for row in content.get("gpu_only", []):
        lines.append(f"gpu-only {row}")
    for row in content.get("tokens", []):
        lines.append(f"tokens { ({k: v for k, v in row.items() if k != 'wrong_at'}) } {row.get('wrong_at', [])[:2]}")
    if "start" in content:
        lines.append(startup.sentence(content["start"]))
    return "\n".join(lines)


def server_arguments(args) -> list[str]:
    """Arguments of both servers, the plugin's flag apart."""
    make = server.gpu_arguments if args.device == "cuda" else server.cpu_arguments
    more = args.long + args.short + 64
    tokens = max(batch * (context + more) for batch, context in args.cases)
    if args.radix:  # what the cache keeps of earlier cases may be dropped, of this one not
        tokens += max(context for _, context in args.cases)
    sizes = {"context": max(context for _, context in args.cases) + more, "max_batch": max(batch for batch, _ in args.cases)}
    ranks = ["--tp-size", str(args.tp)] if args.tp > 1 else []
    return make(**sizes, max_tokens=tokens + 8192, radix=args.radix) + ranks + args.server_arg


def batch_tokens(args) -> list[int]:
    """Tokens of the batches that the servers may run: decode steps, prefills of any of the measured prompts and of all compared ones,
    and the request that SGLang sends itself."""
    found = {3} | {batch for batch, _ in args.cases}
    for batch, context in args.cases:
        prefills = {context * prompts for prompts in range(1, batch + 1)}  # they may arrive one by one
        prefills.add(sum(map(len, token_check.prompts_of(batch, context, vocab=1000))))
        found |= {min(tokens, PREFILL_CHUNK) for tokens in prefills}
    return sorted(found)


def run(args, shape, results: Results, parts: Parts) -> list[str]:
    """Everything between the model and the servers' end; returns what is wrong."""
    model = models.write_model(args.work / "model", shape, fp8=args.quantization == "fp8")
    with parts.part("start"):
        pair = pairs.start(args, model, server_arguments(args), results, batch_tokens=batch_tokens(args))
    read_gb_s = args.read_gb_s
    if read_gb_s is None and args.device == "cuda":
        with parts.part("bandwidth"):
            from sgl_lowlatency.bench import read_bandwidth

            bandwidth = read_bandwidth.measure()
        results.set(bandwidth_gb_s={k: round(v) for k, v in bandwidth.items()})
        read_gb_s = bandwidth["read_gb_s"]
    with parts.part("measure"):
        measure(pair, shape, args, results, read_gb_s)
        results.set(clocks_mhz=provenance.gpu()["clocks_mhz"])
    problems = []
    if args.compare_tokens:
        with parts.part("compare tokens"):
            problems += token_check.check_all(pair, model, shape, args, results)
    if args.profile:
        with parts.part("profile"):
            gpu_only(pair, shape, args, results)
    with parts.part("stop"):
        counts, uncovered = coverage.read(pair[1]), coverage.uncovered_graphs(pair[1]) if args.device == "cuda" else []
        lost = counts.problems(needed_rows=1) + uncovered
        codes = server.stop_pair(pair)
    results.set(coverage=counts.summary(), coverage_problems=lost, exit_lines=coverage.exit_lines(pair[1]), exit_codes=codes)
    return problems + lost


def dry_run(args) -> None:
    """Prints what would run."""
    for name, flags in (("off", []), ("on", [server.FLAG])):
        print(f"# {name}\n{shlex.join(server.launch_command(args.work / 'model', '$PORT', [*server_arguments(args), *flags]))}")
    for batch, context in args.cases:
        print(f"# {args.repeats} times, off and on in turn: {batch} prompts of {context} tokens, {args.short} and then {args.long} new tokens each")


def main() -> int:
    args, parts = parse(), Parts()
    if args.dry_run:
        dry_run(args)
        return 0
    if args.device == "cpu":
        os.environ.update(EMULATION)
    shape = models.named_shape(args.model, args.layers)
    results = Results(
        args.out,
        what="served-decode",
        name=args.name or f"served-{args.slug}",
        weights="real-scale random, seed 0",
        command=["python3", "-m", "benchmark.serve.decode_ab", *sys.argv[1:]],
        commit=args.commit,
        notes=FP8_NOTES if args.quantization else "",
    )
    deadline.watchdog(args.deadline, lambda: print(table(results), parts, sep="\n"))
    try:
        problems = run(args, shape, results, parts)
    finally:
        deadline.kill_all()
        results.set(seconds=parts.seconds())
        print(table(results), parts, sep="\n")
    print("coverage:", results.content["coverage"], "exit", results.content["exit_codes"])
    print("problems:", *(f"\n  - {problem}" for problem in problems)) if problems else print("ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
