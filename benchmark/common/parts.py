"""How long the parts of a run take: on a GPU that is lent by the minute, the parts that measure nothing are what to shorten."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Parts:
    """Seconds by part, in the order in which parts began. A part that runs twice adds up; one that fails counts too."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        self._seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - begin

    def seconds(self) -> dict[str, float]:
        """JSON field `seconds` of a results file."""
        return {name: round(value, 1) for name, value in self._seconds.items()}

    def __str__(self) -> str:
        return "seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in self._seconds.items())
