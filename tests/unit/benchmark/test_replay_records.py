"""Records of requests, and the proof of equal work. Oracle: values worked out by hand."""

import pytest
from replay_runs import record, run, trace

from benchmark.agentic import records


def test_gaps_are_one_for_every_token_after_the_first_event():
    assert records.gaps([(10.0, 1), (14.0, 2), (20.0, 3)]) == (4.0, 6.0)
    assert records.gaps([(10.0, 2), (16.0, 5)]) == (2.0, 2.0, 2.0)  # three tokens in one event share its gap
    assert records.gaps([(10.0, 1), (12.0, 1), (15.0, 2)]) == (5.0,)  # an event without a token ends no gap
    assert records.gaps([(10.0, 1)]) == records.gaps([]) == ()


def test_the_time_of_an_output_token():
    assert record(gap=4.0, tokens=5).tpot_ms == 4.0
    assert record(tokens=1).tpot_ms is None


def test_records_survive_the_disk(tmp_path):
    records.write(tmp_path / "r.jsonl", run(3.0))
    assert records.read(tmp_path / "r.jsonl") == run(3.0)
    (tmp_path / "r.jsonl").write_text('{"conversation": "a"}\n')
    with pytest.raises(ValueError, match="r.jsonl line 1"):
        records.read(tmp_path / "r.jsonl")


def test_equal_work_is_equal_whatever_the_times_and_the_order():
    assert records.unequal(run(5.0), run(3.0)[::-1]) == []
    assert records.work(run(5.0)) == records.work(run(3.0)[::-1])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda found: found[:-1], ["b/root/1: sent to one arm only"]),
        (lambda found: [*found, found[0]], ["a request was sent twice"]),
        (lambda found: [record("a", 0, prompt="q"), *found[1:]], ["a/root/0: other prompts"]),
        (lambda found: [record("a", 0, tokens=4), *found[1:]], ["a/root/0: 1000 + 5 tokens off, 1000 + 4 on"]),
    ],
)
def test_unequal_work_is_named(changed, words):
    on = changed(run(5.0))
    assert records.unequal(run(5.0), on) == words
    one, other = records.work(run(5.0)), records.work(on)
    assert (one["prompts_sha"], one["lengths_sha"]) != (other["prompts_sha"], other["lengths_sha"])


def test_failed_requests_and_equal_answers():
    failed = record("a", 1, error="no answer")
    assert records.failures([record(), failed]) == ["a/root/1: no answer"]
    assert records.same_answers([record(), record("a", 1)], [record(), record("a", 1, output_sha="x")]) == 0.5
    assert records.same_answers([record()], [failed]) is None


def test_requests_that_were_not_sent_are_counted_by_session():
    found = [record("a", 0), record("a", 0, stream="fa:000"), record("b", 0)]  # aiperf cuts a session where its prefix is dropped
    assert records.missing(found, [trace("a", (70, 1), (80, 1)), trace("b", (70, 1), (80, 1))]) == ["b: 1 of 2 requests sent"]
