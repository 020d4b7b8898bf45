"""Servers as children, with a few lines of Python in SGLang's place: when they count as ready, and what is said of those that are not."""

import sys

import pytest

from benchmark.common import deadline
from benchmark.serve import server

READY = """
import http.server, sys, time
print("[2026-11-29 22:38:31] loading", flush=True)
print("Capturing batches: 10%", flush=True)
time.sleep(float(sys.argv[2]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(name, delay_s): a server that answers after a delay; "dies" exits at once."""
    monkeypatch.setattr(server, "launch_command", lambda model, port, arguments: [sys.executable, "-c", arguments[0], str(port), arguments[1]])
    started = []

    def make(name, delay_s, code=READY):
        started.append(server.Server(name, tmp_path, [code, str(delay_s)], work=tmp_path))
        return started[-1]

    yield make
    for one in started:
        deadline.stop(one.process, grace_s=0.1)


def test_each_servers_own_start_is_timed(start):
    slow, fast = start("off", 3.0), start("on", 0.0)
    server.wait_ready((slow, fast), 60)
    assert slow.ready_s > 3.0 and fast.ready_s < slow.ready_s - 1.0, "the one that is asked second was ready first"
    assert slow.last_words() == "[2026-11-29 22:38:31] loading"
    assert server.stop_pair((slow, fast)) == {"off": -15, "on": -15}


def test_a_server_that_is_late_or_dead_is_an_error_with_its_log(start):
    with pytest.raises(RuntimeError, match=r"late is not ready after 2 s:\n.*loading"):
        server.wait_ready((start("fast", 0.0), start("late", 600)), 2)
    with pytest.raises(RuntimeError, match=r"dead exited with 3:\nlast words"):
        start("dead", 0, code="print('last words', flush=True); raise SystemExit(3)").wait_ready(60)


def test_a_log_without_a_line_of_sglangs(start):
    one = start("quiet", 600, code="import time; time.sleep(600)")
    assert one.last_words() == "no log line yet"
