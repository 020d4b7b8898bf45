"""The direct driver sends each trace's tokens in order and times what comes back. Oracle: a stand-in server's own notes."""

import threading

import pytest
from replay_runs import trace
from stub_server import stub, tokens

from benchmark.agentic import direct_driver, records
from benchmark.serve.client import Client


def replay(traces, concurrency=1, generate=tokens):
    seen = []
    with stub(generate=generate) as server:
        sessions = direct_driver.prepare(traces, 100)
        found = direct_driver.run(Client(server.server_port), sessions, concurrency=concurrency, progress=seen.append)
        return found, server.asked, seen


def test_prompts_share_what_their_hash_ids_share():
    one = trace("a", (64 * 3 + 10, 1), (64 * 4 + 5, 1))
    first, second = (list(prompt.ids) for prompt in direct_driver.prepare([one], 100)[0])
    assert (len(first), len(second)) == (202, 261)
    assert first[:192] == second[:192] and first[192:202] != second[192:202]
    assert all(10 <= token < 100 for token in second) and len(set(second)) > 50
    other = direct_driver.prepare([trace("b", (202, 1))], 100)[0][0]
    assert list(other.ids[:64]) != first[:64]  # ids are of one trace


def test_every_request_is_sent_in_order_and_recorded():
    traces = [trace("a", (70, 3), (130, 4), child=((65, 2),)), trace("b", (64, 1))]
    found, asked, seen = replay(traces)
    assert [record.key for record in found] == [("a", "root", 0), ("a", "root", 1), ("a", "agent#0", 0), ("b", "root", 0)]
    assert [len(body["input_ids"]) for body in asked] == [70, 130, 65, 64]
    assert [body["sampling_params"] for body in asked] == [{"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True} for n in (3, 4, 2, 1)]
    assert [records.digest(body["input_ids"]) for body in asked] == [record.prompt_sha for record in found]
    assert [(r.output_tokens, len(r.gaps_ms), r.cached_tokens, r.error) for r in found] == [(n, n - 1, 3, None) for n in (3, 4, 2, 1)]
    assert seen == found
    assert all(0 < r.ttft_ms <= r.e2e_ms for r in found)


def test_lanes_take_turns_of_conversations_and_run_side_by_side():
    gate = threading.Barrier(2, timeout=20)  # broken unless two requests are under way at once

    def both(body):
        gate.wait()
        return tokens(body)

    found, _, _ = replay([trace(name, (70, 2), (80, 2)) for name in "abcd"], concurrency=2, generate=both)
    assert [record.conversation for record in found] == ["a", "a", "c", "c", "b", "b", "d", "d"]
    assert records.failures(found) == []


def test_an_answer_of_another_length_is_a_failure_and_the_rest_goes_on():
    found, asked, _ = replay([trace("a", (70, 3), (80, 1))], generate=lambda body: tokens(body, one_short=True))
    assert [record.error for record in found] == ["2 of 3 tokens, finish reason length", "no answer"]
    assert len(asked) == 2


def test_a_server_that_is_gone_is_a_failure():
    with stub() as server:
        port = server.server_port
    sessions = direct_driver.prepare([trace("a", (70, 3))], 100)
    found = direct_driver.run(Client(port), sessions, concurrency=1, progress=lambda _record: None)
    assert "ConnectionRefusedError" in found[0].error


def test_an_interrupt_ends_every_lane():
    """The exception reaches the caller, and a lane that has not ended sends no further request."""

    def interrupted(_record):
        raise KeyboardInterrupt

    sessions = direct_driver.prepare([trace("a", (70, 1), (80, 1), (90, 1))], 100)
    with stub(generate=tokens) as server:
        with pytest.raises(KeyboardInterrupt):
            direct_driver.run(Client(server.server_port), sessions, concurrency=1, progress=interrupted)
        assert len(server.asked) == 1
