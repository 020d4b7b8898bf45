"""Synthetic sessions have the published shape. Oracle: the published quantiles, measured anew from the files."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmark.traces import schema, statistics, synthesize
from benchmark.traces.shapes import FIXED_LENGTHS, MIN_TURNS, SHAPES


def made(shape, seed=3):
    return [schema.parse(synthesize.session(shape, index, seed), Path(f"{index}.json")) for index in range(500)]


@pytest.fixture(scope="module")
def sessions():
    return made(SHAPES["agentic-64k"])


def test_500_sessions_have_the_published_shape(sessions):
    assert statistics.misses(statistics.measure(sessions), SHAPES["agentic-64k"]) == []


def test_the_longer_shape_too():
    assert statistics.misses(statistics.measure(made(SHAPES["agentic-128k"])), SHAPES["agentic-128k"]) == []


def test_another_distribution_is_a_miss(sessions):
    """The check can fail: outputs twice as long, and sessions that forget their prefix."""
    roots = [tuple(dataclasses.replace(request, output_tokens=2 * request.output_tokens) for request in trace.root) for trace in sessions]
    doubled = [dataclasses.replace(trace, streams=(("root", root),)) for trace, root in zip(sessions, roots)]
    wrong = statistics.misses(statistics.measure(doubled), SHAPES["agentic-64k"])
    assert [line.split()[0] for line in wrong] == ["output_p50", "output_p90", "output_p99"]
    forgetful = dataclasses.replace(SHAPES["agentic-64k"], reset_share=0.05)
    wrong = statistics.misses(statistics.measure(made(forgetful)), SHAPES["agentic-64k"])
    assert "reset_share" in {line.split()[0] for line in wrong}


def test_every_session_can_be_replayed(sessions):
    for trace in sessions:
        assert len(trace.root) >= MIN_TURNS
        assert max(request.input_tokens for request in trace.root) <= SHAPES["agentic-64k"].peak
        for request in trace.root:
            assert len(request.hash_ids) == request.input_tokens // 64
            assert len(set(request.hash_ids)) == len(request.hash_ids)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    shape = SHAPES["agentic-64k"]
    first, again, other = (synthesize.write(tmp_path / str(n), shape, sessions=3, seed=seed) for n, seed in enumerate((0, 0, 1)))
    assert schema.digest(first) == schema.digest(again) != schema.digest(other)
    # a session does not depend on how many are made
    assert synthesize.session(shape, 2, 0) == json.loads(first[2].path.read_text())


def test_a_session_cut_short_begins_as_the_whole_one():
    whole, cut = (synthesize.session(SHAPES["agentic-64k"], 0, 0, turns=turns)["requests"] for turns in (None, 3))
    assert len(whole) > len(cut) == 3 and cut[2].pop("stop") == "end_turn" != whole[2].pop("stop")
    assert cut == whole[:3]


def test_fixed_lengths_are_one_request_each_and_share_nothing(tmp_path):
    found = synthesize.write(tmp_path, FIXED_LENGTHS["random-8k-1k"], sessions=3, seed=1)
    assert [[(r.input_tokens, r.output_tokens) for r in trace.root] for trace in found] == [[(8192, 1024)]] * 3
    assert len({trace.id for trace in found}) == 3  # hash ids mean nothing beyond a session: no prefix is shared
    small = synthesize.session(FIXED_LENGTHS["random-8k-1k"], 0, 1, scale=0.01)["requests"][0]
    assert (small["in"], small["out"], small["hash_ids"]) == (82, 10, [0])


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(ValueError, match="holds mine.json, which is not of this set"):
        synthesize.write(tmp_path, SHAPES["agentic-64k"], sessions=1, seed=0)


def test_figures_of_a_session_worked_out_by_hand(tmp_path):
    """Two blocks kept of two, then none of three kept: 640 of 128 + 192 + 320 input tokens are new but for 128."""
    requests = [(128, [1, 2]), (192, [1, 2, 3]), (320, [4, 5, 6, 7, 8])]
    trace = {"id": "x", "models": [], "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0, "type": "n", "model": "m", "in": tokens, "out": 10, "hash_ids": ids, "think_time": 2.0} for tokens, ids in requests
    ]}
    (tmp_path / "x.json").write_text(json.dumps(trace))
    found = statistics.measure(schema.read(tmp_path))
    assert found["turns_p50"] == 3 and found["first_input_p50"] == 128 and found["input_p50"] == 192
    assert (found["new_p50"], found["reset_share"]) == ((64 + 320) / 2, 0.5)
    assert found["prefix_reuse"] == pytest.approx(128 / 640)
