"""Milliseconds per token of NGRAM speculative decoding in a real SGLang server, plugin off and on, side by side on one GPU.

    python3 -m benchmark.serve.ngram_ab --out OUT [--model qwen3-8b] [--batches 1,4,8] [--context 1024] [--drafts 4]

Both servers run NGRAM at breadth 1, so the plugin is the only difference. Prompts repeat a phrase; what random weights make of them
need not, so every batch is generated a few times before it is measured: NGRAM then drafts from the texts it has seen. A token's time
is the slope between a short and a long generation; measurements alternate off/on, on/off, .... Accept lengths are SGLang's own
counts, and so are the verify steps that the plugin's counters have to account for.

Greedy tokens of the two servers are compared under the float32 oracle (tokens.py). SGLang verifies NGRAM's drafts as a chain on
this path even where its matches part, so either arm may accept a token that float32 would not: `off_overruled` and `on_overruled`
count those of each arm's own text, and tell the standard path's from the plugin's.
Writes OUT/NAME.json after every row; prints one table at the end. Exit status 0 if every check passed.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import sys
from pathlib import Path

from benchmark import models
from benchmark.common import deadline
from benchmark.serve import arguments, coverage, server, tokens
from benchmark.serve.client import Reply, greedy, repetitive_prompt
from benchmark.serve.decode_ab import gpu_load_idle, startup_lines
from sgl_lowlatency.bench import provenance, stats
from sgl_lowlatency.bench.results import Results

ARMS = ("off", "on")


def parse() -> argparse.Namespace:
    parser = arguments.parser(__doc__, deadline_s=560)
    parser.add_argument("--name", default=None, help="results file name (default: served-ngram-MODEL)")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of a request")
    parser.add_argument("--period", type=int, default=24, help="tokens of the phrase that a prompt repeats")
    parser.add_argument("--drafts", type=int, default=4, help="tokens of a verify step a request")
    parser.add_argument("--short", type=int, default=16, help="new tokens of the short generation")
    parser.add_argument("--long", type=int, default=272)
    parser.add_argument("--warm", type=int, default=2, help="long generations before a batch is measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compare-tokens", type=int, default=128, help="tokens compared a request, 0: none")
    parser.add_argument("--bound", type=float, default=None, help="nats; default: twice the standard path's own error")
    args = arguments.parse(parser)
    args.batches = [int(word) for word in args.batches.split(",")]
    if args.drafts < 2 or args.short >= args.long or args.repeats < 1 or args.warm < 1:
        parser.error("--drafts is at least 2, --repeats and --warm at least 1, --short less than --long")
    return args


def ngram_arguments(drafts: int) -> list[str]:
    """Server arguments of both arms beyond the common ones."""
    chain = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"]
    return [*chain, "--speculative-num-draft-tokens", str(drafts)]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measurement. token_ms: a token of one request. step_ms: a verify step. accept_length: tokens a verify step."""

    token_ms: float
    step_ms: float
    accept_length: float
    verify_steps: int  # of the slowest request, short and long together: what the server ran at least

    @classmethod
    def of(cls, short: tuple[float, list[Reply]], long: tuple[float, list[Reply]]) -> Sample:
        """From the seconds and replies of a short and a long generation. Raises ValueError when SGLang counted no verify step."""
        seconds = long[0] - short[0]
        counts = [[reply.verify_steps for reply in replies] for _, replies in (short, long)]
        if not all(map(all, counts)):
            raise ValueError(f"SGLang counted no verify steps: {counts}")
        new = len(long[1][0].ids) - len(short[1][0].ids)
        steps = max(counts[1]) - max(counts[0])
        made = sum(len(reply.ids) for reply in long[1])
        return cls(seconds / new * 1e3, seconds / max(steps, 1) * 1e3, made / sum(counts[1]), max(counts[0]) + max(counts[1]))


def samples(pair, prompts, args) -> dict[str, list[Sample]]:
    """By arm, `repeats` each, the arm that goes first alternating."""
    found = {arm: [] for arm in ARMS}
    for repeat in range(args.repeats):
        for arm in (0, 1) if repeat % 2 == 0 else (1, 0):
            short, long = (pair[arm].client.timed_replies(prompts, count) for count in (args.short, args.long))
            found[ARMS[arm]].append(Sample.of(short, long))
    return found


def row_of(found: dict[str, list[Sample]], gained: coverage.Counts, *, batch: int, args) -> dict:
    """The fields of a results row. gained: the plugin's counters over its samples."""
    row = {"model": args.model, "dtype": "bf16", "tp": 1, "mode": "verify", "batch": batch, "rows": batch * args.drafts}
    row |= {"drafts": args.drafts, "context": args.context}
    for arm in ARMS:
        row |= {
            f"{arm}_ms": [round(sample.token_ms, 4) for sample in found[arm]],
            f"{arm}_step_ms": [round(sample.step_ms, 4) for sample in found[arm]],
            f"{arm}_accept_length": [round(sample.accept_length, 3) for sample in found[arm]],
            f"{arm}_verify_steps": sum(sample.verify_steps for sample in found[arm]),
        }
    executed = sum(gained.executed.values())
    row["on_steps"] = {str(rows): count for rows, count in sorted(gained.executed.items())}
    row["served"] = gained.modes == {"verify"} and executed >= row["on_verify_steps"]
    return row


def measure(pair, shape, args, results: Results) -> list[str]:
    """One results row a batch size; returns what is wrong with them."""
    problems = []
    for batch in args.batches:
        prompts = prompts_of(batch, shape.vocab, args)
        for one in pair:
            for _ in range(args.warm):
                one.client.timed(prompts, args.long)
            one.client.timed(prompts, args.short)
        before = coverage.read(pair[1])
        found = samples(pair, prompts, args)
        row = results.add(**row_of(found, coverage.read(pair[1]).since(before), batch=batch, args=args))
        deadline.say(
            f"bs {batch}: ms a token off {row['off_ms']} on {row['on_ms']} ratio {row['ratio']}, accept length off "
            f"{row['off_accept_length']} on {row['on_accept_length']}, plugin's steps {row['on_steps']}"
        )
        if not row["served"]:
            problems.append(f"bs {batch}: the plugin ran {row['on_steps']} of {row['on_verify_steps']} verify steps of {row['rows']} rows")
    return problems


def prompts_of(batch: int, vocab: int, args) -> list[list[int]]:
    """The prompts of a batch size: phrases that no other request has."""
    return [
        repetitive_prompt(args.context, vocab=vocab, seed=1000 * batch + request, period=args.period) for request in range(batch)
    ]


def compare_batch(pair, prompts, args, oracle) -> tuple[tokens.Verdict, dict]:
    """The verdict on one batch's greedy tokens, and the fields of its entry. Raises ValueError when a server does not report
    log-probabilities of every token."""
    off, on = (one.client.generate(prompts, greedy(args.compare_tokens), top=tokens.TOP) for one in pair)
    for arm, replies in zip(ARMS, (off, on)):
        for reply in replies:
            if len(reply.top) != len(reply.ids):
                raise ValueError(f"the {arm} server gave log-probabilities of {len(reply.top)} of {len(reply.ids)} tokens")
    verdict = tokens.judge(prompts, off, on, oracle=oracle, bound=args.bound, client=pair[1].client)
    entry = verdict.summary() | {"wrong_at": [vars(found) for found in verdict.wrong]}
    for arm, replies in zip(ARMS, (off, on)):
        entry[f"{arm}_overruled"] = tokens.Fp32(oracle, prompts, replies).overruled(replies, verdict.bound)
        entry[f"{arm}_verify_steps"] = sum(reply.verify_steps for reply in replies)
    return verdict, entry


def compare(pair, model: Path, shape, args, results: Results) -> list[str]:
    """Greedy tokens of both servers at every batch size, on the prompts that were measured; returns what is wrong with them."""
    import torch

    from benchmark.oracle import Oracle

    oracle, rows, problems = Oracle(model, torch.device(args.device)), [], []
    for batch in args.batches:
        try:
            verdict, entry = compare_batch(pair, prompts_of(batch, shape.vocab, args), args, oracle)
        except (RuntimeError, ValueError, IndexError) as error:
            entry, problem = {"error": str(error)}, f"tokens bs {batch}: {error}"
        else:
            problem = f"tokens bs {batch}: {len(verdict.wrong)} wrong" if verdict.wrong else None
        rows.append({"batch": batch, **entry})
        results.set(tokens=rows)
        problems += [problem] if problem else []
        deadline.say(f"tokens bs {batch}:", {key: value for key, value in entry.items() if key != "wrong_at"})
    return problems


def table(results: Results) -> str:
    """The rows as text."""
    lines = [f"{results.content['gpu']}, {results.content['versions']}, ms a token of one request"]
    lines += [f"{'bs':>3} {'rows':>4} {'off ms':>8} {'on ms':>8} {'ratio':>6} {'ci95':>15} {'accept off/on':>13} {'step off/on ms':>15} served"]
    for row in results.content["rows"]:
        low, high = row["ratio_ci95"]
        ms, accept, step = ([stats.median(row[f"{arm}_{what}"]) for arm in ARMS] for what in ("ms", "accept_length", "step_ms"))
        lines.append(
            f"{row['batch']:3d} {row['rows']:4d} {ms[0]:8.3f} {ms[1]:8.3f} {row['ratio']:6.3f} [{low:.3f}, {high:.3f}]"
            f" {accept[0]:6.2f}/{accept[1]:.2f} {step[0]:8.3f}/{step[1]:.3f} {'yes' if row['served'] else 'NO'}"
        )
    for row in results.content.get("tokens", []):
        lines.append(f"tokens { ({k: v for k, v in row.items() if k != 'wrong_at'}) } {row.get('wrong_at', [])[:2]}")
    return "\n".join(lines)


def server_arguments(args) -> list[str]:
    """Arguments of both servers, the plugin's flag apart."""
    make = server.gpu_arguments if args.device == "cuda" else server.cpu_arguments
    longest = args.context + args.long + args.drafts
    common = make(context=longest + 64, max_batch=max(args.batches), max_tokens=(longest + 64) * max(args.batches) + 8192)
    return [*common, *ngram_arguments(args.drafts), *args.server_arg]


def main() -> int:
    args = parse()
    shape = models.named_shape(args.model, args.layers)
    results = Results(
        args.out,
        what="served-verify",
        name=args.name or f"served-ngram-{args.model}",
        weights="real-scale random, seed 0",
        command=["python3", "-m", "benchmark.serve.ngram_ab", *sys.argv[1:]],
        commit=args.commit,
    )
    deadline.watchdog(args.deadline, lambda: print(table(results)))
    model = models.write_model(args.work / "model", shape)
    problems, pair = [], ()
    try:
        pair = server.start_pair(model, server_arguments(args), work=args.work, limit_s=args.start_limit)
        results.set(startup=startup_lines(pair[1]), idle_gpu_load=gpu_load_idle())
        problems += measure(pair, shape, args, results)
        results.set(clocks_mhz=provenance.gpu()["clocks_mhz"], problems=problems)
        if args.compare_tokens:
            problems += compare(pair, model, shape, args, results)
        counts = coverage.read(pair[1])
        problems += counts.problems(needed_rows=1)
        results.set(coverage=counts.summary(), problems=problems)
        codes = {one.name: one.stop() for one in pair}
        results.set(exit_lines=coverage.exit_lines(pair[1]), exit_codes=codes)
    except (RuntimeError, OSError, ValueError, http.client.HTTPException) as error:  # keep what was measured
        deadline.say(f"{type(error).__name__}: {error}")
        problems.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")  # a log's end may follow
        results.set(problems=problems)
        for one in pair:
            deadline.say(f"{one.name}: exit status {one.process.poll()}, the end of its log:\n{one.tail()}")
    finally:
        deadline.kill_all()
    print(table(results))
    print("problems:", *(f"\n  - {problem}" for problem in problems)) if problems else print("ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
