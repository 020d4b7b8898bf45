"""The arguments of a replay: what they default to, and which do not go together."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmark import models
from benchmark.agentic import aiperf_driver, direct_driver, setup
from benchmark.agentic.aiperf_driver import FIXED, SCENARIO
from benchmark.traces.shapes import EVERY

SMOKE = {"driver": direct_driver.NAME, "sessions": 2, "scale": 0.02, "concurrency": (1, 2), "repeats": 3}
USUAL = {"driver": aiperf_driver.NAME, "sessions": 16, "scale": 1.0, "concurrency": (1, 2, 4, 8), "repeats": 3}


def counts(text: str) -> tuple[int, ...]:
    """A comma list of different numbers from 1 to 16."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma list of numbers") from None
    if len(set(found)) != len(found) or not all(1 <= number <= setup.MAX_BATCH for number in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different numbers from 1 to {setup.MAX_BATCH}")
    return found


def parse(description: str | None, words: list[str] | None) -> argparse.Namespace:
    """The arguments; what --smoke changes is a default only. Ends the process with status 2 and the reason where they do not go together."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and report")
    parser.add_argument("--work", type=Path, help="folder of model and logs (default OUT/work)")
    parser.add_argument("--smoke", action="store_true", help="tiny model, two short sessions; on the CPU in host emulation without a GPU")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and what would run, start nothing")
    parser.add_argument("--mode", choices=(FIXED, SCENARIO), default=FIXED)
    parser.add_argument("--driver", choices=(aiperf_driver.NAME, direct_driver.NAME), help=f"default {USUAL['driver']}, with --smoke direct")
    parser.add_argument("--concurrency", type=counts, help="sessions at once, comma list (default 1,2,4,8)")
    parser.add_argument("--repeats", type=int, help="pairs of runs at each concurrency (default 3; fewer decide nothing)")
    parser.add_argument("--duration", type=int, default=900, help="seconds of a scenario-timing run")
    parser.add_argument("--deadline", type=float, help="seconds in all: pairs that would not end in time are left out and named")
    work = parser.add_argument_group("traces")
    work.add_argument("--traces", type=Path, help="a .json file of the Weka format, or a folder of them (default: synthetic ones)")
    work.add_argument("--shape", choices=sorted(EVERY), default="agentic-64k", help="of the synthetic sessions")
    work.add_argument("--beside", choices=sorted(EVERY), help="another shape on the same servers afterwards, reported in OUT/SHAPE")
    work.add_argument("--sessions", type=int, help="how many to make, or to take of --traces (default 16)")
    work.add_argument("--per-lane", type=int, help="replay concurrency times so many sessions, not all of them at every concurrency")
    work.add_argument("--scale", type=float, help="of the synthetic agentic sessions' lengths (default 1)")
    work.add_argument("--turns", type=int, help="of each synthetic agentic session, the first so many")
    work.add_argument("--seed", type=int, default=0)
    work.add_argument("--peak", type=int, help="leave out sessions with a request of more tokens, output included")
    served = parser.add_argument_group("servers")
    served.add_argument("--model-path", type=Path, help="checkpoint with a tokenizer")
    served.add_argument("--model", choices=sorted(models.SHAPES), help="random weights of this shape, without a tokenizer")
    served.add_argument("--layers", type=int, help="cut --model to this many layers")
    pool = "KV cache of either server; both share the GPU (default 262144: 36 GiB each for Qwen3-8B)"
    served.add_argument("--pool-tokens", type=int, default=262_144, help=pool)
    served.add_argument("--server-arg", action="append", default=[], help="one more argument of both servers, repeatable")
    simulated = "draw this mean length of accepted drafts instead of verifying them: speculative servers on random text; the report says so"
    served.add_argument("--simulate-acceptance", type=float, metavar="TOKENS", help=simulated)
    served.add_argument("--start-limit", type=float, default=600, help="seconds a server may take to start")
    one = "one server at a time, off and on in turn, a start of either for every repeat: of models that do not fit twice beside their caches"
    served.add_argument("--in-turn", action="store_true", help=one)
    served.add_argument("--off-url", help="attach to this server instead of starting one, with --on-url; both on one GPU of this host")
    served.add_argument("--on-url")
    tool = parser.add_argument_group("aiperf")
    tool.add_argument("--aiperf-env", type=Path, default=aiperf_driver.default_environment(), help="its virtual environment, made if absent")
    tool.add_argument("--aiperf-wheels", type=Path, help="folder of its wheels, for a host that reaches no registry")
    tool.add_argument("--run-limit", type=float, default=7200, help="seconds one aiperf run may take")
    parser.add_argument("--commit", help="HASH or HASH-dirty of the code, for a copy without git")
    args = parser.parse_args(words)
    args.work = args.work or args.out / "work"
    args.driver = args.driver or (SMOKE if args.smoke else USUAL)["driver"]
    if wrong := problem(args):
        parser.error(wrong)
    if args.per_lane is not None:
        args.sessions = args.per_lane * setup.MAX_BATCH  # so that the set does not change with the concurrencies asked for
    for name, value in (SMOKE if args.smoke else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def problem(args: argparse.Namespace) -> str | None:
    """Why the arguments do not go together, None when they do."""
    if args.mode == SCENARIO and args.driver == direct_driver.NAME:
        return f"--mode {SCENARIO} needs --driver {aiperf_driver.NAME}: the direct driver leaves thinking time out"
    if args.mode == SCENARIO and (args.per_lane or args.beside):
        return f"--per-lane and --beside are for {FIXED}"
    if (args.off_url is None) != (args.on_url is None):
        return "--off-url and --on-url go together"
    if args.off_url is not None and args.off_url.rstrip("/") == args.on_url.rstrip("/"):
        return "--off-url and --on-url are the same server"
    if args.off_url is not None and args.in_turn:
        return "--in-turn starts its servers itself, --off-url attaches to two that stand"
    if args.off_url is not None and (args.smoke or args.server_arg or args.model or args.simulate_acceptance):
        return "--off-url attaches to servers: --smoke, --model, --server-arg and --simulate-acceptance are for servers started here"
    if args.simulate_acceptance is not None and not any("--speculative-algorithm" in word for word in args.server_arg):
        return "--simulate-acceptance is for servers that speculate: give --server-arg=--speculative-algorithm=NAME"
    if args.simulate_acceptance is not None and args.simulate_acceptance < 1:
        return "--simulate-acceptance is 1 token a verify step or more"
    if sum((args.smoke, args.model_path is not None, args.model is not None)) != 1:
        return "give one of --model-path, --model and --smoke"
    if args.layers is not None and args.model is None:
        return "--layers cuts --model, whose weights are made here"
    if args.per_lane is not None and args.sessions is not None:
        return "--sessions and --per-lane both say how many sessions are replayed: give one"
    if args.traces is not None and (args.scale is not None or args.turns is not None):
        return "--scale and --turns are for synthetic sessions, --traces are replayed as they are"
    names = ("repeats", "sessions", "per_lane", "turns", "layers", "duration", "pool_tokens")
    wrong = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None and getattr(args, name) < 1]
    if wrong:
        return f"{', '.join(wrong)}: 1 or more"
    if args.scale is not None and not 0 < args.scale <= 1:
        return "--scale is above 0 and at most 1"
    return None
