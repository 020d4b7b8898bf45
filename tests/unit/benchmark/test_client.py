"""The HTTP client against a small server that answers as SGLang's native API does."""

import http.server
import json
import threading

import pytest

from benchmark.serve.client import Client, greedy


class Handler(http.server.BaseHTTPRequestHandler):
    seen: list = []
    flush_status = 200

    def log_message(self, *_args):
        """Keep the test's output clean."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.seen.append((self.path, body))
        if self.path == "/abort_request":
            self.answer(200, b"")
        elif self.path == "/flush_cache?timeout=30":
            self.answer(Handler.flush_status, b"Cache flushed.")
        elif body.get("stream"):
            self.stream(body)
        elif body["input_ids"] == [[13]]:
            self.answer(400, b'{"error": "unlucky"}')
        else:
            self.answer(200, json.dumps([self.item(n=2) for _ in body["input_ids"]]).encode())

    def item(self, n):
        meta = {"finish_reason": {"type": "length"}, "cached_tokens": 3, "completion_tokens": n, "spec_verify_ct": 7}
        meta |= {"output_token_logprobs": [[-0.5, 40 + i, None] for i in range(n)]}
        meta |= {"output_top_logprobs": [[[-0.5, 40 + i, None], [-1.5, 9, None]] for i in range(n)]}
        return {"output_ids": [40 + i for i in range(n)], "meta_info": meta}

    def stream(self, body):
        self.send_response(200)
        self.end_headers()
        for n in range(1, 5):
            item = self.item(n)
            if body["rid"] == "incremental":
                item["output_ids"] = item["output_ids"][-1:]
            self.wfile.write(b"data: " + json.dumps(item).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, status, payload):
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


@pytest.fixture
def client():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Client(server.server_address[1], timeout_s=10)
    server.shutdown()
    server.server_close()


def test_a_batch_comes_back_with_its_logprobs(client):
    replies = client.generate([[1, 2], [3]], greedy(2), top=2)
    assert [r.ids for r in replies] == [[40, 41], [40, 41]]
    assert replies[0].top == [[(-0.5, 40), (-1.5, 9)], [(-0.5, 41), (-1.5, 9)]]
    assert (replies[0].finish, replies[0].cached, replies[0].verify_steps) == ("length", 3, 7)
    path, body = Handler.seen[-1]
    assert path == "/generate"
    assert body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}


def test_a_refused_request_raises_with_the_servers_words(client):
    with pytest.raises(RuntimeError, match="400 .*unlucky"):
        client.generate([[13]], greedy(1))


def test_timing_a_short_answer_is_an_error(client):
    seconds, (reply,) = client.timed_replies([[1]], 2)
    assert client.timed([[1]], 2) > 0 and seconds > 0 and reply.ids == [40, 41]
    with pytest.raises(RuntimeError, match="asked for 3 tokens each"):
        client.timed([[1]], 3)


@pytest.mark.parametrize("rid", ["cumulative", "incremental"])
def test_a_stream_is_put_together_whichever_way_it_is_cut(client, rid):
    counts = []
    reply = client.stream([1], greedy(4), rid=rid, on_token=lambda n: counts.append(n) or True)
    assert reply.ids == [40, 41, 42, 43]
    assert counts == [1, 2, 3, 4]


def test_a_stream_can_be_dropped(client):
    reply = client.stream([1], greedy(4), rid="x", on_token=lambda n: n < 2)
    assert reply.ids == [40, 41]


def test_a_flush_that_the_server_refuses_is_an_error(client, monkeypatch):
    client.flush()
    assert Handler.seen[-1] == ("/flush_cache?timeout=30", {})
    monkeypatch.setattr(Handler, "flush_status", 400)
    with pytest.raises(RuntimeError, match="flush_cache"):
        client.flush()
