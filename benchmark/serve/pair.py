"""Starts the two servers of a comparison: kernels compiled beside them, what the start cost kept, nothing compiling when this returns."""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

from benchmark.common import deadline
from benchmark.serve import server, startup, warm_kernels
from sgl_lowlatency.bench.results import Results

WARM_LIMIT_S = 30.0  # after the servers are ready, for what still compiles


def start(
    args: argparse.Namespace, model: Path, server_arguments: list[str], results: Results, *,
    batch_tokens: list[int], algorithm: str | None = None,
) -> tuple[server.Server, server.Server]:
    """(off, on) of `model`, ready; top-level fields `startup`, `start` and `idle_gpu_load`.

    args: device, work, start_limit. batch_tokens, for FP8: sizes of the batches to come, algorithm: of speculative decoding (warm_kernels.py).
    Raises RuntimeError as server.wait_ready.
    """
    before, warming = startup.cached_kernels(), []
    if args.device == "cuda":
        warming = warm_kernels.start(model, batch_tokens, algorithm=algorithm, work=args.work)
    pair = server.start_pair(model, server_arguments, work=args.work, limit_s=args.start_limit, env=warm_kernels.ENVIRONMENT)
    if warming:
        deadline.say("kernels:", warm_kernels.finish(warming, limit_s=WARM_LIMIT_S))
    off, on = (startup.arm(one.ready_s, one.log()) for one in pair)
    costs = startup.costs(off, on, startup.cached_kernels() - before)
    results.set(startup=startup.lines(pair[1]), start=costs, idle_gpu_load=gpu_load_idle())
    deadline.say(startup.sentence(costs))
    return pair


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
