"""One request at a time: the standard path's tokens, log-probabilities and limits, and every step accounted for."""

from __future__ import annotations

import signal
import time

import psutil
import pytest
import torch
from generate import Generated, generate

from sgl_lowlatency.cli import openai_client
from sgl_lowlatency.cli.server_setup import CONTEXT_LENGTH


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_tokens_are_the_standard_paths(servers, length):
    prompt = servers.prompt(length)
    answer = generate(servers.on.url, prompt, 20)
    assert len(answer.output_ids) == 20
    servers.require_right(answer)


def test_every_decode_step_of_a_request_runs_the_kernel(servers):
    before, prefills = servers.steps(), servers.fallbacks()
    generate(servers.on.url, servers.prompt(30), 12)
    after = servers.steps()
    assert after[1] - before.get(1, 0) == 11, "the first token comes from prefill"
    assert {rows: n for rows, n in after.items() if rows != 1} == {rows: n for rows, n in before.items() if rows != 1}
    assert {reason: n - prefills.get(reason, 0) for reason, n in servers.fallbacks().items()} == {"prefill": 1}


def test_one_new_token_needs_no_decode_step(servers):
    before = servers.rows_served()
    answer = generate(servers.on.url, servers.prompt(25), 1)
    assert len(answer.output_ids) == 1
    servers.require_right(answer)
    assert servers.rows_served() == before


def test_a_request_up_to_the_context_limit(servers):
    # SGLang ends a request two tokens below the context length, whatever it asked for
    room = 7
    prompt = servers.prompt(CONTEXT_LENGTH - 2 - room)
    answer = generate(servers.on.url, prompt, room + 1)
    assert len(answer.output_ids) == room and answer.meta["finish_reason"]["type"] == "length"
    servers.require_right(answer)


def test_a_cached_prefix_is_read_where_prefill_left_it(servers):
    prompt = servers.prompt(200)
    first = generate(servers.on.url, prompt, 10)
    again = generate(servers.on.url, prompt + first.output_ids + servers.prompt(5), 10)
    assert again.meta["cached_tokens"] >= 200, "decoded tokens and the prompt are both in the prefix cache"
    servers.require_right(first, again)


def test_log_probabilities(servers):
    prompt = servers.prompt(40)
    asked = {"return_logprob": True, "top_logprobs_num": 4}
    ours, theirs = (generate(server.url, prompt, 10, **asked) for server in (servers.on, servers.off))
    for answer in (ours, theirs):
        exact, bounds = servers.oracle.logits(prompt, answer.output_ids)
        expected = torch.log_softmax(exact, dim=-1)
        assert [entry[1] for entry in answer.meta["output_token_logprobs"]] == answer.output_ids
        for row, (chosen, top) in enumerate(zip(answer.meta["output_token_logprobs"], answer.meta["output_top_logprobs"])):
            assert len(top) == 4
            for value, token, _text in [chosen, *top]:
                # a log-softmax moves by at most twice what its logits do
                assert abs(value - float(expected[row, token])) <= 2 * float(bounds[row])


def test_openai_endpoints_stream_the_same_text(servers):
    for ask in (openai_client.complete, openai_client.chat):
        pieces = []
        ours = ask(servers.on.url, "the people of water", 16, pieces.append)
        theirs = ask(servers.off.url, "the people of water", 16, lambda _piece: None)
        assert len(pieces) > 5 and "".join(pieces) == ours.text
        assert ours.prompt_ids == theirs.prompt_ids and len(ours.output_ids) == 16
        servers.require_right(Generated(ours.prompt_ids, ours.output_ids, {}))
        if ours.output_ids == theirs.output_ids:
            assert ours.text == theirs.text


def test_a_signal_asks_for_the_coverage_line(servers):
    generate(servers.on.url, servers.prompt(4), 3)
    schedulers = [p for p in psutil.Process(servers.on.pid).children(recursive=True) if "scheduler" in "".join(p.cmdline())]
    assert len(schedulers) == 1
    before = servers.on.log_text().count("sgl-lowlatency coverage:")
    schedulers[0].send_signal(signal.SIGUSR1)
    generate(servers.on.url, servers.prompt(4), 1)
    deadline_s = time.monotonic() + 20.0
    while servers.on.log_text().count("sgl-lowlatency coverage:") == before and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert servers.on.log_text().count("sgl-lowlatency coverage:") == before + 1


def test_start_up_says_what_serves(servers):
    log = servers.on.log_text()
    assert "NVIDIA megakernel: active (sgl_lowlatency decode_step (Qwen3 dense): decode_step for 2 layers" in log
    assert "decode_step self-check: 1 rows" in log and "FAILED" not in log
    assert "; LM head inside; " in log
    assert "megakernel" not in servers.off.log_text().replace("enable_nvidia_megakernel", "")
