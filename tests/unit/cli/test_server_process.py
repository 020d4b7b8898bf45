"""Servers come up, are watched, and are gone afterwards with everything they started. The server here is a small script."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from sgl_lowlatency.cli.server_process import ServerFailed, ServerProcess, running
from sgl_lowlatency.cli.server_setup import free_port

SERVER = """
import http.server, os, signal, subprocess, sys, time
mode, pid_file = sys.argv[1], sys.argv[2]
port = int(sys.argv[sys.argv.index("--port") + 1])
if mode == "dies":
    sys.exit("[2026] the weights are missing")
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
open(pid_file, "w").write(f"{os.getpid()} {worker.pid}")
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if mode != "never ready" and self.path == "/health" else 503)
        self.end_headers()
    def log_message(self, *_):
        pass
print("[2026] listening", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def start(tmp_path):
    started = []
    (tmp_path / "server.py").write_text(SERVER)

    def make(mode):
        arguments = [str(tmp_path / "server.py"), mode, str(tmp_path / "pids")]
        started.append(ServerProcess([], free_port(), tmp_path / "log", {}, launcher=arguments))
        return started[-1]

    yield make
    for server in started:
        server.kill()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pids, within_s=10.0):
    deadline_s = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not any(map(alive, pids))


def pids_in(path):
    return [int(word) for word in path.read_text().split()]


def test_a_server_comes_up_and_stops_with_its_workers(start, tmp_path):
    with running(start("good")) as server:
        assert 0 <= server.wait_ready(30.0, progress=print) < 30
        server.require_alive()
        pids = pids_in(tmp_path / "pids")
        assert all(map(alive, pids)) and len(pids) == 2
    assert wait_gone(pids)


def test_an_exception_in_the_block_kills_at_once(start, tmp_path):
    with pytest.raises(KeyboardInterrupt), running(start("stubborn")) as server:
        server.wait_ready(30.0, progress=print)
        pids = pids_in(tmp_path / "pids")
        interrupted_s = time.monotonic()
        raise KeyboardInterrupt
    assert wait_gone(pids) and time.monotonic() - interrupted_s < 5.0


def test_a_server_that_ignores_sigterm_is_killed(start, tmp_path, monkeypatch):
    monkeypatch.setattr("sgl_lowlatency.cli.server_process.GRACEFUL_EXIT_S", 0.3)
    server = start("stubborn")
    server.wait_ready(30.0, progress=print)
    pids = pids_in(tmp_path / "pids")
    assert server.stop() == -signal.SIGKILL and wait_gone(pids)
    assert server.stop() == -signal.SIGKILL, "stopping twice is safe"


def test_a_server_that_dies_is_reported_with_its_last_lines(start):
    with pytest.raises(ServerFailed, match=r"exited with code 1 before it was ready\n(.|\n)*the weights are missing"):
        start("dies").wait_ready(30.0, progress=print)


def test_a_server_that_is_never_ready_is_given_up(start):
    server = start("never ready")
    with pytest.raises(ServerFailed, match=r"was not ready within 1 s\n(.|\n)*listening"):
        server.wait_ready(1.0, progress=print)


def test_nothing_outlives_a_parent_that_is_killed(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    parent = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from sgl_lowlatency.cli.server_process import ServerProcess
        from sgl_lowlatency.cli.server_setup import free_port
        server = ServerProcess([], free_port(), Path({str(tmp_path / "log")!r}), {{}},
                               launcher=[{str(tmp_path / "server.py")!r}, "good", {str(tmp_path / "pids")!r}])
        server.wait_ready(30.0, progress=print)
        print("ready", flush=True)
        time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        pids = pids_in(tmp_path / "pids")
        assert all(map(alive, pids)) and len(pids) == 2
    finally:
        process.kill()
        process.communicate()
    assert wait_gone(pids)
