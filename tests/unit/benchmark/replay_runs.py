"""Runs of a replay made up for tests: traces of chosen lengths, records and cells with chosen times."""

from pathlib import Path

from benchmark.agentic import cells
from benchmark.agentic.arms import OFF, ON
from benchmark.agentic.cells import Cell
from benchmark.agentic.records import Record
from benchmark.traces.schema import Request, Trace

MACHINE = {"gpu": "NVIDIA H200", "num_gpus": 1, "driver": "1.2", "clocks_mhz": {"sm": 1980}}
PLAN = {
    "what": "replay", "per_lane": None, "simulated_acceptance": None, "traces_sha256": "t" * 64, "sessions": 2, "requests": 4,
    "shape": "agentic-64k, seed 0, scale 1", "mode": "fixed-work", "driver": "direct",
    "duration_s": None, "model": "qwen3-8b", "weights": "real-scale random, seed 0", "servers": "started", "server_arguments": ["--x"],
    "commit": "c" * 40, "dirty": False, "gpu": "NVIDIA H200", "versions": {"python": "3.11", "sglang": "0.5.23", "sgl_lowlatency": "0.1.0"},
}
ARGUMENTS = {"dtype": "auto", "quantization": None, "speculative_algorithm": None, "tp_size": 1}
SERVERS = {"arguments": ARGUMENTS, "startup": ["<active>"], "attached": False}


def record(conversation="a", turn=0, *, gap=5.0, tokens=5, prompt="p", **changes):
    fields = {
        "conversation": conversation, "stream": "root", "turn": turn, "start_ms": 10.0 * turn, "input_tokens": 1000 + 100 * turn,
        "output_tokens": tokens,
        "prompt_sha": f"{prompt}{turn}", "output_sha": "o", "ttft_ms": 50.0, "e2e_ms": 50.0 + gap * (tokens - 1), "gaps_ms": (gap,) * (tokens - 1),
        "cached_tokens": 500, "verify_steps": 0, "error": None,
    }
    return Record(**fields | changes)


def cell(arm, repeat, *, concurrency=1, session="s", machine=MACHINE, seconds=10.0, **changes):
    on = {"steps": {"1": 16.0}, "rows": 16.0, "fallbacks": {"prefill": 4.0}} if arm == ON else {}
    first, fields = (arm == OFF) == bool(repeat % 2), on | {"command": ["direct"]} | changes
    return Cell(arm, concurrency, repeat, first, session, "2026-12-01T10:00:00Z", seconds, machine, **fields)


def run(gap):
    return [record(conversation, turn, gap=gap) for conversation in "ab" for turn in range(2)]


def folder(out, times, *, concurrency=1, plan=PLAN):
    """A finished replay; times: (off, on) gap of each repeat in ms."""
    cells.keep_plan(out, plan)
    cells.keep_servers(out, SERVERS)
    for repeat, pair in enumerate(times, 1):
        for arm, gap in zip((OFF, ON), pair, strict=True):
            cells.save(out, cell(arm, repeat, concurrency=concurrency, seconds=gap), run(gap))
    return out


def trace(name, *lengths, child=()):
    """A session of (input, output) tokens a turn whose turns extend each other; child: the same of a subagent."""
    def requests(these):
        return tuple(Request(tokens, out, tuple(range(tokens // 64)), 0.0, None) for tokens, out in these)

    streams = (("root", requests(lengths)),) + ((("agent#0", requests(child)),) if child else ())
    return Trace(name, 64, 0, streams, Path(f"{name}.json"), "0")
