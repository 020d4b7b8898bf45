"""A small client of SGLang's native HTTP API: token ids in, token ids and log-probabilities out. Standard library only."""

from __future__ import annotations

import dataclasses
import http.client
import json
import random
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Reply:
    """One request's outcome.

    ids: output tokens. top: per output token the (logprob, id) pairs returned, best first. finish: SGLang's finish reason
    type ("length", "stop", "abort"). cached: prompt tokens found in the prefix cache. logprobs: of the chosen tokens.
    verify_steps: steps of speculative decoding that made the tokens, 0 without.
    """

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[float, int]]]
    finish: str
    cached: int
    verify_steps: int = 0


def greedy(max_new_tokens: int) -> dict:
    """Sampling parameters of a greedy request of exactly `max_new_tokens` tokens."""
    return {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}


def random_prompt(length: int, *, vocab: int, seed: int) -> list[int]:
    """`length` token ids, none of them special."""
    generator = random.Random(seed)
    return [generator.randrange(10, vocab) for _ in range(length)]


def _reply(item: dict) -> Reply:
    meta = item["meta_info"]
    chosen = meta.get("output_token_logprobs") or []
    top = meta.get("output_top_logprobs") or []
    reason = meta.get("finish_reason") or {}
    return Reply(
        ids=list(item.get("output_ids") or []),
        logprobs=[entry[0] for entry in chosen],
        top=[[(pair[0], pair[1]) for pair in entry] for entry in top],
        finish=reason.get("type", "none") if isinstance(reason, dict) else str(reason),
        cached=int(meta.get("cached_tokens") or 0),
        verify_steps=int(meta.get("spec_verify_ct") or 0),
    )


class Client:
    """Requests to one server at host:port. Every call opens its own connection, so threads may share a client."""

    def __init__(self, port: int, *, host: str = "127.0.0.1", timeout_s: float = 120.0) -> None:
        self.host, self.port, self.timeout_s = host, port, timeout_s

    def call(self, method: str, path: str, body: dict | None = None, *, timeout_s: float | None = None) -> tuple[int, bytes]:
        """(status, payload) of one HTTP exchange. Raises OSError when the server cannot be reached in time."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s or self.timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: dict) -> object:
        """The decoded JSON answer (None if empty). Raises RuntimeError with the server's words on another status than 200."""
        status, payload = self.call("POST", path, body)
        if status != 200:
            raise RuntimeError(f"POST {path}: {status} {payload[:500].decode(errors='replace')}")
        return json.loads(payload) if payload[:1] in (b"{", b"[") else None

    def generate(self, prompts: list[list[int]], params: dict | list[dict], *, top: int = 0) -> list[Reply]:
        """One batched request. With `top`, that many log-probabilities a token. Raises RuntimeError as `post` does."""
        body = {"input_ids": prompts, "sampling_params": params, "stream": False}
        if top:
            body |= {"return_logprob": True, "top_logprobs_num": top}
        return self.replies(body)

    def replies(self, body: dict) -> list[Reply]:
        """One batched request with fields of the caller's own. Raises RuntimeError as `post` does."""
        return [_reply(item) for item in self.post("/generate", body)]

    def flush(self) -> None:
        """Empties the prefix cache and what NGRAM has seen, once the server is idle. Raises RuntimeError when it is not within 30 s."""
        self.post("/flush_cache?timeout=30", {})

    def timed(self, prompts: list[list[int]], max_new_tokens: int) -> float:
        """Seconds of one batched greedy request. Raises RuntimeError unless every prompt got exactly its tokens."""
        return self.timed_replies(prompts, max_new_tokens)[0]

    def timed_replies(self, prompts: list[list[int]], max_new_tokens: int) -> tuple[float, list[Reply]]:
        """The same with the replies."""
        begin = time.perf_counter()
        replies = self.generate(prompts, greedy(max_new_tokens))
        seconds = time.perf_counter() - begin
        lengths = [len(reply.ids) for reply in replies]
        if lengths != [max_new_tokens] * len(prompts):
            raise RuntimeError(f"asked for {max_new_tokens} tokens each, got {lengths}")
        return seconds, replies

    def stream(
        self, prompt: list[int], params: dict, *, rid: str, on_token: Callable[[int], bool], top: int = 0
    ) -> Reply | None:
        """One streamed request; `on_token(tokens so far)` returning False drops the connection. The last event's reply."""
        body = {"input_ids": prompt, "sampling_params": params, "stream": True, "rid": rid}
        if top:
            body |= {"return_logprob": True, "top_logprobs_num": top}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)
        last, ids = None, []
        try:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            for event in _events(connection.getresponse()):
                if "error" in event:
                    raise RuntimeError(f"stream {rid}: {event['error']}")
                # events carry either the new tokens or all of them; completion_tokens tells which
                part, total = event.get("output_ids") or [], event["meta_info"]["completion_tokens"]
                ids = list(part) if len(part) >= total else ids + list(part)
                last = event | {"output_ids": ids}
                if not on_token(len(ids)):
                    break
        finally:
            connection.close()
        return None if last is None else _reply(last)


def _events(response) -> Iterator[dict]:
    """The JSON objects of a server-sent event stream."""
    for line in response:
        line = line.strip()
        if line.startswith(b"data:") and line != b"data: [DONE]":
            yield json.loads(line[5:])
