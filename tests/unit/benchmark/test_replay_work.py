"""Which sessions are replayed at which concurrency. Oracle: the files made, and lengths worked out by hand."""

import json

import pytest

pytest.importorskip("sglang")

from benchmark import replay  # noqa: E402
from benchmark.agentic import work  # noqa: E402
from benchmark.traces.schema import TraceError  # noqa: E402


def made(tmp_path, *words):
    return work.of(replay.parse(["--out", str(tmp_path), "--smoke", *words]))


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_all_sessions_at_every_concurrency_unless_lanes_have_their_own(tmp_path):
    (all_,) = made(tmp_path / "all", "--sessions", "3")
    assert [len(all_.at(n)) for n in (1, 2, 8)] == [3, 3, 3] and files(all_.folder(2)) == [f"session-{n:04d}.json" for n in range(3)]
    (lanes,) = made(tmp_path / "lanes", "--per-lane", "2", "--concurrency", "1,4")
    assert [len(lanes.at(n)) for n in (1, 4)] == [2, 8] and list(lanes.at(1)) == list(lanes.at(4)[:2])
    assert files(lanes.folder(1)) == [f"session-{n:04d}.json" for n in range(2)]
    (more,) = made(tmp_path / "more", "--per-lane", "2", "--concurrency", "1,8")
    assert [t.sha256 for t in more.traces] == [t.sha256 for t in lanes.traces]  # another concurrency may join the same folder


def test_what_is_asked_for_is_what_is_made(tmp_path):
    first, beside = made(tmp_path, "--per-lane", "1", "--turns", "3", "--beside", "random-8k-1k", "--seed", "5")
    assert (first.what, beside.what) == ("replay", "fixed-length")
    assert first.shape == "agentic-64k, seed 5, scale 0.02, turns 3" and {len(trace.root) for trace in first.traces} == {3}
    assert beside.shape == "random-8k-1k, seed 5, scale 0.02" and beside.out == tmp_path / "random-8k-1k"
    assert [(r.input_tokens, r.output_tokens) for trace in beside.at(2) for r in trace.root] == [(164, 20)] * 2
    assert beside.peak_tokens == 184


def test_fixed_lengths_are_not_scaled_for_a_real_model(tmp_path):
    args = replay.parse(["--out", str(tmp_path), "--model", "qwen3-8b", "--driver", "direct", "--scale", "0.5", "--beside", "random-8k-1k"])
    assert work.of(args)[1].peak_tokens == 8192 + 1024


def test_too_few_sessions_for_the_lanes_are_refused(tmp_path):
    (source,) = made(tmp_path / "source", "--sessions", "3")
    words = ["--traces", str(source.folder(1)), "--per-lane", "1", "--concurrency", "4"]
    with pytest.raises(TraceError, match="3 sessions are too few for 4 lanes of 1 sessions: replay fewer at once, more traces, or raise --peak"):
        made(tmp_path / "out", *words)
    assert len(made(tmp_path / "out", *words[:-1], "3")[0].traces) == 3


def test_traces_of_the_operator_are_replayed_as_they_are(tmp_path):
    (source,) = made(tmp_path / "source", "--sessions", "2")
    (own,) = made(tmp_path / "own", "--traces", str(source.folder(1)))
    assert [t.sha256 for t in own.traces] == [t.sha256 for t in source.traces] and own.shape == "from replayed"
    path = next(source.folder(1).iterdir())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "red"}))
    with pytest.raises(TraceError, match=f"{path.name}: unknown key 'colour'; known are id, models, "):
        made(tmp_path / "own", "--traces", str(path))
