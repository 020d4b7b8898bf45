"""How long a replay is said to take. Oracle: sums by hand over chosen traces and speeds, and the runs of a committed report."""

import json
import types
from pathlib import Path

import pytest

for name in ("scipy", "sglang"):
    pytest.importorskip(name)

from replay_runs import trace  # noqa: E402

from benchmark.agentic import estimate  # noqa: E402
from benchmark.agentic.estimate import DENSE, KNOWN, Speed, new_tokens, run_s  # noqa: E402
from benchmark.agentic.work import Work  # noqa: E402
from benchmark.traces import synthesize  # noqa: E402
from benchmark.traces.schema import Request, read  # noqa: E402
from benchmark.traces.shapes import EVERY  # noqa: E402

SPEED = Speed({1: 10.0, 4: 20.0}, 1000.0, 50.0, "chosen")
RESULTS = Path(__file__).parents[3] / "benchmark/results/replay-qwen3-8b.json"


def test_what_the_prefix_cache_has_is_not_prefilled_again():
    def request(tokens, *ids):
        return Request(tokens, 1, ids, 0.0, None)

    assert new_tokens([request(130, 1, 2), request(200, 1, 2, 3), request(140, 1, 9), request(64, 1)], 64) == 130 + 72 + 76 + 0


def test_a_run_is_its_longest_lane_and_every_prefill():
    """Two sessions of 1280 + 64 new tokens; at one at once all 60 tokens follow each other, at two the longer 40."""
    traces = [trace("a", (1280, 10), (1344, 10)), trace("b", (1280, 30), (1344, 10))]
    assert run_s(traces, 1, SPEED) == pytest.approx(60 * 0.010 + 2.688)
    assert run_s(traces, 2, SPEED) == pytest.approx(40 * 0.020 + 2.688)
    assert (SPEED.gap(3), SPEED.gap(9)) == (20.0, 20.0)


def arguments(**changes):
    fields = {"smoke": False, "driver": "direct", "mode": "fixed-work", "concurrency": (1, 2), "repeats": 3, "off_url": None, "in_turn": True,
              "duration": 900}  # fmt: skip
    return types.SimpleNamespace(**fields | changes)


def test_the_line_counts_starts_and_runs(tmp_path):
    works = [Work(tmp_path, "replay", "x", [trace("a", (28000, 100))], None)]
    each = 100 * 5.5e-3 + 1.0 + 3.0, 100 * 5.9e-3 + 1.0 + 3.0
    for args, starts in ((arguments(), 6), (arguments(in_turn=False), 2), (arguments(off_url="u"), 0)):
        minutes = (6 * sum(each) + starts * 45) / 60
        started = f"{starts} starts of 45 s and " if starts else ""
        line = estimate.words(args, works, "qwen3-8b")
        assert line.startswith(f"about {minutes:.0f} min: {started}12 runs of 5 to 5 s (5.5 to 8 ms")
    scenario = estimate.words(arguments(mode="scenario-timing", driver="aiperf", repeats=1, duration=120), works, "qwen3-30b-a3b")
    assert scenario.startswith("about 15 min: 2 starts of 40 s and 4 runs of 210 to 210 s (4.2 to 10.3 ms a token")
    assert estimate.words(arguments(smoke=True), works, "tiny").startswith("no estimate")
    assert "of no other: measured in replays of Qwen3-8B" in estimate.words(arguments(), works, "other")


def test_the_speeds_give_the_committed_replays_times(tmp_path):
    """Within a fifth of every median of the off arm: the same sessions, made anew."""
    content = json.loads(RESULTS.read_text())
    plan = content["plan"]
    assert plan["shape"] == "agentic-64k, seed 0, scale 0.5, turns 3" and plan["per_lane"] == 1
    synthesize.write(tmp_path / "t", EVERY["agentic-64k"], sessions=16, seed=0, scale=0.5, turns=3)
    traces = [one for one in read(tmp_path / "t") if one.peak_tokens <= 32768][:16]
    for number, one in content["concurrencies"].items():
        lanes = traces[: int(number)]
        assert sum(r.output_tokens for t in lanes for _, requests in t.streams for r in requests) == one["work"]["output_tokens"]
        measured = sorted(run["seconds"] for run in one["runs"]["off"])[1]
        assert run_s(lanes, int(number), DENSE) == pytest.approx(measured, rel=0.2), number
    assert KNOWN["qwen3-8b"] is DENSE
