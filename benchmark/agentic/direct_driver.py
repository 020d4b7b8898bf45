"""Fixed work without aiperf: sends token ids to SGLang's own /generate and times the stream. The standard library only.

For hosts that reach no package registry, and for models without a tokenizer. A request's prompt is made from its trace alone: a block of
tokens from each hash id, so equal leading ids are equal tokens and the prefix cache sees what the session's did. `concurrency` lanes run
side by side, conversation i in lane i modulo `concurrency`, a lane's requests one after the other without pauses. Requests of a subagent
come behind the session's own, in the same lane. Prompts are made before the first one is sent: a driver that computes beside its lanes would
time itself.
"""

from __future__ import annotations

import array
import http.client
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmark.agentic import records
from benchmark.agentic.records import Record
from benchmark.serve.client import Client, greedy
from benchmark.traces.schema import Request, Trace

NAME = "direct"
FIRST_ID = 10  # below are special tokens


@dataclass(frozen=True)
class Prompt:
    """A request ready to send. key: conversation, stream, turn. ids: of the input. sha: `records.digest` of them."""

    key: tuple[str, str, int]
    ids: array.array
    output_tokens: int
    sha: str


def prepare(traces: Sequence[Trace], vocab: int) -> list[list[Prompt]]:
    """The requests of each session in the order in which they are sent. vocab: ids in use."""
    return [_session(trace, vocab) for trace in traces]


def _session(trace: Trace, vocab: int) -> list[Prompt]:
    blocks: dict[int, list[int]] = {}
    found = []
    for stream, requests in trace.streams:
        for turn, request in enumerate(requests):
            ids = prompt_ids(trace, stream, turn, request, vocab, blocks)
            found.append(Prompt((trace.id, stream, turn), array.array("i", ids), request.output_tokens, records.digest(ids)))
    return found


def prompt_ids(trace: Trace, stream: str, turn: int, request: Request, vocab: int, blocks: dict[int, list[int]]) -> list[int]:
    """The request's input, `input_tokens` ids in FIRST_ID..vocab-1. blocks: those of the session so far by hash id, added to."""
    ids: list[int] = []
    for block in request.hash_ids:
        if block not in blocks:
            blocks[block] = _block(f"{trace.id}/{block}", trace.block_size, vocab)
        ids += blocks[block]
    ids = ids[: request.input_tokens]  # the last block may be a part of one
    return ids + _block(f"{trace.id}/{stream}/{turn}", request.input_tokens - len(ids), vocab)


def _block(name: str, tokens: int, vocab: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(FIRST_ID, vocab) for _ in range(tokens)]


def run(client: Client, sessions: Sequence[Sequence[Prompt]], *, concurrency: int, progress: Callable[[Record], None]) -> list[Record]:
    """Every request of `sessions`, as `prepare` makes them, once. `progress` is called after each, from any lane.

    An answer that failed is a record with an error, and its conversation goes on. An exception in the caller's thread, Ctrl-C above all, drops
    each lane's connection at its next token.
    """
    begin, stop = time.perf_counter(), threading.Event()

    def lane(first: int) -> list[Record]:
        found = []
        for prompt in (prompt for session in sessions[first::concurrency] for prompt in session):
            if stop.is_set():
                break
            found.append(_send(client, prompt, begin, stop))
            progress(found[-1])
        return found

    with ThreadPoolExecutor(concurrency) as pool:
        try:
            return [record for lane_records in pool.map(lane, range(concurrency)) for record in lane_records]
        except BaseException:
            stop.set()
            raise


def _send(client: Client, prompt: Prompt, begin: float, stop: threading.Event) -> Record:
    ids = list(prompt.ids)
    arrivals: list[tuple[float, int]] = []
    sent = time.perf_counter()

    def on_token(total: int) -> bool:
        arrivals.append(((time.perf_counter() - sent) * 1e3, total))
        return not stop.is_set()

    reply, error = None, None
    try:
        reply = client.stream(ids, greedy(prompt.output_tokens), rid="-".join(map(str, prompt.key)) + f"-{time.monotonic_ns()}", on_token=on_token)
        if reply is None:
            error = "no answer"
        elif len(reply.ids) != prompt.output_tokens:
            error = f"{len(reply.ids)} of {prompt.output_tokens} tokens, finish reason {reply.finish}"
    except (OSError, http.client.HTTPException, RuntimeError, ValueError, KeyError) as problem:
        error = f"{type(problem).__name__}: {problem}"[:300]
    if not arrivals:
        error = error or "no token"
    return Record(
        *prompt.key,
        start_ms=round((sent - begin) * 1e3, 3),
        input_tokens=len(ids),
        output_tokens=len(reply.ids) if reply else 0,
        prompt_sha=prompt.sha,
        output_sha=records.digest(reply.ids if reply else []),
        ttft_ms=round(arrivals[0][0], 4) if arrivals else 0.0,
        e2e_ms=round(arrivals[-1][0], 4) if arrivals else 0.0,
        gaps_ms=records.gaps(arrivals),
        cached_tokens=reply.cached if reply else None,
        verify_steps=reply.verify_steps if reply else None,
        error=error,
    )
