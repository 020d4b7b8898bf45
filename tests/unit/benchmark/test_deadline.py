import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmark.common import deadline

ROOT = Path(__file__).resolve().parents[3]
# a child that ignores SIGTERM and has a child of its own
STUBBORN = (
    "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('up', flush=True); import time; time.sleep(60)"
)


def test_stop_ends_a_group_that_ignores_sigterm():
    child = deadline.spawn([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "up\n"
    begin = time.monotonic()
    status = deadline.stop(child, grace_s=0.5)
    assert status == -signal.SIGKILL
    assert time.monotonic() - begin < 8
    assert not deadline.group_alive(child.pid)


def test_the_watchdog_kills_children_and_leaves_with_124():
    code = f"""
import subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from benchmark.common import deadline
child = deadline.spawn([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
deadline.watchdog(0.5, lambda: print("partial table"))
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    pid = int(done.stdout.splitlines()[0])
    assert done.returncode == 124
    assert "partial table" in done.stdout
    limit = time.monotonic() + 5
    while deadline.group_alive(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not deadline.group_alive(pid)
