"""A replay within a time: what would not end in it is not begun."""

from __future__ import annotations

from benchmark.common import deadline

RESERVE_S = 30.0  # to stop two servers and to write the report
MARGIN = 1.15  # a pair may take so much longer than the one before it


class Budget:
    """limit_s: seconds since this process began, None for no limit."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._seen: dict[tuple[str, int], float] = {}

    def fits(self, work: str, concurrency: int) -> bool:
        """Whether another pair of this work and concurrency would end in time: one like it before, or the longest of the work, tells."""
        if self._limit_s is None:
            return True
        longest = max((seconds for (name, _), seconds in self._seen.items() if name == work), default=0.0)
        return MARGIN * self._seen.get((work, concurrency), longest) + RESERVE_S <= deadline.remaining(self._limit_s)

    def took(self, work: str, concurrency: int, seconds: float) -> None:
        """A pair ended after so many seconds."""
        self._seen[work, concurrency] = seconds
