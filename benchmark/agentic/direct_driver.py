"""Fixed work without aiperf: sends token ids to SGLang's own /generate and times the stream. The standard library only.

For hosts that reach no package registry, and for models without a tokenizer. A request's prompt is made from its trace alone: a block of
tokens from each hash id, so equal leading ids are equal tokens and the prefix cache sees what the session's did. `concurrency` lanes run
side by side, conversation i in lane i modulo `concurrency`, a lane's requests one after the other without pauses. Requests of a subagent
come behind the session's own, in the same lane.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmark.agentic import records
from benchmark.agentic.records import Record
from benchmark.serve.client import Client, greedy
from benchmark.traces.schema import Request, Trace

NAME = "direct"
FIRST_ID = 10  # below are special tokens


def prompt_ids(trace: Trace, stream: str, turn: int, request: Request, vocab: int) -> list[int]:
    """The request's input, `input_tokens` ids in FIRST_ID..vocab-1."""
    ids: list[int] = []
    for block in request.hash_ids:
        ids += _block(f"{trace.id}/{block}", trace.block_size, vocab)
    ids = ids[: request.input_tokens]  # the last block may be a part of one
    return ids + _block(f"{trace.id}/{stream}/{turn}", request.input_tokens - len(ids), vocab)


def _block(name: str, tokens: int, vocab: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(FIRST_ID, vocab) for _ in range(tokens)]


def run(
    client: Client, traces: list[Trace], *, concurrency: int, vocab: int, progress: Callable[[Record], None]
) -> list[Record]:
    """Every request of `traces` once. `progress` is called after each, from any lane.

    An answer that failed is a record with an error, and its conversation goes on. An exception in the caller's thread, Ctrl-C above all, drops
    each lane's connection at its next token.
    """
    begin, stop = time.perf_counter(), threading.Event()

    def lane(first: int) -> list[Record]:
        found = []
        for trace in traces[first::concurrency]:
            for stream, requests in trace.streams:
                for turn, request in enumerate(requests):
                    if stop.is_set():
                        return found
                    ids = prompt_ids(trace, stream, turn, request, vocab)
                    found.append(_send(client, (trace.id, stream, turn), ids, request.output_tokens, begin, stop))
                    progress(found[-1])
        return found

    with ThreadPoolExecutor(concurrency) as pool:
        try:
            return [record for lane_records in pool.map(lane, range(concurrency)) for record in lane_records]
        except BaseException:
            stop.set()
            raise


def _send(client: Client, key: tuple[str, str, int], ids: list[int], output_tokens: int, begin: float, stop: threading.Event) -> Record:
    arrivals: list[tuple[float, int]] = []
    sent = time.perf_counter()

    def on_token(total: int) -> bool:
        arrivals.append(((time.perf_counter() - sent) * 1e3, total))
        return not stop.is_set()

    reply, error = None, None
    try:
        reply = client.stream(ids, greedy(output_tokens), rid="-".join(map(str, key)) + f"-{time.monotonic_ns()}", on_token=on_token)
        if reply is None:
            error = "no answer"
        elif len(reply.ids) != output_tokens:
            error = f"{len(reply.ids)} of {output_tokens} tokens, finish reason {reply.finish}"
    except (OSError, RuntimeError, ValueError, KeyError) as problem:
        error = f"{type(problem).__name__}: {problem}"[:300]
    if not arrivals:
        error = error or "no token"
    return Record(
        *key,
        start_ms=round((sent - begin) * 1e3, 3),
        input_tokens=len(ids),
        output_tokens=len(reply.ids) if reply else 0,
        prompt_sha=records.digest(ids),
        output_sha=records.digest(reply.ids if reply else []),
        ttft_ms=round(arrivals[0][0], 4) if arrivals else 0.0,
        e2e_ms=round(arrivals[-1][0], 4) if arrivals else 0.0,
        gaps_ms=records.gaps(arrivals),
        cached_tokens=reply.cached if reply else None,
        verify_steps=reply.verify_steps if reply else None,
        error=error,
    )
