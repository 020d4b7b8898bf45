"""The comparison of starts without SGLang: children of a few lines in its place, and what is made of their times."""

import sys
import time
from types import SimpleNamespace

import pytest

from benchmark.common import deadline
from benchmark.common.parts import Parts
from benchmark.serve import server, start_ab, startup
from sgl_lowlatency.bench.results import Results

CHILD = """
import http.server, sys, time
print("[x] Load weight end. elapsed=0.3 s, mem usage=15.00 GB.", flush=True)
if "--enable-nvidia-megakernel" in sys.argv:
    print("[x] NVIDIA megakernel: active (decode_step; 15.0 MiB beside the model; built in 0.4 s, 1 MiB)", flush=True)
    print("[x] decode_step self-check: 1 rows, lengths [1], 0.20 s: passed (kv 0)", flush=True)
    time.sleep(0.8)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def args(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["start_ab", "--out", str(tmp_path), "--repeats", "2", "--start-limit", "60"])
    monkeypatch.setattr(server, "launch_command", lambda model, port, arguments: [sys.executable, "-c", CHILD, str(port), *arguments])
    monkeypatch.setattr(startup, "cached_kernels", lambda: 7)
    yield start_ab.parse()
    deadline.kill_all()


@pytest.fixture
def results(args):
    return Results(args.out, what="check", name="run", weights="random", command=["x"], commit="abc")


def test_servers_start_alone_and_in_turn_after_a_warm_up(args, results, tmp_path, monkeypatch):
    names, make = [], start_ab.started
    monkeypatch.setattr(start_ab, "started", lambda arm, name, *more: names.append(name) or make(arm, name, *more))
    start_ab.run(tmp_path, args, results, Parts())
    assert names == ["off-warm-up", "on-warm-up", "off-0", "on-0", "on-1", "off-1"]
    start, rows = results.content["start"], results.content["rows"]
    assert start["off_s"] == [rows[0]["ready_s"], rows[3]["ready_s"]] and start["on_s"] == [rows[1]["ready_s"], rows[2]["ready_s"]]
    assert 0.3 < start["added_s"] < 5 and start["cold"] is False, "the child sleeps 0.8 s where it has the flag"
    assert (start["plugin_mib"], start["weights_gib"], start["plugin_memory_share"]) == (15.0, 15.0, pytest.approx(1 / 1024, abs=1e-5))
    assert rows[1]["self_check_s"] == 0.2 and "self_check_s" not in rows[0]
    assert start_ab.problems_of(start, args) == []
    assert "the plugin adds +" in start_ab.table(results) and "0.10% of 15.0 GiB" in start_ab.table(results)


def test_a_server_is_gone_when_the_next_one_starts(args, tmp_path):
    row = start_ab.one_start("on", 0, tmp_path, args)
    assert row["exit_code"] == -15
    begin = time.monotonic()
    assert start_ab.one_start("off", 0, tmp_path, args)["ready_s"] < time.monotonic() - begin + 0.1


def rows(off, on, compiled=0):
    made = [{"arm": "off", "ready_s": s, "weights_gib": 15.0, "compiled_kernels": 0} for s in off]
    return made + [{"arm": "on", "ready_s": s, "plugin_mib": 15.0, "compiled_kernels": compiled} for s in on]


ARGS = SimpleNamespace(repeats=3, limit_s=5.0)


def test_the_difference_is_that_of_the_medians():
    start = start_ab.summary(rows([20.0, 21.0, 29.0], [25.5, 22.0, 24.0]))
    assert start["added_s"] == 3.0 and start_ab.problems_of(start, ARGS) == []
    slow = start_ab.summary(rows([20.0, 21.0, 29.0], [26.5, 26.1, 20.0]))
    assert start_ab.problems_of(slow, ARGS) == ["the plugin adds 5.1 s to a start, 5 s are allowed"]


def test_no_difference_is_taken_where_kernels_were_compiled():
    start = start_ab.summary(rows([20.0] * 3, [24.0] * 3, compiled=2))
    assert "added_s" not in start
    assert start_ab.problems_of(start, ARGS) == ["6 kernels compiled after the warm-up: no difference taken"]


def test_a_run_cut_short_says_so():
    problems = start_ab.problems_of(start_ab.summary(rows([20.0], [])), ARGS)
    assert problems[:2] == ["arm off started 1 of 3 times", "arm on started 0 of 3 times"]
    assert problems[2] == "the logs do not tell the plugin's memory and the model's"
