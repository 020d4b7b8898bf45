"""An HTTP server that answers like SGLang's, for tests of what talks to one."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

INFO = {"model_path": "m", "version": "0.5.23", "context_length": 2048, "enable_nvidia_megakernel": False, "port": 1, "startup_time": 0.1}
OURS = 'sgl_lowlatency:decode_steps_total{mode="decode",rows="1"} 7.0\n'


class Stub(ThreadingHTTPServer):
    """info: of /server_info. metrics: of /metrics, None for 404. generate: (request) -> events of a stream. asked: bodies of /generate so
    far, `warmed` those that asked for no stream."""

    def __init__(self, info: dict, metrics: str | None, generate=None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.info, self.metrics, self.generate, self.asked, self.warmed, self.lock = info, metrics, generate, [], [], threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        text = {"/server_info": json.dumps(self.server.info), "/metrics": self.server.metrics}.get(self.path)
        self._answer(404 if text is None else 200, text or "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            return self._answer(200, "")
        if not body["stream"]:
            self.server.warmed.append(body)
            ids = [7] * body["sampling_params"]["max_new_tokens"]
            return self._answer(200, json.dumps([{"output_ids": ids, "meta_info": {}} for _ in body["input_ids"]]))
        with self.server.lock:
            self.server.asked.append(body)
        events = self.server.generate(body)
        self._answer(200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_words: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def stub(info: dict | None = None, metrics: str | None = "", generate=None) -> Iterator[Stub]:
    """A running server of INFO with `info` over it."""
    with Stub(INFO | (info or {}), metrics, generate) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def tokens(body, one_short=False):
    """As many events as tokens asked for, one token each."""
    asked = body["sampling_params"]["max_new_tokens"]
    number = asked - one_short
    return [
        {"output_ids": [7], "meta_info": {"completion_tokens": n + 1, "cached_tokens": 3, "finish_reason": {"type": "length"}}} for n in range(number)
    ]
