"""What the GPU ran of replayed CUDA graphs, by a chrome trace of the torch profiler."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
NAME_LENGTH = 96  # of a kernel's name without its return type and parameters


def busy_us(events: list[dict]) -> float:
    """Microseconds covered by at least one event (streams may overlap)."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e["ts"]):
        begin, stop = event["ts"], event["ts"] + event["dur"]
        total += max(stop - max(begin, end), 0.0)
        end = max(end, stop)
    return total


def steps(trace: dict) -> tuple[int, list[dict], list[list[dict]]]:
    """(graph launches, device events, those of each launch in order of their start). Device events carry their launch's correlation id; where the
    trace has none, the last is empty."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    launches = [e for e in events if "GraphLaunch" in e.get("name", "")]
    work = [e for e in events if e.get("cat") in WORK]
    of_launch: dict[int, list[dict]] = {e["args"]["correlation"]: [] for e in launches if "correlation" in e.get("args", {})}
    for event in work:
        if (launch := event.get("args", {}).get("correlation")) in of_launch:
            of_launch[launch].append(event)
    return len(launches), work, [sorted(step, key=lambda e: e["ts"]) for step in of_launch.values() if step]


def short(name: str) -> str:
    """A kernel's name without return type, parameters and repeated namespaces, at most NAME_LENGTH characters."""
    name = re.sub(r"^void ", "", name.partition("(")[0] or name)
    return re.sub(r"\b(?:at::native|cutlass|sgl_lowlatency|device_kernel)::", "", name)[:NAME_LENGTH]


def median_step(trace: dict) -> list[dict]:
    """Of all replays the one whose time from first to last kernel is the median: [{name, stream, start_us, us}] in order of their start. Raises
    ValueError where the trace tells no replay from another."""
    _, _, found = steps(trace)
    if not found:
        raise ValueError("the trace has no device events of a graph launch")
    spans = sorted((max(e["ts"] + e["dur"] for e in step) - step[0]["ts"], i) for i, step in enumerate(found))
    step = found[spans[len(spans) // 2][1]]
    begin = step[0]["ts"]
    return [
        {"name": short(e["name"]), "stream": e.get("args", {}).get("stream"), "start_us": round(e["ts"] - begin, 2), "us": round(e["dur"], 2)} for e in step
    ]


def summary(step: list[dict]) -> dict:
    """kernels, busy_us and span_us of a median_step, and `by_name`: (name, how often, us in all), longest first."""
    named: dict[str, list[float]] = {}
    for event in step:
        named.setdefault(event["name"], []).append(event["us"])
    busy = busy_us([{"ts": event["start_us"], "dur": event["us"]} for event in step])
    span = max(event["start_us"] + event["us"] for event in step)
    longest = sorted(((name, len(times), round(sum(times), 2)) for name, times in named.items()), key=lambda entry: -entry[2])
    return {"kernels": len(step), "busy_us": round(busy, 2), "span_us": round(span, 2), "by_name": longest}


def laps(step: list[dict], mark: str) -> list[list[dict]]:
    """A median_step cut where kernels begin whose name has `mark` in it: what began from one to the next, without what is in front of the first and
    behind the last. Times of a lap are from its first kernel's start on."""
    at = [i for i, event in enumerate(step) if mark in event["name"]]
    return [
        [{**event, "start_us": round(event["start_us"] - step[begin]["start_us"], 2)} for event in step[begin : end + 1]] for begin, end in zip(at, at[1:])
    ]


def record(replay: Callable[[], None], *, replays: int = 11) -> list[dict]:
    """median_step of a graph's replay on the current device."""
    import torch

    replay()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(replays):
            replay()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return median_step(json.loads(path.read_text()))
