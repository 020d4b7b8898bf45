"""The client puts streamed pieces, token ids and metrics together. The server here replays recorded answers."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from sgl_lowlatency.cli import openai_client

METRICS = """# HELP sgl_lowlatency:decode_steps_total Decode steps run by decode_step.
sgl_lowlatency:decode_steps_total{mode="decode",rows="1"} 7.0
sgl_lowlatency:fallback_steps_total{reason="24 rows, built for 1 to 16"} 2.0
sglang:num_running_reqs{model="x"} 1.0
"""


def completion_events():
    yield {"choices": [{"text": "once", "prompt_token_ids": [5, 6], "token_ids": [9]}]}
    yield {"choices": [{"text": " again", "token_ids": [10, 11]}]}
    yield {"choices": [{"text": "", "finish_reason": "length"}]}


def chat_events():
    yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    yield {"choices": [{"delta": {"content": "wa"}}]}
    yield {"choices": [{"delta": {"content": "ter"}}]}
    yield {"choices": [{"delta": {}, "finish_reason": "length"}]}


class Replay(http.server.BaseHTTPRequestHandler):
    requests: list = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Replay.requests.append((self.path, body))
        self.send_response(200)
        self.end_headers()
        if not body.get("stream"):
            answer = {"choices": [{"prompt_token_ids": [1, 2], "response_token_ids": [3, 4]}]}
            self.wfile.write(json.dumps(answer).encode())
            return
        events = chat_events() if self.path.endswith("chat/completions") else completion_events()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    Replay.requests = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Replay)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_completion(url):
    pieces = []
    answer = openai_client.complete(url, "a prompt", 3, pieces.append)
    assert answer == openai_client.Answer("once again", [5, 6], [9, 10, 11])
    assert pieces == ["once", " again", ""]
    path, body = Replay.requests[0]
    assert path == "/v1/completions" and body["stream"] and body["temperature"] == 0 and body["max_tokens"] == 3


def test_a_chat_is_streamed_and_then_asked_for_its_ids(url):
    pieces = []
    assert openai_client.chat(url, "hello", 2, pieces.append) == openai_client.Answer("water", [1, 2], [3, 4])
    assert "".join(pieces) == "water"
    streamed, whole = (body for _path, body in Replay.requests)
    assert streamed["messages"] == whole["messages"] == [{"role": "user", "content": "hello"}]
    assert streamed["stream"] and "stream" not in whole


def test_metrics_of_one_prefix(url):
    assert openai_client.metrics(url, "sgl_lowlatency:") == {
        'sgl_lowlatency:decode_steps_total{mode="decode",rows="1"}': 7.0,
        'sgl_lowlatency:fallback_steps_total{reason="24 rows, built for 1 to 16"}': 2.0,
    }
