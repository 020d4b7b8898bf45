"""GPU-only time of a decode step, from a torch profiler trace of a running server."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path

from benchmark.common import graph_trace
from benchmark.serve.client import Client, random_prompt
from sgl_lowlatency.bench import stats


def summarize(trace: dict) -> dict:
    """Per decode step of one chrome trace: kernels, busy ms, ms from one step's first kernel to its last.

    A step is what one graph launch runs. Kernels carry their launch's correlation id; in a trace without these the totals
    are divided by the number of launches ("method" says which). Raises ValueError without launches or kernels.
    """
    launches, work, groups = graph_trace.steps(trace)
    if not launches or not work:
        raise ValueError(f"the trace has {launches} graph launches and {len(work)} device events")
    if not groups:
        kernels = sum(e["cat"] == "kernel" for e in work) / launches
        return {
            "method": "total",
            "steps": launches,
            "kernels": kernels,
            "busy_ms": graph_trace.busy_us(work) / launches / 1e3,
        }
    spans = [max(e["ts"] + e["dur"] for e in step) - min(e["ts"] for e in step) for step in groups]
    return {
        "method": "correlation",
        "steps": len(groups),
        "kernels": stats.median([sum(e["cat"] == "kernel" for e in step) for step in groups]),
        "busy_ms": stats.median([graph_trace.busy_us(step) for step in groups]) / 1e3,
        "span_ms": stats.median(spans) / 1e3,
    }


def read(path: Path) -> dict:
    """The JSON of a trace file, gzipped or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        return json.load(file)


def profile(
    client: Client, folder: Path, *, batch: int, context: int, vocab: int, steps: int = 20, limit_s: float = 60
) -> dict:
    """Profile `steps` decode steps of a running server. Raises TimeoutError if no trace appears within `limit_s`."""
    folder.mkdir(parents=True, exist_ok=True)
    known = set(folder.rglob("*.json*"))
    request = {"output_dir": str(folder), "activities": ["CPU", "GPU"], "profile_by_stage": True, "num_steps": steps}
    client.call("POST", "/start_profile", request)
    prompts = [random_prompt(context, vocab=vocab, seed=900 + i) for i in range(batch)]
    work = threading.Thread(target=client.timed, args=(prompts, steps + 40), daemon=True)
    work.start()
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        new = [p for p in set(folder.rglob("*.json*")) - known if "DECODE" in p.name.upper()]
        if new:
            work.join(timeout=limit_s)
            time.sleep(1)  # the file is written in one go but not renamed into place
            return summarize(read(new[0]))
        time.sleep(0.5)
    raise TimeoutError(f"no decode trace within {limit_s:.0f} s")
