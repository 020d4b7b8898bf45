"""The fault watch prints the record before it lets the kernel trap, and ends a process that the error does not reach."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time

from sgl_lowlatency import _C
from sgl_lowlatency.runtime.fault_watch import FaultWatch
from types import SimpleNamespace


def record(kind="edge_deadline"):
    return SimpleNamespace(
        kind=_C.abi.kFaultKinds[kind], rank=0, sm=17, block=17, layer=3, edge=2, expected=528, seen=527, waited_ns=2_500_000_000
    )


def test_the_record_is_printed_before_it_is_acknowledged(caplog):
    events, faults, overdue = [], [None, None, record()], threading.Event()
    handler = logging.Handler()
    handler.emit = lambda entry: events.append(entry.getMessage())
    logger = logging.getLogger("sgl_lowlatency.runtime.fault_watch")
    logger.addHandler(handler)
    try:
        watch = FaultWatch(
            lambda: faults.pop(0), lambda: events.append("acknowledged"), exit_grace_s=0.05, on_overdue=overdue.set
        )
        watch.start()
        assert overdue.wait(10.0)
    finally:
        logger.removeHandler(handler)
    assert events == [
        "decode_step stopped: rank 0, SM 17, block 17, layer 3 waited 2.50 s for edge 'out_proj': expected 528, seen 527 "
        "(1 signals missing). The server cannot go on and exits.",
        "acknowledged",
    ]


def test_without_a_fault_nothing_happens():
    polls, acknowledged = [], []
    FaultWatch(lambda: polls.append(1), lambda: acknowledged.append(1), on_overdue=lambda: acknowledged.append(2)).start()
    deadline_s = time.monotonic() + 10.0
    while len(polls) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(polls) >= 3 and not acknowledged


PARENT = """
import multiprocessing, signal, sys, time
def stuck():
    from sgl_lowlatency.runtime import fault_watch
    from tests_record import record
    fault_watch.EXIT_GRACE_S = 0.1
    fault_watch.FaultWatch(record, lambda: None, exit_grace_s=0.1).start()
    time.sleep(60)
if __name__ == "__main__":
    got = []
    signal.signal(signal.SIGQUIT, lambda *_: got.append(1))
    child = multiprocessing.get_context("spawn").Process(target=stuck)
    child.start()
    child.join(50)
    print("exit code", child.exitcode, "signalled", len(got))
"""


def test_a_stuck_process_is_ended_and_its_parent_told(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "tests_record.py").write_text(
        "from types import SimpleNamespace\nfrom sgl_lowlatency import _C\n"
        "def record():\n"
        "    return SimpleNamespace(kind=_C.abi.kFaultKinds['ring_full'], rank=0, sm=1, block=1, layer=0, edge=4, expected=0,\n"
        "                           seen=0, waited_ns=10**9)\n"
    )
    assert signal.getsignal(signal.SIGQUIT) is not None
    start_s = time.monotonic()
    result = subprocess.run([sys.executable, tmp_path / "parent.py"], capture_output=True, text=True, timeout=60)
    assert "exit code 1 signalled 1" in result.stdout, result.stdout + result.stderr
    assert "waited 1.00 s for weights to arrive in ring stage 4" in result.stderr
    assert time.monotonic() - start_s < 45.0
