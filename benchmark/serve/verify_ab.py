"""Milliseconds per verify step and per token of speculative decoding in a real SGLang server, plugin off and on, on one GPU or with --tp on several.

    python3 -m benchmark.serve.verify_ab --out OUT --algorithm ngram|eagle3|dflash|dspark|standalone [--model qwen3-8b] [--batches 1,4]
        [--context 1024] [--drafts 4] [--draft-family qwen3|llama] [--tp 1]

Both servers verify a chain of --drafts tokens a request, drafted by NGRAM at breadth 1 or by a model of benchmark/drafts.py, so the plugin is
the only difference. How many drafts are accepted depends on the text and on what has been seen, and both would differ from server to
server; here they cannot. The model's LM head gives every token one successor (forced_text.py), so both servers generate the same text from
a prompt whatever they round, the draft models propose those successors, and the caches are flushed before every generation: NGRAM starts
with nothing (SGLang clears its n-grams with the prefix cache), accepts nothing for the first --period tokens, and nearly everything from
then on. A row's arms are comparable where that came true: every text was the forced one, and every request took the same number of verify
steps in either arm and every repeat (`equal_work`). Otherwise the row says why it decides nothing, which is a problem; so is a draft model
whose drafts are mostly refused, a plugin that lost a verify step, and one that passed no self-check. Times are slopes between a short and a
long generation; measurements alternate off/on, on/off, .... Accept lengths are SGLang's own counts, and so are the verify steps that the
plugin's counters have to account for.

With --compare-tokens, NGRAM's default, greedy tokens of the two servers are compared under the float32 oracle as well (tokens.py). SGLang
verifies NGRAM's drafts as a chain on this path even where its matches part, so either arm may accept a token that float32 would not:
`off_overruled` and `on_overruled` count those of each arm's own text, and tell the standard path's from the plugin's.
Writes OUT/NAME.json after every row; prints one table at the end. Exit status 0 if every check passed.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import re
import sys
from pathlib import Path

from benchmark import drafts, forced_text, models
from benchmark.common import deadline
from benchmark.common.parts import Parts
from benchmark.serve import arguments, coverage, server, speculation, startup, tokens
from benchmark.serve import pair as pairs
from benchmark.serve.client import Reply, greedy, random_prompt
from sgl_lowlatency import config
from sgl_lowlatency.bench import provenance, stats
from sgl_lowlatency.bench.results import Results

ARMS = ("off", "on")
BATCHES, DRAFT_BATCHES = "1,4,8", "1,4"  # of NGRAM; of draft models, whose eight requests would be 32 rows, which no plugin runs
LONG, DRAFT_LONG = 272, 400  # new tokens: about a hundred verify steps more than the short generation's
COMPARED_TOKENS = 128  # of NGRAM


def parse() -> argparse.Namespace:
    parser = arguments.parser(__doc__, deadline_s=560)
    parser.add_argument("--algorithm", choices=sorted(speculation.ALGORITHMS), required=True)
    parser.add_argument("--name", default=None, help="results file name (default: served-ALGORITHM-MODEL)")
    parser.add_argument("--batches", default=None, help=f"default: {BATCHES}, of a draft model {DRAFT_BATCHES}")
    parser.add_argument("--draft-family", choices=drafts.FAMILIES, default="qwen3", help="of a standalone draft")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that either server's models are split over; both servers share them")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of a request")
    parser.add_argument("--period", type=int, default=64, help="tokens after which a text repeats")
    parser.add_argument("--drafts", type=int, default=4, help="tokens of a verify step a request")
    parser.add_argument("--short", type=int, default=16, help="new tokens of the short generation")
    parser.add_argument("--long", type=int, default=None, help=f"of the long one (default: {LONG}, of a draft model {DRAFT_LONG})")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compare-tokens", type=int, default=None, help=f"tokens compared a request, 0: none (default: {COMPARED_TOKENS} of NGRAM)")
    parser.add_argument("--bound", type=float, default=None, help="nats; default: twice the standard path's own error")
    args = arguments.parse(parser)
    is_ngram = args.algorithm == "ngram"
    args.batches = [int(word) for word in (args.batches or (BATCHES if is_ngram else DRAFT_BATCHES)).split(",")]
    args.long = args.long or (LONG if is_ngram else DRAFT_LONG)
    if args.compare_tokens is None:
        args.compare_tokens = COMPARED_TOKENS if is_ngram else 0
    args.slug = args.algorithm if args.draft_family == "qwen3" else f"{args.algorithm}-{args.draft_family}"
    if args.draft_family != "qwen3" and args.algorithm != "standalone":
        parser.error("--draft-family is of a standalone draft")
    if args.drafts < 2 or args.short >= args.long or args.repeats < 1 or args.period < 2:
        parser.error("--drafts and --period are at least 2, --repeats at least 1, --short less than --long")
    return args


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measurement. token_ms: a token of one request. step_ms: a verify step. accept_length: tokens a verify step. texts: of the
    long generation. steps: verify steps of every request, of the short generation and of the long one."""

    token_ms: float
    step_ms: float
    accept_length: float
    texts: list[list[int]]
    steps: list[tuple[int, int]]

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
        texts = [reply.ids for reply in long[1]]
        return cls(seconds / new * 1e3, seconds / max(steps, 1) * 1e3, made / sum(counts[1]), texts, list(zip(*counts)))

    @property
    def served_steps(self) -> int:
        """Verify steps of the slowest request, short and long together: what the server ran at least."""
        return sum(max(of_all) for of_all in zip(*self.steps))


def samples(pair, prompts, args) -> dict[str, list[Sample]]:
    """By arm, `repeats` each, the arm that goes first alternating; every generation from flushed caches."""
    found = {arm: [] for arm in ARMS}
    for repeat in range(args.repeats):
        for arm in (0, 1) if repeat % 2 == 0 else (1, 0):
            client, timed = pair[arm].client, []
            for count in (args.short, args.long):
                client.flush()
                timed.append(client.timed_replies(prompts, count))
            found[ARMS[arm]].append(Sample.of(*timed))
    return found


def unequal_work(found: dict[str, list[Sample]], texts: list[list[int]]) -> str | None:
    """Why the arms did not do the same work, None where they did: `texts` from every request, in the same verify steps everywhere."""
    for arm in ARMS:
        for sample in found[arm]:
            for request, (got, forced) in enumerate(zip(sample.texts, texts, strict=True)):
                if got != forced:
                    return f"request {request} of arm {arm} left the forced text at token {tokens.first_difference(got, forced)}"
    steps = [sample.steps for arm in ARMS for sample in found[arm]]
    if any(other != steps[0] for other in steps):
        return f"verify steps by request, short and long, differ: off {[s.steps for s in found['off']]}, on {[s.steps for s in found['on']]}"
    return None


def row_of(found: dict[str, list[Sample]], gained: coverage.Counts, texts: list[list[int]], *, batch: int, args) -> dict:
    """The fields of a results row. gained: the plugin's counters over its samples. texts: the forced ones, of the long generation."""
    row = {"model": args.model, "dtype": "bf16", "tp": args.tp, "mode": "verify", "algorithm": args.slug, "batch": batch, "rows": batch * args.drafts}
    row |= {"drafts": args.drafts, "context": args.context, "period": args.period}
    for arm in ARMS:
        row |= {
            f"{arm}_ms": [round(sample.token_ms, 4) for sample in found[arm]],
            f"{arm}_step_ms": [round(sample.step_ms, 4) for sample in found[arm]],
            f"{arm}_accept_length": [round(sample.accept_length, 3) for sample in found[arm]],
            f"{arm}_verify_steps": sum(sample.served_steps for sample in found[arm]),
        }
    why = unequal_work(found, texts)
    row["tokens_compared"] = sum(len(text) for sample in found["off"] for text in sample.texts)
    row |= {"step_ratio": round(stats.ratio(row["off_step_ms"], row["on_step_ms"]), 4), "equal_work": why is None}
    row |= {"verify_steps_by_request": found["off"][0].steps} if why is None else {"not_decidable": why}
    executed = sum(gained.executed.values())
    row["on_steps"] = {str(rows): count for rows, count in sorted(gained.executed.items())}
    row["served"] = gained.modes == {"verify"} and executed >= row["on_verify_steps"]
    return row


def measure(pair, shape, args, results: Results) -> list[str]:
    """One results row a batch size; returns what is wrong with them."""
    problems = []
    for batch in args.batches:
        prompts = prompts_of(batch, shape.vocab, args)
        texts = [forced_text.text(prompt[-1], args.long, vocab=shape.vocab, period=args.period) for prompt in prompts]
        for one in pair:
            one.client.flush()
            one.client.timed(prompts, args.long)
        before = coverage.read(pair[1])
        found = samples(pair, prompts, args)
        row = results.add(**row_of(found, coverage.read(pair[1]).since(before), texts, batch=batch, args=args))
        deadline.say(
            f"bs {batch}: ms a token off {row['off_ms']} on {row['on_ms']} ratio {row['ratio']}, ms a step off {row['off_step_ms']} on "
            f"{row['on_step_ms']}, accept length off {row['off_accept_length']} on {row['on_accept_length']}, plugin's steps {row['on_steps']}"
        )
        if not row["equal_work"]:
            problems.append(f"bs {batch}: not decidable: {row['not_decidable']}")
        if args.algorithm != "ngram" and (least := min(row["off_accept_length"] + row["on_accept_length"])) < args.drafts / 2:
            problems.append(f"bs {batch}: {least} tokens accepted a verify step of {args.drafts}: the draft model's drafts are refused")
        if not row["served"]:
            problems.append(f"bs {batch}: the plugin ran {row['on_steps']} of {row['on_verify_steps']} verify steps of {row['rows']} rows")
    return problems


def prompts_of(batch: int, vocab: int, args) -> list[list[int]]:
    """Prompts whose last tokens start texts that no other request of the batch has: random ones before these, or those texts themselves where
    drafts are copies."""
    last = [args.period * (1 + request) for request in range(batch)]
    if speculation.ALGORITHMS[args.algorithm].copies:
        periods = -(-args.context // args.period)
        return [forced_text.text(token, periods * args.period, vocab=vocab, period=args.period)[-args.context :] for token in last]
    prompts = [random_prompt(args.context, vocab=vocab, seed=1000 * batch + request) for request in range(batch)]
    return [[*prompt[:-1], token] for prompt, token in zip(prompts, last)]


def compare_batch(pair, prompts, args, oracle) -> tuple[tokens.Verdict, dict]:
    """The verdict on one batch's greedy tokens, and the fields of its entry. Raises ValueError when a server does not report
    log-probabilities of every token."""
    for one in pair:
        one.client.flush()
    off, on = (one.client.generate(prompts, greedy(args.compare_tokens), top=tokens.TOP) for one in pair)
    for arm, replies in zip(ARMS, (off, on)):
        for reply in replies:
            if len(reply.top) != len(reply.ids):
                raise ValueError(f"the {arm} server gave log-probabilities of {len(reply.top)} of {len(reply.ids)} tokens")
    verdict = tokens.judge(prompts, off, on, oracle=oracle, bound=args.bound, client=pair[1].client)
    entry = verdict.summary() | {"wrong_at": [vars(found) for found in verdict.wrong]}
    exact = tokens.Fp32(oracle, prompts, off)
    same = [reply.ids for reply in off] == [reply.ids for reply in on]
    for arm, replies, fp32 in zip(ARMS, (off, on), (exact, exact if same else tokens.Fp32(oracle, prompts, on))):
        entry[f"{arm}_overruled"] = fp32.overruled(replies, verdict.bound)
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
    lines = [f"{results.content['name']}: {results.content['gpu']}, {results.content['versions']}, ms a token of one request"]
    head = f"{'bs':>3} {'rows':>4} {'off ms':>8} {'on ms':>8} {'ratio':>6} {'ci95':>15} {'accept off/on':>13} {'step off/on ms':>15}"
    lines += [f"{head} served work"]
    for row in results.content["rows"]:
        low, high = row["ratio_ci95"]
        ms, accept, step = ([stats.median(row[f"{arm}_{what}"]) for arm in ARMS] for what in ("ms", "accept_length", "step_ms"))
        work = "equal" if row["equal_work"] else "NOT EQUAL: decides nothing"
        lines.append(
            f"{row['batch']:3d} {row['rows']:4d} {ms[0]:8.3f} {ms[1]:8.3f} {row['ratio']:6.3f} [{low:.3f}, {high:.3f}]"
            f" {accept[0]:6.2f}/{accept[1]:.2f} {step[0]:8.3f}/{step[1]:.3f} {'yes' if row['served'] else 'NO'}    {work}"
        )
    for row in results.content.get("tokens", []):
        lines.append(f"tokens { ({k: v for k, v in row.items() if k != 'wrong_at'}) } {row.get('wrong_at', [])[:2]}")
    if "start" in results.content:
        lines.append(startup.sentence(results.content["start"]))
    return "\n".join(lines)


def started_as_asked(log: str, args) -> tuple[dict, list[str]]:
    """(top-level fields, what is wrong) of how the plugin's server started: self-checks by rows, and the layers that a draft is handed."""
    passed = [line[:500] for line in re.findall(r"decode_step self-check: .*: passed .*", log)]
    found = re.search(r"decode_step hands over the inputs of layers ([\d, ]+) as", log)
    layers = [int(word) for word in found[1].split(",")] if found else []
    problems = [] if passed else ["the plugin's server passed no self-check"]
    if speculation.ALGORITHMS[args.algorithm].reads_layers and not layers:
        problems.append(f"the plugin hands over no layers, which {args.algorithm} drafts read")
    fields = {"self_checks": passed, "captured_layers": layers}
    if args.algorithm == "dspark":
        found = re.search(r"draft_sampler makes the proposals of 1 to (\d+) requests", log)
        fields["proposals_of_requests"] = int(found[1]) if found else 0  # 0: SGLang's own
        if config.get().draft_sampler and args.device == "cuda" and not found:
            problems.append("draft_sampler was asked for and makes no proposals")
    return fields, problems


def draft_directory(args) -> Path | None:
    return None if args.algorithm == "ngram" else args.work / "draft"


def server_arguments(args) -> list[str]:
    """Arguments of both servers, the plugin's flag apart."""
    make = server.gpu_arguments if args.device == "cuda" else server.cpu_arguments
    longest = args.context + args.long + args.drafts
    common = make(context=longest + 64, max_batch=max(args.batches), max_tokens=(longest + 64) * max(args.batches) + 8192)
    ranks = ["--tp-size", str(args.tp)] if args.tp > 1 else []
    return [*common, *speculation.arguments(args.algorithm, args.drafts, draft_directory(args)), *ranks, *args.server_arg]


def main() -> int:
    args, parts = parse(), Parts()
    shape = dataclasses.replace(models.named_shape(args.model, args.layers), tied_head=False)
    results = Results(
        args.out,
        what="served-verify",
        name=args.name or f"served-{args.slug}-{args.model}" + (f"-tp{args.tp}" if args.tp > 1 else ""),
        weights=f"real-scale random, seed 0; an LM head that gives every token one successor, texts repeat after {args.period} tokens",
        command=["python3", "-m", "benchmark.serve.verify_ab", *sys.argv[1:]],
        commit=args.commit,
    )
    deadline.watchdog(args.deadline, lambda: print(table(results), parts, sep="\n"))
    model = models.write_model(args.work / "model", shape, period=args.period)
    if args.algorithm != "ngram":
        drafts.write_draft(draft_directory(args), args.algorithm, shape, drafts=args.drafts, period=args.period, family=args.draft_family)
    problems, pair = [], ()
    try:
        with parts.part("start"):
            widths = [rows * args.drafts for rows in range(1, max(args.batches) + 1)]
            pair = pairs.start(args, model, server_arguments(args), results, batch_tokens=widths, algorithm=args.algorithm)
            fields, problems = started_as_asked(pair[1].log(), args)
            results.set(**fields)
        with parts.part("measure"):
            problems += measure(pair, shape, args, results)
        results.set(clocks_mhz=provenance.gpu()["clocks_mhz"], problems=problems)
        if args.compare_tokens:
            with parts.part("compare tokens"):
                problems += compare(pair, model, shape, args, results)
        with parts.part("stop"):
            counts = coverage.read(pair[1])
            problems += counts.problems(needed_rows=1)
            results.set(coverage=counts.summary(), problems=problems)
            codes = server.stop_pair(pair)
        results.set(exit_lines=coverage.exit_lines(pair[1]), exit_codes=codes)
    except (RuntimeError, OSError, ValueError, http.client.HTTPException) as error:  # keep what was measured
        deadline.say(f"{type(error).__name__}: {error}")
        problems.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")  # a log's end may follow
        results.set(problems=problems)
        for one in pair:
            deadline.say(f"{one.name}: exit status {one.process.poll()}, the end of its log:\n{one.tail()}")
    finally:
        deadline.kill_all()
    results.set(seconds=parts.seconds())
    print(table(results), parts, sep="\n")
    print("problems:", *(f"\n  - {problem}" for problem in problems)) if problems else print("ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
