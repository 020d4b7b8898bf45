"""Medians, ratios and their bootstrap interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

median = statistics.median


def spread(values: Sequence[float]) -> float:
    """(max - min) / median: the run-to-run spread of repeated timings."""
    return (max(values) - min(values)) / median(values)


def quantile(values: Sequence[float], q: float) -> float:
    """Linear-interpolated quantile, 0 <= q <= 1, of a non-empty sequence."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def ratio(off: Sequence[float], on: Sequence[float]) -> float:
    """median(off) / median(on): how many times faster `on` is."""
    return median(off) / median(on)


def ratio_ci95(off: Sequence[float], on: Sequence[float], *, draws: int = 4000, seed: int = 0) -> list[float]:
    """Bootstrap 95 % interval of `ratio`. With pairs measured in turn (equal lengths) whole pairs are resampled, which
    keeps a drift of the machine common to both arms out of the interval."""
    generator = random.Random(seed)
    paired = len(off) == len(on)
    found = []
    for _ in range(draws):
        picks = [generator.randrange(len(off)) for _ in off]
        other = picks if paired else [generator.randrange(len(on)) for _ in on]
        found.append(ratio([off[i] for i in picks], [on[i] for i in other]))
    return [quantile(found, 0.025), quantile(found, 0.975)]
