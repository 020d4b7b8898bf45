"""Chat and completion requests over HTTP, streamed, with the token ids SGLang reports. The standard library only."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """One greedy answer: its text as streamed, the prompt's token ids and the answer's."""

    text: str
    prompt_ids: list[int]
    output_ids: list[int]


def complete(url: str, prompt: str, max_tokens: int, on_text: Callable[[str], None]) -> Answer:
    """A streamed /v1/completions request, greedy, `max_tokens` long; `on_text` gets each piece as it arrives."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    text, prompt_ids, output_ids = "", [], []
    for event in _stream(f"{url}/v1/completions", body):
        for choice in event["choices"]:
            text += choice["text"]
            on_text(choice["text"])
            prompt_ids = choice.get("prompt_token_ids") or prompt_ids
            output_ids += choice.get("token_ids") or []
    return Answer(text, prompt_ids, output_ids)


def chat(url: str, message: str, max_tokens: int, on_text: Callable[[str], None]) -> Answer:
    """A streamed /v1/chat/completions request, greedy, then the same request unstreamed, which alone reports token ids."""
    body = {
        "messages": [{"role": "user", "content": message}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    text = ""
    for event in _stream(f"{url}/v1/chat/completions", body):
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            text += piece
            on_text(piece)
    whole = {**body, "return_token_ids": True, "return_prompt_token_ids": True}
    with _post(f"{url}/v1/chat/completions", whole) as response:
        choice = json.load(response)["choices"][0]
    return Answer(text, choice["prompt_token_ids"], choice["response_token_ids"])


def metrics(url: str, prefix: str) -> dict[str, float]:
    """The server's Prometheus samples whose name starts with `prefix`: 'name{labels}' -> value."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line.startswith(prefix))
    return {name: float(value) for name, value in samples}


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, data=json.dumps({"model": "default", **body}).encode(), headers={"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def _stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with _post(url, {**body, "stream": True}) as response:
        for line in response:
            payload = line.decode().strip().removeprefix("data: ")
            if payload == "[DONE]":
                return
            if payload:
                yield json.loads(payload)
