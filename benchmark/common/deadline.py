"""Nothing here outlives its deadline: process groups of children, and a watchdog for this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

START = time.monotonic()
_groups: set[int] = set()
_lock = threading.Lock()


def say(*words: object) -> None:
    """Print with the seconds since start, flushed."""
    print(f"[{time.monotonic() - START:6.1f}s]", *words, flush=True)


def spawn(command: list[str], **popen) -> subprocess.Popen:
    """Start a child in its own session, remembered so that `kill_all` reaches it and its children."""
    process = subprocess.Popen(command, start_new_session=True, **popen)
    with _lock:
        _groups.add(process.pid)
    return process


def group_alive(pid: int) -> bool:
    """Whether any process of the group led by `pid` still runs (zombies of ours are not counted once reaped)."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def stop(process: subprocess.Popen, *, grace_s: float) -> int:
    """SIGTERM to the leader, SIGKILL to what is left of its group after `grace_s`; returns the leader's exit status."""
    process.terminate()
    _wait_gone(process, grace_s)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left
    _wait_gone(process, 10)
    with _lock:
        _groups.discard(process.pid)
    return process.wait(timeout=1)


def _wait_gone(process: subprocess.Popen, limit_s: float) -> None:
    """Wait until the leader is reaped and its group empty, at most `limit_s`."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit and (process.poll() is None or group_alive(process.pid)):
        time.sleep(0.05)


def kill_all() -> None:
    """SIGKILL every group that `spawn` started and `stop` has not ended."""
    with _lock:
        pids = sorted(_groups)
        _groups.clear()
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def watchdog(seconds: float, at_deadline: Callable[[], None] | None = None) -> None:
    """After `seconds`: run `at_deadline`, kill every spawned group and leave with status 124."""

    def wait() -> None:
        time.sleep(max(seconds - (time.monotonic() - START), 0))
        say(f"deadline of {seconds:.0f} s reached: stopping")
        try:
            if at_deadline is not None:
                at_deadline()
        finally:
            kill_all()
            sys.stdout.flush()
            os._exit(124)

    threading.Thread(target=wait, name="watchdog", daemon=True).start()


def remaining(seconds: float) -> float:
    """Seconds left of a deadline counted from the start of this process."""
    return seconds - (time.monotonic() - START)
