"""Replays agentic sessions on two real SGLang servers of one GPU, plugin off and on, and reports what an operator gains or loses.

    python3 -m benchmark.replay --out OUT --model-path DIR                         # fixed work, driven by aiperf
    python3 -m benchmark.replay --out OUT --model qwen3-8b --driver direct         # random weights, nothing to install
    python3 -m benchmark.replay --out OUT --model qwen3-30b-a3b --driver direct --in-turn   # a model that does not fit twice
    python3 -m benchmark.replay --out OUT --off-url http://127.0.0.1:30000 --on-url http://127.0.0.1:30001 --model-path DIR
    python3 -m benchmark.replay --out OUT --smoke                                  # the whole chain, tiny model, no GPU needed

fixed-work: the same requests byte for byte, thinking time left out; this is the comparison. scenario-timing: aiperf's AgentX scenario with
thinking time, started in the middle of sessions; arms then meet other requests, so it shows behaviour and proves no speed-up. AgentX is
the format and the timing here, never a score: local traces are no valid submission.

Arms alternate off/on, on/off within each concurrency, and every repeat goes through all concurrencies. With --in-turn one server stands at a time: a
repeat is a start of either arm, each through all concurrencies, off first in one repeat and on first in the next. A run that was cut short is called
again with the same arguments and goes on; finished pairs stay. `--deadline` begins no pair that would not end in time. Ctrl-C stops servers
and drivers. Writes OUT/report.json, .md and .html; exit status 0 if all runs are there, did the same work, and the plugin ran.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Sequence

from benchmark import report
from benchmark.agentic import aiperf_driver, arms, cells, estimate, options, setup, work
from benchmark.agentic.aiperf_driver import SCENARIO
from benchmark.agentic.arms import OFF, ON, Arm
from benchmark.agentic.budget import Budget
from benchmark.agentic.runner import Runner
from benchmark.agentic.setup import Setup
from benchmark.agentic.work import Work
from benchmark.common import deadline
from benchmark.serve import coverage
from benchmark.traces import schema
from sgl_lowlatency.bench import provenance
from sgl_lowlatency.cli.server_process import ServerFailed, signals_interrupt

Pair = tuple[Runner, int, int]  # its repeat, its concurrency
REFUSALS = (arms.ArmsRefused, cells.PlanRefused, setup.SetupRefused, schema.TraceError, report.ReportRefused)
FAILURES = (aiperf_driver.AiperfFailed, ServerFailed)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    return options.parse(__doc__, words)


def plan_of(args: argparse.Namespace, one: Work, made: Setup) -> dict:
    """What the runs of one folder share. Concurrencies and repeats are left out: more of them may be added."""
    hash_, dirty = provenance.commit(args.commit)
    where = [args.off_url, args.on_url] if args.off_url else "in turn" if args.in_turn else "started"
    requests = sum(len(requests) for trace in one.traces for _, requests in trace.streams)
    plan = {"what": one.what, "traces_sha256": schema.digest(one.traces), "sessions": len(one.traces), "requests": requests}
    plan |= {"shape": one.shape, "per_lane": one.per_lane}
    plan |= {"mode": args.mode, "driver": args.driver, "duration_s": args.duration if args.mode == SCENARIO else None}
    plan |= {"simulated_acceptance": args.simulate_acceptance}
    plan |= {"model": made.model, "weights": made.weights, "servers": where, "server_arguments": provenance.sanitized(made.arguments)}
    plan |= {"commit": hash_, "dirty": dirty, "gpu": provenance.gpu()["gpu"], "versions": provenance.versions()}
    return plan | ({"aiperf": aiperf_driver.VERSION} if args.driver == aiperf_driver.NAME else {})


def sittings(pairs: Sequence[Pair]) -> list[tuple[str, int, list[Pair]]]:
    """(arm, repeat, what the one server of this arm runs), in the order in which servers stand in turn: both arms of a repeat, one after the
    other."""
    repeats = sorted({repeat for _, repeat, _ in pairs})
    of_repeat = {repeat: [pair for pair in pairs if pair[1] == repeat] for repeat in repeats}
    return [(name, repeat, of_repeat[repeat]) for repeat in repeats for name in of_repeat[repeat][0][0].order(repeat)]


def dry_run(args: argparse.Namespace, made: Setup, works: Sequence[Work], pairs: list[Pair]) -> None:
    """Prints every command that a run would start, and how long they may take."""
    if args.driver == aiperf_driver.NAME:
        for command in aiperf_driver.install_commands(args.aiperf_env, args.aiperf_wheels):
            print(shlex.join(command))
    if args.off_url is None:
        for name in (OFF, ON):
            arguments = [*arms.launch_arguments(made.arguments, name), "--port", f"${name.upper()}_PORT"]
            print(f"# {name}\n{shlex.join([sys.executable, '-m', 'sglang.launch_server', *arguments])}")
    for name, repeat, halves in sittings(pairs) if args.in_turn else [(None, 0, pairs)]:
        if name is not None:
            print(f"# repeat {repeat}: the {name} server starts, alone")
        print_runs(args, halves, name)


    print(f"# {estimate.words(args, works, made.model)}")


def print_runs(args: argparse.Namespace, pairs: Sequence[Pair], only: str | None) -> None:
    """The drivers' commands; only: of this arm alone."""
    for runner, repeat, concurrency in pairs:
        for name in [only] if only else runner.order(repeat):
            url = (args.off_url if name == OFF else args.on_url) or f"http://127.0.0.1:${name.upper()}_PORT"
            print(f"# {runner.work.what}, repeat {repeat}, concurrency {concurrency}, {name}")
            print(shlex.join(runner.command(url, repeat, concurrency, name)))


def servers(args: argparse.Namespace, made: Setup) -> contextlib.AbstractContextManager[tuple[Arm, Arm]]:
    """A context of (off, on), at the end of which they are stopped where they were started here."""
    if args.off_url is not None:
        return contextlib.nullcontext((arms.attach(OFF, args.off_url), arms.attach(ON, args.on_url)))
    return arms.started(made, args.work, args.start_limit, deadline.say)


def warm(args: argparse.Namespace, made: Setup, works: Sequence[Work], *standing: Arm) -> None:
    """Has the servers run what a measurement must not be the first to run."""
    longest = max(request.input_tokens for one in works for trace in one.traces for request in trace.root)
    arms.warm(*standing, longest=longest, widths=max(args.concurrency), vocab=made.vocab)
    time.sleep(coverage.SETTLE_S)  # the counters of what warmed up are exported before the first pair reads them
    deadline.say(f"{' and '.join(arm.name for arm in standing)} warm, driver {args.driver}")


def run_in_turn(args: argparse.Namespace, made: Setup, works: Sequence[Work], left: list[Pair]) -> list[str]:
    """As run_pairs, with one server at a time: whole repeats, as far as time does."""
    budget, problems, seen = Budget(args.deadline), [], {}
    turns = sittings(left)
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        _, repeat, pairs = first
        if not budget.fits("repeats", 0):
            problems += [f"{one.work.what} r{repeat} c{n}: not run, it would not have ended within {args.deadline:.0f} s" for one, _, n in pairs]
            continue
        begin = time.monotonic()
        for name, _, _ in (first, second):
            log = args.work / f"{name}-r{repeat}.log"
            with arms.alone(made, name, log, args.start_limit, deadline.say, compiles=not seen) as arm:
                seen[name] = arms.account_of(arm)
                arms.compare(seen.get(OFF), seen.get(ON))
                if len(seen) == 2:
                    for one in works:
                        cells.keep_servers(one.out, arms.told(seen[OFF], seen[ON]))
                warm(args, made, works, arm)
                for runner, _, concurrency in pairs:
                    problems += runner.half(arm, repeat, concurrency)
        budget.took("repeats", 0, time.monotonic() - begin)
    return problems


def run_pairs(args: argparse.Namespace, made: Setup, works: Sequence[Work], left: list[Pair]) -> list[str]:
    """Runs the pairs that are left, as far as time does; returns what is wrong with them."""
    if args.driver == aiperf_driver.NAME:
        aiperf_driver.install(args.aiperf_env, args.aiperf_wheels, deadline.say)
    if args.in_turn:
        return run_in_turn(args, made, works, left)
    budget, problems = Budget(args.deadline), []
    with servers(args, made) as (off, on):
        for one in works:
            cells.keep_servers(one.out, arms.told(arms.account_of(off), arms.account_of(on)))
        warm(args, made, works, off, on)
        for runner, repeat, concurrency in left:
            name = runner.work.what
            if not budget.fits(name, concurrency):
                problems.append(f"{name} r{repeat} c{concurrency}: not run, it would not have ended within {args.deadline:.0f} s")
                continue
            begin = time.monotonic()
            problems += runner.pair(off, on, repeat, concurrency)
            budget.took(name, concurrency, time.monotonic() - begin)
    return problems


def run(args: argparse.Namespace) -> int:
    """Everything; returns the exit status. Raises REFUSALS and FAILURES."""
    works = work.of(args)
    context = max(one.peak_tokens for one in works) + setup.MARGIN_TOKENS // (8 if args.smoke else 1)
    made = setup.of(args, args.work, context)
    runners = [Runner(args, one, made, context) for one in works]
    pairs = [(runner, repeat, n) for runner in runners for repeat in range(1, args.repeats + 1) for n in args.concurrency]
    if args.dry_run:
        dry_run(args, made, works, pairs)
        return 0
    for one in works:
        cells.keep_plan(one.out, plan_of(args, one, made))
        deadline.say(f"{one.what}: {len(one.traces)} sessions, {one.shape}")
    left = [(runner, repeat, n) for runner, repeat, n in pairs if not cells.done(runner.work.out, repeat, n)]
    deadline.say(f"{len(pairs) - len(left)} of {len(pairs)} pairs are done already")
    problems = run_pairs(args, made, works, left) if left else []
    for one in works:
        for path in report.write(one.out):
            print(path)
        problems += report.problems(one.out)
    for one in works:
        print(report.table(one.out))
    for line in problems:
        print("problem:", line)
    return 1 if problems else 0


def main(words: list[str] | None = None) -> int:
    args = parse(words)
    if args.deadline is not None:
        deadline.watchdog(args.deadline, lambda: print(f"python3 -m benchmark.report {args.out} shows what is there"))
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
