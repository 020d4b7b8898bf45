"""Progress lines for work that turns out to be slow."""

from __future__ import annotations

import logging
import time

LOG_AFTER_S = 2.0


class Progress:
    """Logs the phase in hand, at most one line every LOG_AFTER_S seconds and none for work that ends before that."""

    def __init__(self, what: str, logger: logging.Logger):
        self._what, self._logger = what, logger
        self._start_s = self._logged_s = time.monotonic()

    def step(self, phase: str) -> None:
        """Marks the start of `phase`, in words that complete "building …: "."""
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_AFTER_S:
            self._logged_s = now_s
            self._logger.info("%s: %s (%.1f s so far)", self._what, phase, now_s - self._start_s)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s
