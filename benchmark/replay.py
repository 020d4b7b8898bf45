"""Replays agentic sessions on two real SGLang servers of one GPU, plugin off and on, and reports what an operator gains or loses.

    python3 -m benchmark.replay --out OUT --model-path DIR                         # fixed work, driven by aiperf
    python3 -m benchmark.replay --out OUT --model qwen3-8b --driver direct         # random weights, nothing to install
    python3 -m benchmark.replay --out OUT --off-url http://127.0.0.1:30000 --on-url http://127.0.0.1:30001 --model-path DIR
    python3 -m benchmark.replay --out OUT --smoke                                  # the whole chain, tiny model, no GPU needed

fixed-work: the same requests byte for byte, thinking time left out; this is the comparison. scenario-timing: aiperf's AgentX scenario with
thinking time, started in the middle of sessions; arms then meet other requests, so it shows behaviour and proves no speed-up. AgentX is
the format and the timing here, never a score: local traces are no valid submission.

Arms alternate off/on, on/off within each concurrency, and every repeat goes through all concurrencies. A run that was cut short is called
again with the same arguments and goes on; finished pairs stay. Ctrl-C stops servers and drivers. Writes OUT/report.json, .md and .html;
exit status 0 if all runs are there, did the same work, and the plugin ran.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import shlex
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from benchmark import models, report
from benchmark.agentic import aiperf_driver, arms, cells, direct_driver, records, setup
from benchmark.agentic.aiperf_driver import FIXED, SCENARIO
from benchmark.agentic.arms import OFF, ON, Arm
from benchmark.agentic.records import Record
from benchmark.agentic.setup import Setup
from benchmark.common import deadline
from benchmark.serve import coverage
from benchmark.traces import schema, synthesize
from benchmark.traces.shapes import SHAPES
from sgl_lowlatency.bench import provenance
from sgl_lowlatency.cli.server_process import ServerFailed, signals_interrupt

SEED = 42
TELL_EVERY_S = 10.0
SMOKE = {"driver": direct_driver.NAME, "sessions": 2, "scale": 0.02, "concurrency": (1, 2), "repeats": 3}
USUAL = {"driver": aiperf_driver.NAME, "sessions": 16, "scale": 1.0, "concurrency": (1, 2, 4, 8), "repeats": 3}
REFUSALS = (arms.ArmsRefused, cells.PlanRefused, setup.SetupRefused, schema.TraceError, report.ReportRefused)
FAILURES = (aiperf_driver.AiperfFailed, ServerFailed)


def counts(text: str) -> tuple[int, ...]:
    """A comma list of different numbers from 1 to 16."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma list of numbers") from None
    if len(set(found)) != len(found) or not all(1 <= number <= setup.MAX_BATCH for number in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different numbers from 1 to {setup.MAX_BATCH}")
    return found


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments; what --smoke changes is a default only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and report")
    parser.add_argument("--smoke", action="store_true", help="tiny model, two short sessions; on the CPU in host emulation without a GPU")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and what would run, start nothing")
    parser.add_argument("--mode", choices=(FIXED, SCENARIO), default=FIXED)
    parser.add_argument("--driver", choices=(aiperf_driver.NAME, direct_driver.NAME), help=f"default {USUAL['driver']}, with --smoke direct")
    parser.add_argument("--concurrency", type=counts, help="sessions at once, comma list (default 1,2,4,8)")
    parser.add_argument("--repeats", type=int, help="pairs of runs at each concurrency (default 3; fewer decide nothing)")
    parser.add_argument("--duration", type=int, default=900, help="seconds of a scenario-timing run")
    work = parser.add_argument_group("traces")
    work.add_argument("--traces", type=Path, help="a .json file of the Weka format, or a folder of them (default: synthetic ones)")
    work.add_argument("--shape", choices=sorted(SHAPES), default="agentic-64k", help="of the synthetic sessions")
    work.add_argument("--sessions", type=int, help="how many to make, or to take of --traces (default 16)")
    work.add_argument("--scale", type=float, help="of the synthetic sessions' lengths (default 1)")
    work.add_argument("--seed", type=int, default=0)
    work.add_argument("--peak", type=int, help="leave out sessions with a request of more tokens, output included")
    served = parser.add_argument_group("servers")
    served.add_argument("--model-path", type=Path, help="checkpoint with a tokenizer")
    served.add_argument("--model", choices=sorted(models.SHAPES), help="random weights of this shape, without a tokenizer")
    served.add_argument("--layers", type=int, help="cut --model to this many layers")
    pool = "KV cache of either server; both share the GPU (default 262144: 36 GiB each for Qwen3-8B)"
    served.add_argument("--pool-tokens", type=int, default=262_144, help=pool)
    served.add_argument("--server-arg", action="append", default=[], help="one more argument of both servers, repeatable")
    served.add_argument("--start-limit", type=float, default=600, help="seconds a server may take to start")
    served.add_argument("--off-url", help="attach to this server instead of starting one, with --on-url; both on one GPU of this host")
    served.add_argument("--on-url")
    tool = parser.add_argument_group("aiperf")
    tool.add_argument("--aiperf-env", type=Path, default=aiperf_driver.default_environment(), help="its virtual environment, made if absent")
    tool.add_argument("--aiperf-wheels", type=Path, help="folder of its wheels, for a host that reaches no registry")
    parser.add_argument("--run-limit", type=float, default=7200, help="seconds one aiperf run may take")
    parser.add_argument("--commit", help="HASH or HASH-dirty of the code, for a copy without git")
    args = parser.parse_args(words)
    for name, value in (SMOKE if args.smoke else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if wrong := argument_problem(args):
        parser.error(wrong)
    return args


def argument_problem(args: argparse.Namespace) -> str | None:
    """Why the arguments do not go together, None when they do."""
    if args.mode == SCENARIO and args.driver == direct_driver.NAME:
        return f"--mode {SCENARIO} needs --driver {aiperf_driver.NAME}: the direct driver leaves thinking time out"
    if (args.off_url is None) != (args.on_url is None):
        return "--off-url and --on-url go together"
    if args.off_url is not None and args.off_url.rstrip("/") == args.on_url.rstrip("/"):
        return "--off-url and --on-url are the same server"
    if args.off_url is not None and (args.smoke or args.server_arg or args.model):
        return "--off-url attaches to servers: --smoke, --model and --server-arg are for servers started here"
    if sum((args.smoke, args.model_path is not None, args.model is not None)) != 1:
        return "give one of --model-path, --model and --smoke"
    if args.repeats < 1 or args.sessions < 1 or not 0 < args.scale <= 1:
        return "--repeats and --sessions are 1 or more, --scale is above 0 and at most 1"
    return None


def prepare_traces(args: argparse.Namespace) -> list[schema.Trace]:
    """The sessions to replay, written to OUT/traces. Raises TraceError."""
    place = args.out / "traces"
    if args.traces is None:
        shutil.rmtree(place / "all", ignore_errors=True)
        made = synthesize.write(place / "all", SHAPES[args.shape], sessions=args.sessions, seed=args.seed, scale=args.scale)
    else:
        made = schema.read(args.traces)
    chosen = [trace for trace in made if args.peak is None or trace.peak_tokens <= args.peak][: args.sessions]
    if not chosen:
        raise schema.TraceError(f"no session has a peak of {args.peak} tokens or less; the shortest has {min(t.peak_tokens for t in made)}")
    replayed = place / "replayed"
    shutil.rmtree(replayed, ignore_errors=True)
    replayed.mkdir(parents=True)
    for trace in chosen:
        shutil.copy(trace.path, replayed / trace.path.name)
    return schema.read(replayed)


def plan_of(args: argparse.Namespace, traces: list[schema.Trace], made: Setup) -> dict:
    """What the runs of one folder share. Concurrencies and repeats are left out: more of them may be added."""
    hash_, dirty = provenance.commit(args.commit)
    where = [args.off_url, args.on_url] if args.off_url else "started"
    plan = {"traces_sha256": schema.digest(traces), "sessions": len(traces), "requests": sum(len(r) for t in traces for _, r in t.streams)}
    plan |= {"shape": f"{args.shape}, seed {args.seed}, scale {args.scale:g}" if args.traces is None else f"from {args.traces.name}"}
    plan |= {"mode": args.mode, "driver": args.driver, "duration_s": args.duration if args.mode == SCENARIO else None}
    plan |= {"model": made.model, "weights": made.weights, "servers": where, "server_arguments": provenance.sanitized(made.arguments)}
    plan |= {"commit": hash_, "dirty": dirty, "gpu": provenance.gpu()["gpu"], "versions": provenance.versions()}
    return plan | ({"aiperf": aiperf_driver.VERSION} if args.driver == aiperf_driver.NAME else {})


class Runner:
    """Runs cells on a pair of servers. traces: those replayed, in `OUT/traces/replayed`. context: tokens either server takes."""

    def __init__(self, args: argparse.Namespace, traces: list[schema.Trace], made: Setup, context: int) -> None:
        self._args, self._traces, self._setup, self._context = args, traces, made, context
        self._session = uuid.uuid4().hex[:12]
        self._total = sum(len(requests) for trace in traces for _, requests in trace.streams)

    def command(self, url: str, concurrency: int, out: Path) -> list[str]:
        """What drives one run: aiperf's command, or what the direct driver is told."""
        args = self._args
        if args.driver == direct_driver.NAME:
            return ["direct", f"--url={url}", f"--concurrency={concurrency}", f"--conversations={len(self._traces)}"]
        return aiperf_driver.profile_command(
            args.aiperf_env, url, str(args.model_path or self._setup.tokenizer), str(self._setup.tokenizer), args.out / "traces" / "replayed", out,
            mode=args.mode, concurrency=concurrency, conversations=len(self._traces), max_context=self._context, duration_s=args.duration, seed=SEED,
        )

    def pair(self, off: Arm, on: Arm, repeat: int, concurrency: int) -> list[str]:
        """Runs both arms, the first one alternating, saves them, and returns what is wrong with the pair. Raises ArmsRefused when no step
        of the on arm ran the plugin."""
        cells.clear(self._args.out, repeat, concurrency)
        found = {}
        for index, arm in enumerate((off, on) if repeat % 2 else (on, off)):
            found[arm.name] = self._cell(arm, repeat, concurrency, first=index == 0)
        problems = [f"{name}: {line}" for name in found for line in records.failures(found[name])]
        if self._args.mode == FIXED:
            problems += [f"{name}: {line}" for name in found for line in aiperf_driver.missing(found[name], self._traces)]
            problems += records.unequal(found[OFF], found[ON])
        return problems

    def _cell(self, arm: Arm, repeat: int, concurrency: int, *, first: bool) -> list[Record]:
        name = f"r{repeat} c{concurrency} {arm.name}"
        arm.client.flush()  # and both arms find an empty prefix cache
        before = arm.counts()
        out = cells.folder(self._args.out, repeat, concurrency, arm.name) / "aiperf"
        out.parent.mkdir(parents=True, exist_ok=True)
        command = self.command(arm.url, concurrency, out)
        begin, date = time.monotonic(), datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with _telling(name, self._total) as progress:
            if self._args.driver == direct_driver.NAME:
                found = direct_driver.run(arm.client, self._traces, concurrency=concurrency, vocab=self._setup.vocab, progress=progress)
            else:
                found = aiperf_driver.run(command, out, self._args.run_limit)
        if not found:
            raise arms.ArmsRefused(f"{name}: no request was answered")
        if arm.process is not None:
            arm.process.require_alive()
        machine = provenance.gpu()
        time.sleep(coverage.SETTLE_S)
        gained = arm.counts().since(before)
        if arm.name == ON and not gained.rows:
            raise arms.ArmsRefused(f"plugin not active: no decode step of {name} ran it ({gained.fallbacks or 'no fallback counted either'})")
        span_s = max(r.start_ms + r.e2e_ms for r in found) / 1e3
        cell = cells.Cell(
            arm.name, concurrency, repeat, first, self._session, date, round(span_s, 3), machine,
            steps={str(rows): count for rows, count in sorted(gained.executed.items())}, rows=gained.rows, fallbacks=gained.fallbacks,
            command=provenance.sanitized(command),
        )
        cells.save(self._args.out, cell, found)
        errors = len(records.failures(found))
        deadline.say(f"{name}: {len(found)} requests, {errors} failed, {span_s:.1f} s (with driver {time.monotonic() - begin:.0f} s)")
        return found


@contextlib.contextmanager
def _telling(name: str, total: int):
    """Yields a callback for finished requests; says every few seconds how far a run is, also when nothing finishes."""
    done, ended, begin = itertools.count(), threading.Event(), time.monotonic()
    seen = [0]

    def loop() -> None:
        while not ended.wait(TELL_EVERY_S):
            passed = time.monotonic() - begin
            part = f"{seen[0]}/{total} requests, " if seen[0] else ""
            left = f", about {passed * (total - seen[0]) / seen[0]:.0f} s to go" if seen[0] else ""
            deadline.say(f"{name}: {part}{passed:.0f} s{left}")

    def progress(_record: Record) -> None:
        seen[0] = next(done) + 1

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        ended.set()
        thread.join()


def dry_run(args: argparse.Namespace, runner: Runner, made: Setup, pairs: list[tuple[int, int]]) -> None:
    """Prints every command that a run would start."""
    if args.driver == aiperf_driver.NAME:
        for command in aiperf_driver.install_commands(args.aiperf_env, args.aiperf_wheels):
            print(shlex.join(command))
    if args.off_url is None:
        for name in (OFF, ON):
            arguments = [*arms.launch_arguments(made.arguments, name), "--port", f"${name.upper()}_PORT"]
            print(f"# {name}\n{shlex.join([sys.executable, '-m', 'sglang.launch_server', *arguments])}")
    for repeat, concurrency in pairs:
        for name in (OFF, ON) if repeat % 2 else (ON, OFF):
            url = (args.off_url if name == OFF else args.on_url) or f"http://127.0.0.1:${name.upper()}_PORT"
            print(f"# repeat {repeat}, concurrency {concurrency}, {name}")
            print(shlex.join(runner.command(url, concurrency, cells.folder(args.out, repeat, concurrency, name) / "aiperf")))


def servers(args: argparse.Namespace, made: Setup, say: Callable[[str], None]):
    """A context of (off, on)."""
    if args.off_url is not None:
        return contextlib.nullcontext((arms.attach(OFF, args.off_url), arms.attach(ON, args.on_url)))
    logs = args.out / "work"
    logs.mkdir(parents=True, exist_ok=True)
    return arms.started(made.arguments, made.environment, logs, args.start_limit, say)


def run(args: argparse.Namespace) -> int:
    """Everything; returns the exit status. Raises REFUSALS and FAILURES."""
    traces = prepare_traces(args)
    context = max(trace.peak_tokens for trace in traces) + setup.MARGIN_TOKENS // (8 if args.smoke else 1)
    made = setup.of(args, args.out / "work", context)
    pairs = [(repeat, concurrency) for repeat in range(1, args.repeats + 1) for concurrency in args.concurrency]
    runner = Runner(args, traces, made, context)
    if args.dry_run:
        dry_run(args, runner, made, pairs)
        return 0
    cells.keep_plan(args.out, plan_of(args, traces, made))
    left = [pair for pair in pairs if not cells.done(args.out, *pair)]
    deadline.say(f"{len(traces)} sessions, {runner._total} requests; {len(pairs) - len(left)} of {len(pairs)} pairs are done already")
    problems = []
    if left:
        if args.driver == aiperf_driver.NAME:
            aiperf_driver.install(args.aiperf_env, args.aiperf_wheels, deadline.say)
        with servers(args, made, deadline.say) as (off, on):
            cells.keep_servers(args.out, arms.account(off, on))
            for pair in left:
                problems += [f"r{pair[0]} c{pair[1]}: {line}" for line in runner.pair(off, on, *pair)]
    paths = report.write(args.out)
    for line in problems:
        deadline.say("problem:", line)
    print(*paths, sep="\n")
    return 1 if problems or report.problems(args.out) else 0


def main() -> int:
    args = parse()
    with signals_interrupt():
        try:
            return run(args)
        except REFUSALS as error:
            print(f"replay: refused: {error}", file=sys.stderr)
            return 2
        except FAILURES as error:
            print(f"replay: failed: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("replay: interrupted; servers and drivers are stopped. The same command goes on; this shows what is there:", file=sys.stderr)
            print(f"python3 -m benchmark.report {args.out}", file=sys.stderr)
            return 130
        finally:
            deadline.kill_all()


if __name__ == "__main__":
    sys.exit(main())
