"""SGLang's native /generate over HTTP, by token ids, streamed: what the serving tests send."""

from __future__ import annotations

import json
import threading
import urllib.request
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Generated:
    prompt_ids: list[int]
    output_ids: list[int]
    meta: dict[str, Any]


def generate(url: str, prompt_ids: list[int], max_new_tokens: int, *, stop_after: int | None = None, **fields: Any) -> Generated:
    """Greedy, without stopping at an end token. stop_after: hang up once that many tokens have come."""
    body = {
        "input_ids": prompt_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        "stream": True,
        **fields,
    }
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    output_ids, meta = [], {}
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        for line in response:
            payload = line.decode().strip().removeprefix("data: ")
            if not payload or payload == "[DONE]":
                continue
            event = json.loads(payload)
            assert "error" not in event, event
            output_ids, meta = event["output_ids"], event["meta_info"]
            if stop_after is not None and len(output_ids) >= stop_after:
                break
    return Generated(prompt_ids, output_ids, meta)


class InBackground(threading.Thread):
    """Runs one `generate` beside others; `result()` waits for it and raises what it raised."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(daemon=True)
        self._call, self._result, self._error = (args, kwargs), None, None
        self.start()

    def run(self) -> None:
        try:
            self._result = generate(*self._call[0], **self._call[1])
        except BaseException as error:
            self._error = error

    def result(self) -> Generated:
        self.join(TIMEOUT_S)
        assert not self.is_alive(), "the request never ended"
        if self._error is not None:
            raise self._error
        return self._result
