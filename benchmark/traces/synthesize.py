"""Synthetic agentic sessions of a published shape, in the Weka format.

    python3 -m benchmark.traces.synthesize --out DIR [--shape agentic-64k] [--sessions 64] [--seed 0] [--scale 1.0] [--turns N]

Every turn extends the input of the one before by what the last answer and the tools added; about one turn in a hundred drops all but the
tools' and the system's prefix. Lengths of outputs and of what a turn adds are drawn apart from each other, which real sessions do not do.
The same arguments give the same bytes. `--scale` multiplies every length of tokens, for smaller models and machines that are not a GPU;
`--turns` keeps the first turns of each session, for short runs. A shape of fixed lengths is one request a session, none like another.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from pathlib import Path

from benchmark.traces import schema, statistics
from benchmark.traces.shapes import EVERY, MIN_TURNS, SHAPES, FixedLength, Shape

BLOCK = 64
PREFIX_TOKENS = 2048  # tools and system prompt, kept by a reset
TRIES = 2000  # sessions of one number of turns drawn until one fits the peak
MODEL = "synthetic"


def session(shape: Shape | FixedLength, index: int, seed: int, scale: float = 1.0, turns: int | None = None) -> dict:
    """One trace file's content. turns: keep so many of the session's turns at most. Raises ValueError when no session of the drawn number of
    turns fits the peak."""
    if isinstance(shape, FixedLength):
        return _fixed_length(shape, f"{seed}-{index:04d}", scale)
    draw = random.Random(f"{seed}/{index}")
    drawn = 0
    while drawn < MIN_TURNS:
        drawn = round(_log_normal(draw, *shape.turns))
    for _ in range(TRIES):
        lengths = _inputs(draw, shape, drawn)
        if all(PREFIX_TOKENS + BLOCK <= tokens <= shape.peak for tokens, _ in lengths):
            return _trace(draw, shape, f"{index:04d}", [(max(1, round(tokens * scale)), reset) for tokens, reset in lengths[:turns]], scale)
    raise ValueError(f"no session of {drawn} turns fits {shape.peak} tokens in {TRIES} tries")


def _fixed_length(shape: FixedLength, name: str, scale: float) -> dict:
    tokens, out = (max(1, round(length * scale)) for length in (shape.input_tokens, shape.output_tokens))
    request = {"t": 0.0, "type": "s", "model": MODEL, "in": tokens, "out": out, "hash_ids": list(range(tokens // BLOCK))}
    request |= {"input_types": ["text"], "output_types": ["text"], "stop": "end_turn", "api_time": 0.0, "think_time": 0.0, "ttft": 0.0}
    head = {"id": f"fixed-{name}", "models": [MODEL], "block_size": BLOCK, "hash_id_scope": "local", "tool_tokens": 0, "system_tokens": 0}
    return head | {"requests": [request], "totals": None}


def _inputs(draw: random.Random, shape: Shape, turns: int) -> list[tuple[int, bool]]:
    """(input tokens, prefix dropped) of every turn."""
    typical = shape.new[0] * (turns / shape.turns[0]) ** -shape.turns_exponent
    tokens = _log_normal(draw, *shape.first)
    found = [(round(tokens), False)]
    for _ in range(turns - 1):
        if reset := draw.random() < shape.reset_share:
            tokens = _log_normal(draw, *shape.first)
        else:
            tokens += _log_normal(draw, typical, shape.new[1])
        found.append((round(tokens), reset))
    return found


def _trace(draw: random.Random, shape: Shape, name: str, lengths: list[tuple[int, bool]], scale: float) -> dict:
    prefix_blocks = max(1, round(PREFIX_TOKENS * scale)) // BLOCK
    ids: list[int] = []
    fresh, t_s, requests = 0, 0.0, []
    for turn, (tokens, reset) in enumerate(lengths):
        if reset:
            ids = ids[:prefix_blocks]
        ids = ids[: tokens // BLOCK]
        more = tokens // BLOCK - len(ids)
        ids = [*ids, *range(fresh, fresh + more)]
        fresh += more
        out = max(1, round(_through(draw.random(), shape.output) * scale))
        think_s = 0.0 if turn == 0 else round(_log_normal(draw, *shape.think), 3)
        api_s = round(0.2 + out * 0.01, 3)
        t_s += think_s
        request = {"t": round(t_s, 3), "type": "s", "model": MODEL, "in": tokens, "out": out, "hash_ids": ids}
        request |= {"input_types": ["text"] if turn == 0 else ["tool_result"], "output_types": ["text", "tool_use"]}
        request |= {"stop": "end_turn" if turn == len(lengths) - 1 else "tool_use"}
        requests.append(request | {"api_time": api_s, "think_time": think_s, "ttft": 0.2})
        t_s += api_s
    head = {"id": f"synthetic-{name}", "models": [MODEL], "block_size": BLOCK, "hash_id_scope": "local"}
    return head | {"tool_tokens": prefix_blocks * BLOCK, "system_tokens": 0, "requests": requests, "totals": None}


def _log_normal(draw: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(sigma * draw.gauss(0.0, 1.0))


def _through(share: float, points: tuple[tuple[float, float], ...]) -> float:
    """The quantile `share` of a distribution through (share, value) points, log-linear between them."""
    for (left, low), (right, high) in zip(points, points[1:]):
        if share <= right:
            return low * (high / low) ** ((share - left) / (right - left))
    return points[-1][1]


def write(
    out: Path, shape: Shape | FixedLength, *, sessions: int, seed: int, scale: float = 1.0, turns: int | None = None
) -> list[schema.Trace]:
    """Writes one file a session into the folder `out`, which must not hold other .json files, and reads them back. Raises ValueError."""
    out.mkdir(parents=True, exist_ok=True)
    names = [f"session-{index:04d}.json" for index in range(sessions)]
    others = sorted({file.name for file in out.glob("*.json")} - set(names))
    if others:
        raise ValueError(f"{out} holds {others[0]}, which is not of this set: choose an empty folder")
    for index, name in enumerate(names):
        (out / name).write_text(json.dumps(session(shape, index, seed, scale, turns)) + "\n")
    return schema.read(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(EVERY), default="agentic-64k")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--turns", type=int, help="keep so many turns of a session at most")
    args = parser.parse_args()
    traces = write(args.out, EVERY[args.shape], sessions=args.sessions, seed=args.seed, scale=args.scale, turns=args.turns)
    found = statistics.measure(traces)
    whole = args.scale == 1.0 and args.turns is None
    print(statistics.table(found, SHAPES.get(args.shape) if whole else None))
    print(f"{len(traces)} sessions, SHA-256 {schema.digest(traces)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
