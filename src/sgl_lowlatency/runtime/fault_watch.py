"""Prints a kernel's fault record while the context is still alive, and sees to it that the process ends.

A kernel that gave up on a wait writes one record to host-visible memory, waits a moment for it to be read, and traps. From
then on every CUDA call of the process fails: SGLang's scheduler raises and takes the server down. If it is stuck somewhere
that no error reaches, this thread does it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from sgl_lowlatency.kernels.fault import describe_fault

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05  # a tenth of the time a kernel keeps its record up before it traps
EXIT_GRACE_S = 20.0


def end_server() -> None:
    """Ends this process and tells its parent as SGLang's scheduler does when it dies. Does not return."""
    logger.critical("sgl-lowlatency: the process outlived the fault by %.0f s; ending it", EXIT_GRACE_S)
    os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(1)


class FaultWatch:
    """Polls `fault` (the record, or None) on a daemon thread; prints it once, as `describe` words it, then calls `acknowledge`."""

    def __init__(
        self,
        fault: Callable[[], Any],
        acknowledge: Callable[[], None],
        *,
        describe: Callable[[Any], str] = describe_fault,
        exit_grace_s: float = EXIT_GRACE_S,
        on_overdue: Callable[[], None] = end_server,
    ):
        self._fault, self._acknowledge, self._describe = fault, acknowledge, describe
        self._exit_grace_s, self._on_overdue = exit_grace_s, on_overdue
        self._thread = threading.Thread(target=self._run, name="sgl-lowlatency-fault-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while (record := self._fault()) is None:
            time.sleep(POLL_INTERVAL_S)
        logger.critical("%s. The server cannot go on and exits.", self._describe(record))
        self._acknowledge()
        time.sleep(self._exit_grace_s)
        self._on_overdue()
