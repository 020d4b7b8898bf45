"""`benchmark.replay --smoke`, the whole chain: two real servers, requests in turn, equal work, a report; and nothing left after Ctrl-C."""

import json
import os
import signal
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

for name in ("scipy", "matplotlib", "jinja2"):
    pytest.importorskip(name)

ROOT = Path(__file__).parents[2]
LIMIT_S = 600


def command(out, *more):
    words = ["--out", str(out), "--smoke", "--sessions", "1", "--scale", "0.01", "--concurrency", "1", "--repeats", "1", *more]
    return [sys.executable, "-m", "benchmark.replay", *words]


@pytest.fixture
def scratch(monkeypatch):
    """The temporary folder of what the test starts; short, since sockets are made in it."""
    folder = tempfile.mkdtemp(prefix="replay-")
    monkeypatch.setenv("TMPDIR", folder)
    yield Path(folder)
    shutil.rmtree(folder)


def words(process):
    """The command of a process, nothing of one that has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_a_replay_ends_with_its_report(tmp_path, scratch):
    done = subprocess.run(command(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list(scratch.iterdir()) == []
    content = json.loads((tmp_path / "report.json").read_text())
    one = content["concurrencies"]["1"]
    assert one["problems"] == [] and one["work"]["requests"] == content["plan"]["requests"] > 0
    assert one["coverage"]["rows"] == one["coverage"]["decode_tokens"] > 0  # one session at once: every step has one row
    assert set(one["coverage"]["fallbacks"]) == {"prefill"}
    assert one["runs"]["off"][0]["cache_hit"] == one["runs"]["on"][0]["cache_hit"] > 0.5
    assert one["compared"]["itl_p50"]["verdict"] == "not decidable"  # one repeat decides nothing
    assert any("self-check" in line for line in content["servers"]["startup"])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_a_replay_that_is_ended(tmp_path, scratch, signum):
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command(tmp_path / "out"), cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    children, limit = [], time.monotonic() + LIMIT_S
    while len(children) < 2:  # both launchers, still loading
        assert process.poll() is None and time.monotonic() < limit, (tmp_path / "log").read_text()
        children = [child for child in psutil.Process(process.pid).children() if "sglang.launch_server" in words(child)]
        time.sleep(0.1)
    os.kill(process.pid, signum)
    assert process.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 130, signal.SIGKILL: -signal.SIGKILL}[signum]
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    assert signum == signal.SIGKILL or list(scratch.iterdir()) == []
