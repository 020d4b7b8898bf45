"""Why all ranks that share a model run SGLang's forward of a step, where one of them has to: a rank that launched alone would wait for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class AgreedFallback:
    """What ranks find in their own models, told to each other once a number of rows. exchange: sends JSON values to all ranks and returns theirs, in
    rank order; all of them call it together, as they come to the first step of as many rows. None: there is one rank. kernel: whose steps, in messages."""

    def __init__(self, exchange: Callable[[Mapping[str, Any]], list[dict]] | None, kernel: str = "decode_step"):
        self._exchange, self._kernel = exchange, kernel
        self._agreed: dict[int, str | None] = {}

    def reason(self, rows: int, own: str | None) -> str | None:
        """Why nobody runs steps of `rows` rows: the first rank's reason that has any, for good; None: everybody does. own: this rank's.

        Raises RuntimeError where this rank has a reason after all agreed to run them, and what exchange raises, which names a rank that does not come."""
        if self._exchange is None:
            return own
        if rows not in self._agreed:
            reasons = [one["fallback"] for one in self._exchange({"fallback": own})]
            self._agreed[rows] = next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)
        agreed = self._agreed[rows]
        if agreed is None and own is not None:
            raise RuntimeError(f"{self._kernel}: {own} on this rank, after all ranks agreed to run steps of {rows} rows: the others would wait for it")
        return agreed
