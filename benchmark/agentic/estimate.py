"""How long a replay will take, before it is begun: from lengths of its traces and speeds that were measured or are assumed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.agentic import aiperf_driver
from benchmark.agentic.aiperf_driver import SCENARIO
from benchmark.agentic.work import Work
from benchmark.traces.schema import Request, Trace


@dataclass(frozen=True)
class Speed:
    """Of the slower arm. gap_ms: between a session's tokens, by sessions at once. prefill_tok_s: of all sessions together. start_s: of a server until
    it is ready. said: where these are from."""

    gap_ms: dict[int, float]
    prefill_tok_s: float
    start_s: float
    said: str

    def gap(self, concurrency: int) -> float:
        """At the nearest number of sessions that is known, not below `concurrency` where there is one."""
        return self.gap_ms[min((n for n in self.gap_ms if n >= concurrency), default=max(self.gap_ms))]


DENSE = Speed({1: 5.5, 2: 5.9, 4: 6.3, 8: 8.0}, 28_000, 45, "measured in replays of Qwen3-8B on an H200, the start on a cold host assumed")
KNOWN = {
    "qwen3-8b": DENSE,
    "qwen3-30b-a3b": Speed({1: 4.2, 2: 5.2, 4: 7.0, 8: 10.3}, 25_000, 40, "measured in replays of Qwen3-30B-A3B on an H200, with its starts; prefill assumed"),
}  # fmt: skip
OVERHEAD_S = {aiperf_driver.NAME: 30.0}  # of a run beside its requests, assumed
WARM_UP_S = 60.0  # of a scenario's run in front of its duration, assumed
ELSEWHERE_S = 3.0  # of a run of the direct driver: the cache emptied, counters settled


def new_tokens(requests: Sequence[Request], block_size: int) -> int:
    """Input tokens that the request before has not left in the prefix cache."""
    total, before = 0, ()
    for request in requests:
        shared = 0
        while shared < min(len(before), len(request.hash_ids)) and before[shared] == request.hash_ids[shared]:
            shared += 1
        total, before = total + request.input_tokens - shared * block_size, request.hash_ids
    return total


def run_s(traces: Sequence[Trace], concurrency: int, speed: Speed) -> float:
    """Of a fixed-work run: the longest lane's tokens, and every prefill, for which all lanes wait."""
    def tokens(lane: Sequence[Trace]) -> int:
        return sum(request.output_tokens for trace in lane for _, requests in trace.streams for request in requests)

    longest = max(tokens(traces[first::concurrency]) for first in range(concurrency))
    prefill = sum(new_tokens(requests, trace.block_size) for trace in traces for _, requests in trace.streams)
    return longest * speed.gap(concurrency) / 1e3 + prefill / speed.prefill_tok_s


def words(args: argparse.Namespace, works: Sequence[Work], model: str) -> str:
    """One line for an operator; of the smoke test, why there is none."""
    if args.smoke:
        return "no estimate: the smoke test's speed is the CPU's"
    speed = KNOWN.get(model, DENSE)
    of = speed.said if model in KNOWN else f"of no {model}: {speed.said}"
    overhead = OVERHEAD_S.get(args.driver, ELSEWHERE_S)
    if args.mode == SCENARIO:
        runs = [args.duration + WARM_UP_S + overhead for _ in works for _ in args.concurrency]
    else:
        runs = [run_s(one.at(n), n, speed) + overhead for one in works for n in args.concurrency]
    starts = 0 if args.off_url else 2 * args.repeats if args.in_turn else 2
    total = 2 * args.repeats * sum(runs) + starts * speed.start_s
    started = f"{starts} starts of {speed.start_s:.0f} s and " if starts else ""
    return (
        f"about {total / 60:.0f} min: {started}{2 * args.repeats * len(runs)} runs of {min(runs):.0f} to {max(runs):.0f} s "
        f"({speed.gap(1):g} to {speed.gap(16):g} ms a token, {speed.prefill_tok_s:,.0f} tokens/s of prefill: {of})"
    )
