"""The fault watch prints the record before it lets the kernel trap, and ends a process that the error does not reach."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from sgl_lowlatency import _C
from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.fault import EDGE_CONTENT, describe_fault
from sgl_lowlatency.runtime.fault_watch import FaultWatch


def record(kind="edge_deadline", **fields):
    """Of block 17, which waits for word 1234 of layer 3's residual stream after attention."""
    fault = dict(rank=0, sm=17, block=17, layer=3, edge=abi.EDGE_NAMES.index("out_proj"), expected=1234, seen=abi.UNWRITTEN, waited_ns=2_500_000_000)
    return SimpleNamespace(kind=_C.abi.kFaultKinds[kind], **(fault | fields))


@pytest.mark.parametrize(("edge", "layer", "content"), [
    ("qkv", 0, "q, k and v"), ("partial", 1, "attention of one split of a row"), ("attention", 2, "attention output"),
    ("out_proj", 3, "residual stream after attention"), ("gate_up", 35, "SwiGLU activations"), ("down", 7, "residual stream after the MLP"),
    ("down", -1, "embedding"),
])
def test_a_missed_hand_over_is_named(edge, layer, content):
    assert describe_fault(record(edge=abi.EDGE_NAMES.index(edge), layer=layer)) == (
        f"decode_step stopped: rank 0, SM 17, block 17 waited 2.50 s for word 1234 of edge '{edge}' of layer {layer} ({content}), "
        "which no block has written"
    )


def test_every_edge_has_words():
    assert set(EDGE_CONTENT) == set(abi.EDGE_NAMES)


@pytest.mark.parametrize(("kind", "message"), [
    ("ring_full", "decode_step stopped: rank 0, SM 17, block 17, layer 3 waited 2.50 s for weights to arrive in ring stage 2"),
    ("ring_empty", "decode_step stopped: rank 0, SM 17, block 17, layer 3 waited 2.50 s for the consumers to free ring stage 2"),
])
def test_a_stalled_ring_is_named(kind, message):
    assert describe_fault(record(kind, edge=2)) == message


def test_a_warp_that_does_not_deliver_is_named_by_its_operation():
    message = "decode_step stopped: rank 0, SM 17, block 17, layer 3 waited 2.50 s for its warps to finish a tile of gate_up"
    assert describe_fault(record("partial", edge=2)) == message


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
        "decode_step stopped: rank 0, SM 17, block 17 waited 2.50 s for word 1234 of edge 'out_proj' of layer 3 (residual stream "
        "after attention), which no block has written. The server cannot go on and exits.",
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
