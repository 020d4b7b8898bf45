"""Requests that come and go: batches change shape at every step, and no step and no token is lost."""

from __future__ import annotations

import time

from generate import InBackground, generate
from serving_pair import CHUNK

PROMPTS = (3, 17, 40, 64, 65, 100, 130, 200)
NEW_TOKENS = (35, 12, 30, 8, 25, 16, 40, 20)


def test_eight_requests_arriving_and_leaving(servers):
    before, prefills = servers.steps(), sum(servers.fallbacks().values())
    prompts = [servers.prompt(length) for length in PROMPTS]
    running = []
    for prompt, new_tokens in zip(prompts, NEW_TOKENS):
        running.append(InBackground(servers.on.url, prompt, new_tokens))
        time.sleep(0.1)
    answers = [request.result() for request in running]
    assert [len(answer.output_ids) for answer in answers] == list(NEW_TOKENS)
    after = servers.steps()
    gained = {rows: n - before.get(rows, 0) for rows, n in after.items()}
    # every token but each request's first is a row of one of our steps
    served = sum(rows * n for rows, n in gained.items())
    assert served == sum(NEW_TOKENS) - len(NEW_TOKENS), f"{served} rows in {dict(sorted(gained.items()))}"
    assert max(rows for rows, n in gained.items() if n) >= 4, f"the requests hardly ran together: {gained}"
    assert set(servers.fallbacks()) == {"prefill"} and sum(servers.fallbacks().values()) > prefills
    servers.require_right(*answers)


def test_chunked_prefill_beside_decode(servers):
    prefills = servers.fallbacks()["prefill"]
    short, long = servers.prompt(20), servers.prompt(5 * CHUNK)
    decoding = InBackground(servers.on.url, short, 60)
    time.sleep(0.5)
    late = generate(servers.on.url, long, 12)
    first = decoding.result()
    assert len(first.output_ids) == 60 and len(late.output_ids) == 12
    servers.require_right(first, late)
    servers.steps()  # lets the counters settle
    assert servers.fallbacks()["prefill"] - prefills >= 1 + 5, "one chunk of the short prompt, five of the long one"


def test_an_abort_in_mid_stream_leaves_the_others_alone(servers):
    others = [InBackground(servers.on.url, servers.prompt(length), 50) for length in (15, 70)]
    aborted = generate(servers.on.url, servers.prompt(33), 400, stop_after=6)
    assert 6 <= len(aborted.output_ids) < 400
    answers = [other.result() for other in others]
    assert [len(answer.output_ids) for answer in answers] == [50, 50]
    servers.require_right(aborted, *answers)
    servers.require_right(generate(servers.on.url, servers.prompt(33), 10))
