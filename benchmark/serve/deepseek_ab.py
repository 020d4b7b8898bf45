"""DeepSeek-V4.1 with its bundled DSPARK draft in a real SGLang server, plugin off and on in turn, on one GPU: are the drafts and the texts the same,
what is accepted, what does a step take?

    python3 -m benchmark.serve.deepseek_ab --model FOLDER --out OUT [--work WORK] [--commit HASH] [--deadline 560] [--batches 1,2,4]
        [--block-size 5] [--turns off,on,off] [--plugin dsv41_stream] [--period 64] [--no-draft] [--dry-run]

Two such models do not fit one GPU, so a turn is one server: started, asked, stopped. Every turn is asked the same. First, runs whose drafts are
recorded in either arm alike (draft_record.py), greedy and sampled, each from a fixed seed: served tokens, the drafts of every step and what was
accepted of them are compared with the first turn's of the other arm (draft_compare.py), and a later turn of the standard path with the first, which
tells whether it repeats itself. Then steps are timed, nothing recorded: slopes between a short and a long greedy generation.

A turn with the plugin whose log does not show what --expect names, or whose recorded drafts are not the plugin's, is a problem, and so is every
difference that rounding does not explain, by request, step, row and draft. Texts of random weights part within a few tokens wherever two ways to
round differ, and SGLang's own part from server to server where it has several requests. With --period N the LM head forces the text and drafts
foresee it (forced_head.py): then every token and draft is known, both arms do equal work, and drafts are accepted.

FOLDER, what loads its weights (--plugin names its entry point) and SGLang's environment are the caller's. With --no-draft the server decodes plainly,
and tokens and steps are compared. A turn that what is left of --deadline cannot hold is left out, and said to be. Writes OUT/NAME.json after every
turn. Exit status 0 if there were two arms and no problem.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from benchmark import forced_head, forced_text, random_weights
from benchmark.common import deadline
from benchmark.common.parts import Parts
from benchmark.serve import coverage, draft_compare, draft_record, server, startup
from benchmark.serve.client import Client, greedy, random_prompt
from benchmark.serve.draft_compare import Answer
from benchmark.serve.tokens import first_difference
from benchmark.serve.turns import ARMS, Timing, Turn, compared, rows_of, table
from sgl_lowlatency.bench import provenance
from sgl_lowlatency.bench.results import Results

MODES = ("greedy", "sampled")
OUR_PLUGIN = "nvidia_megakernel"
NOTES = (
    "Random weights: without a period greedy drafts are accepted about as often as any token is guessed, so an accept length of 1.0 is expected and "
    "says nothing of trained drafts; sampled ones are accepted where both distributions are wide. Acceptance of the recorded runs is seeded by the recorder, since "
    "SGLang ignores sampling_seed there. Arms are servers one after the other, not side by side."
)
# What the plugin's log has to show, by --expect: (pattern, what is wrong without it).
EVIDENCE = {
    "draft_sampler": (r"draft_sampler makes the proposals of 1 to (\d+) requests", "draft_sampler makes no proposals"),
    "step": (r"NVIDIA megakernel: active ", "no step is the plugin's"),
}
KEPT = r"self-check|draft_sampler|keeps SGLang's proposal|folded into the draft|kept eager|NVIDIA megakernel|dsv41_stream|coverage:"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model, its config.json in it")
    parser.add_argument("--draft", type=Path, default=None, help="folder of the draft (default: bundled with the model)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, default=None, help="folder of logs and records (default: OUT/work)")
    parser.add_argument("--name", default=None, help="results file name (default: served-dspark-SLUG or served-SLUG)")
    parser.add_argument("--slug", default="dsv41-cut", help="the model's name in results")
    parser.add_argument("--weights", default="real-scale random, seed 0, drawn at load", help="the results' word on the weights")
    parser.add_argument("--commit", default=None, help="HASH or HASH-dirty of the code, for a copy without git")
    parser.add_argument("--deadline", type=float, default=560, help="seconds after which everything is killed")
    parser.add_argument("--start-limit", type=float, default=300, help="seconds a server may take to start")
    parser.add_argument("--batches", default="1,2,4")
    parser.add_argument("--block-size", type=int, default=5, help="drafts of a step a request")
    parser.add_argument("--no-draft", action="store_true", help="plain decode")
    parser.add_argument("--turns", default="off,on,off", help="arms in turn")
    parser.add_argument("--modes", default=",".join(MODES), help="of the recorded runs")
    parser.add_argument("--expect", choices=(*EVIDENCE, "both"), default=None, help="of the plugin (default: draft_sampler; step with --no-draft)")
    parser.add_argument("--plugin", action="append", default=[], help="another entry point that both arms must load, repeatable")
    parser.add_argument("--period", type=int, default=None, help="force the text, which repeats after so many tokens (default: it is not forced)")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of a request")
    parser.add_argument("--compare-tokens", type=int, default=64, help="new tokens of a recorded request")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampled requests")
    parser.add_argument("--short", type=int, default=16, help="new tokens of the short timed generation")
    parser.add_argument("--long", type=int, default=160, help="of the long one")
    parser.add_argument("--repeats", type=int, default=5, help="timings a turn")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--server-arg", action="append", default=[], help="one more server argument, repeatable: --server-arg=--x")
    parser.add_argument("--dry-run", action="store_true", help="print the servers' commands and environment, start nothing")
    args = parser.parse_args()
    args.work = args.work or args.out / "work"
    args.batches = [int(word) for word in args.batches.split(",")]
    args.turns, args.modes = args.turns.split(","), args.modes.split(",")
    args.expect = args.expect or ("step" if args.no_draft else "draft_sampler")
    args.name = args.name or (f"served-{args.slug}" if args.no_draft else f"served-dspark-{args.slug}")
    if set(args.turns) - set(ARMS) or set(args.modes) - set(MODES):
        parser.error(f"--turns are of {', '.join(ARMS)}, --modes of {', '.join(MODES)}")
    if not 0 < args.short < args.long or args.repeats < 1 or args.block_size < 1 or min(args.batches) < 1 or args.compare_tokens < 2:
        parser.error("--short is less than --long; --repeats, --block-size and --batches are at least 1, --compare-tokens at least 2")
    args.vocab = vocabulary(args.model)
    if args.period is not None and not 2 <= args.period <= args.vocab // 4:
        parser.error(f"--period {args.period} is outside 2..{args.vocab // 4}, a quarter of the vocabulary")
    return args


def vocabulary(model: Path) -> int:
    """Of the model's config. Raises OSError or KeyError where that is none."""
    config = json.loads((model / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def server_arguments(args) -> list[str]:
    """Of both arms, the plugin's flag apart."""
    most, context = max(args.batches), args.context + max(args.long, args.compare_tokens) + 64
    if args.device == "cpu":
        found = server.cpu_arguments(context=context, max_batch=most, max_tokens=context * most + 4096)
    else:
        found = ["--context-length", "8192", "--max-running-requests", str(most), "--cuda-graph-max-bs-decode", str(most)]
        found += ["--chunked-prefill-size", "4096", "--mem-fraction-static", "0.85", "--disable-radix-cache", "--disable-flashinfer-autotune"]
        found += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--enable-metrics", "--watchdog-timeout", "300", "--random-seed", "1"]
    found += ["--skip-server-warmup"]
    if not args.no_draft:
        found += ["--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", str(args.block_size)]
        found += [] if args.draft is None else ["--speculative-draft-model-path", str(args.draft)]
    return [*found, *args.server_arg]


def plugins(args, arm: str) -> list[str]:
    """Entry points that a turn must load."""
    ours = [*([] if args.no_draft else [draft_record.NAME]), *([] if args.period is None else [forced_head.NAME])]
    return [*args.plugin, *ours, *([OUR_PLUGIN] if arm == "on" else [])]


def missing_plugins(args, env: dict[str, str]) -> list[str]:
    """What a server of that environment would not find or not be allowed to load, in words."""
    code = "from importlib.metadata import entry_points; print(*(e.name for e in entry_points(group='sglang.srt.plugins')))"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=True)
    needed = dict.fromkeys(name for arm in args.turns for name in plugins(args, arm))
    return [f"SGLang would find no plug-in {name} on PYTHONPATH" for name in needed if name not in done.stdout.split()]


def environment(args, record: Path, environ: dict[str, str]) -> dict[str, str]:
    """What both arms add to the caller's: the recorder, no request but ours, batches that start together; SGLANG_PLUGINS, where the caller has it,
    with what is needed; draft_sampler asked for, unless the caller says otherwise."""
    made = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "SGLANG_ENABLE_COLOCATED_BATCH_GEN": "1", draft_record.FILE: str(record.resolve())}
    path = [random_weights.install_hook(args.work / "hook"), *filter(None, [environ.get("PYTHONPATH")])]
    if not args.no_draft:
        path.insert(0, draft_record.install(args.work / "record-hook"))
    if args.period is not None:
        path.insert(0, forced_head.install(args.work / "forced-hook"))
        made[forced_head.PERIOD] = str(args.period)
    made["PYTHONPATH"] = os.pathsep.join(path)
    if allowed := environ.get("SGLANG_PLUGINS"):
        needed = [*allowed.split(","), "benchmark_random_weights", *plugins(args, "on")]
        made["SGLANG_PLUGINS"] = ",".join(dict.fromkeys(word.strip() for word in needed if word.strip()))
    if args.expect != "step":
        made["SGL_LOWLATENCY_DRAFT_SAMPLER"] = environ.get("SGL_LOWLATENCY_DRAFT_SAMPLER", "1")
    return made


def log_problems(log: str, args, arm: str) -> list[str]:
    """What a turn's log must show and does not."""
    failed = re.findall(r"Failed to (?:load|execute general) plugin:? (\S+)|Failed to apply hooks to (\S+)", log)
    problems = [f"SGLang failed to load {' '.join(words).strip()}" for words in dict.fromkeys(failed)]
    if arm == "off":
        return problems
    for name in EVIDENCE if args.expect == "both" else (args.expect,):
        pattern, missing = EVIDENCE[name]
        found = re.findall(pattern, log)
        if not found:
            problems.append(missing)
        elif name == "draft_sampler" and int(found[-1]) < max(args.batches):
            problems.append(f"draft_sampler makes the proposals of 1 to {found[-1]} requests, not of {max(args.batches)}")
    if not re.search(r"self-check: .*passed", log):
        problems.append("no self-check passed")
    return problems


def prompts_of(batch: int, args) -> list[list[int]]:
    """The same in every turn; ids at the vocabulary's end, which have meanings, are not among them."""
    vocab = args.vocab - (1000 if args.vocab > 10000 else 0)
    prompts = [random_prompt(args.context, vocab=vocab, seed=1000 * batch + request) for request in range(batch)]
    if args.period is None:
        return prompts
    firsts = [max(prompt[0], args.period) for prompt in prompts]  # ids of the first group have meanings too
    return [[first, *forced_text.text(first, args.context - 1, vocab=args.vocab, period=args.period)] for first in firsts]


def forced_problems(prompt: list[int], ids: list[int], args) -> list[str]:
    """Where a reply is not the text that follows its prompt; none where no text is forced."""
    if args.period is None:
        return []
    part = first_difference(ids, forced_text.text(prompt[-1], len(ids), vocab=args.vocab, period=args.period))
    return [] if part is None else [f"the forced text is left at token {part}"]


def recorded(client: Client, record: Path, batch: int, mode: str, args) -> list[Answer]:
    """One run whose drafts are recorded."""
    prompts = prompts_of(batch, args)
    params = greedy(args.compare_tokens) | ({} if mode == "greedy" else {"temperature": args.temperature})
    name = draft_record.run_name(f"{mode}.b{batch}", seed=100 * batch + MODES.index(mode))
    names = draft_record.request_names(name, batch)
    body = {"input_ids": prompts, "sampling_params": params, "stream": False, "rid": names}
    replies = client.replies(body)
    if (lengths := [len(reply.ids) for reply in replies]) != [args.compare_tokens] * batch:
        raise RuntimeError(f"batch {batch}, {mode}: asked for {args.compare_tokens} tokens each, got {lengths}")
    found = [[]] * batch if args.no_draft else draft_record.wait_blocks(record, names, [reply.verify_steps for reply in replies])
    return [Answer(len(prompt), *pair) for prompt, pair in zip(prompts, zip(replies, found, strict=True), strict=True)]


def ask(one: server.Server, turn: Turn, record: Path, args) -> None:
    """Fills the turn's answers and timings."""
    for batch in args.batches:  # what is compiled at first use
        for params in [greedy(args.short)] + ([greedy(args.short) | {"temperature": args.temperature}] if "sampled" in args.modes else []):
            one.client.generate(prompts_of(batch, args), params)
    for batch in args.batches:
        for mode in args.modes:
            answers = turn.answers[batch, mode] = recorded(one.client, record, batch, mode, args)
            if args.no_draft:
                continue
            problems = list(draft_compare.accept_problems(answers, greedy=mode == "greedy"))
            for number, (prompt, answer) in enumerate(zip(prompts_of(batch, args), answers, strict=True)):
                problems += [f"request {number}: {problem}" for problem in forced_problems(prompt, answer.reply.ids, args)]
            made = draft_compare.makers(answers)
            if turn.arm == "on" and args.expect != "step" and set(made) != {draft_record.PLUGIN}:
                problems.append(f"drafts were made by {made}")
            turn.problems += [f"{turn.name}, batch {batch}, {mode}: {problem}" for problem in problems]
            length = draft_compare.accept_length(answers)
            deadline.say(f"{turn.name}, batch {batch}, {mode}: accept length {length:.3f}, blocks {made}", *problems[:2])
    for batch in args.batches:
        prompts, timings = prompts_of(batch, args), turn.timings.setdefault(batch, [])
        for _ in range(args.repeats):
            timed = [one.client.timed_replies(prompts, count) for count in (args.short, args.long)]
            timings.append(Timing.of(*timed, drafts=not args.no_draft))
            for number, (prompt, reply) in enumerate(zip(prompts, timed[1][1], strict=True)):
                turn.problems += [f"{turn.name}, batch {batch}, timed: request {number}: {problem}" for problem in forced_problems(prompt, reply.ids, args)]
        deadline.say(f"{turn.name}, batch {batch}: ms a step", [round(timing.step_ms, 4) for timing in timings])
        if args.device == "cuda" and min(timing.step_ms for timing in timings) <= 0:  # on a CPU that others use nothing is made of them
            turn.problems.append(f"{turn.name}, batch {batch}: a long generation took no longer than a short one")


def run_turn(index: int, arm: str, args) -> Turn:
    """Starts a server, asks it, stops it. What went wrong is among the turn's problems."""
    turn = Turn(f"{index}-{arm}", arm)
    record = args.work / f"{turn.name}.jsonl"
    record.unlink(missing_ok=True)
    flags = [server.FLAG] if arm == "on" else []
    one = server.Server(
        turn.name, args.model, [*server_arguments(args), *flags], work=args.work, env=environment(args, record, dict(os.environ))
    )
    try:
        one.wait_ready(args.start_limit)
        deadline.say(f"{turn.name}: ready after {one.ready_s:.1f} s")
        ask(one, turn, record, args)
        if arm == "on" and args.expect != "draft_sampler":
            counts = coverage.read(one)
            turn.facts["coverage"] = counts.summary()
            turn.problems += [f"{turn.name}: {problem}" for problem in counts.problems(needed_rows=1)]
    except (RuntimeError, OSError, ValueError, KeyError, http.client.HTTPException) as error:
        deadline.say(f"{turn.name}: {type(error).__name__}: {error}\n{one.tail(60)}")
        turn.problems.append(f"{turn.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    else:  # now: without graphs a self-check is the first step's
        turn.problems = [*(f"{turn.name}: {problem}" for problem in log_problems(one.log(), args, arm)), *turn.problems]
    turn.facts |= {"turn": turn.name, "ready_s": one.ready_s, "gpu_mib": server.gpu_memory_mib(), "exit_code": one.stop()}
    turn.facts["log"] = [line[:400] for line in one.grep(KEPT) if "server_args=" not in line][:40]
    turn.facts["start"] = startup.arm(one.ready_s, one.log())
    return turn


def freed(before: int | None, limit_s: float = 20.0) -> None:
    """Waits until the GPU's memory is what it was: a model that is still there leaves the next one no room."""
    end_s = time.monotonic() + limit_s
    while before is not None and server.gpu_memory_mib() > before + 2048 and time.monotonic() < end_s:
        time.sleep(0.5)


def main() -> int:
    args, parts = parse(), Parts()
    if args.dry_run:
        added = environment(args, args.work / "TURN.jsonl", dict(os.environ))
        for arm in dict.fromkeys(args.turns):
            command = server.launch_command(args.model, "PORT", [*server_arguments(args), *([server.FLAG] if arm == "on" else [])])
            print(f"{arm}: must load {', '.join(plugins(args, arm))}\n  " + " ".join(f"{k}={shlex.quote(v)}" for k, v in added.items()))
            print("  " + shlex.join(command))
        return 0
    results = Results(
        args.out, what="served-decode" if args.no_draft else "served-verify", name=args.name, weights=args.weights, commit=args.commit, notes=NOTES,
        command=["python3", "-m", "benchmark.serve.deepseek_ab", *sys.argv[1:]],
    )  # fmt: skip
    deadline.watchdog(args.deadline, lambda: print(table(results), parts, sep="\n"))
    turns, skipped, before = [], [], server.gpu_memory_mib()
    problems = missing_plugins(args, environment(args, args.work / "TURN.jsonl", dict(os.environ)))
    for index, arm in enumerate([] if problems else args.turns, 1):
        longest = max(parts.seconds().values(), default=0.0)
        if deadline.remaining(args.deadline) < longest * 1.1 + 10:
            skipped.append(f"{index}-{arm}")
            continue
        with parts.part(f"{index}-{arm}"):
            turns.append(run_turn(index, arm, args))
            freed(before)
        results.content["rows"] = []
        for row in rows_of(turns, args):
            results.add(**row)
        entries, problems = compared(turns, args)
        problems = [problem for turn in turns for problem in turn.problems] + problems
        results.set(tokens=entries, turns=[turn.facts for turn in turns], problems=problems, skipped_turns=skipped, seconds=parts.seconds())
    deadline.kill_all()
    if missing := set(ARMS) & set(args.turns) - {turn.arm for turn in turns if turn.timings}:
        problems = [*problems, f"no turn {', '.join(sorted(missing))} was measured"]
    results.set(clocks_mhz=provenance.gpu()["clocks_mhz"], problems=problems, skipped_turns=skipped)
    print(table(results), parts, sep="\n")
    print(f"turns left out for want of time: {', '.join(skipped)}") if skipped else None
    print("problems:", *(f"\n  - {problem}" for problem in problems)) if problems else print("ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
