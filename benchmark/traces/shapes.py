"""Shapes that requests are made in: the published one of agentic coding sessions with the parameters that reproduce it, and fixed lengths.

Targets are quantiles of public traces in the Weka format, root streams of eight turns or more, cut at a peak input: tokens a request, tokens
new since the request before, seconds a user or a tool thinks. The parameters of each were fitted once to 500 sessions drawn with them.
"""

from __future__ import annotations

import dataclasses

MIN_TURNS = 8
RARE_TOLERANCE = 0.40  # of reset_share: about a hundred events in 500 sessions, three standard deviations of which are 30 %


@dataclasses.dataclass(frozen=True)
class Shape:
    """peak: most input tokens of a request. targets: `statistics.measure`'s names with the published values.

    tolerance: how far 500 synthetic sessions may be off a target, as a share of it. The other fields are of log-normal draws: medians in
    turns, tokens or seconds, sigmas of the logarithm; `turns_exponent`: sessions of more turns add less a turn, by this power of their
    turns; `reset_share`: turns whose prefix is dropped. output: (share, tokens) points that an output's length runs through.
    """

    peak: int
    targets: dict[str, float]
    tolerance: float
    turns: tuple[float, float]
    first: tuple[float, float]
    new: tuple[float, float]
    turns_exponent: float
    reset_share: float
    output: tuple[tuple[float, float], ...]
    think: tuple[float, float] = (8.0, 2.318)


SHAPES = {
    "agentic-64k": Shape(
        peak=65536,
        targets={
            "turns_p50": 18, "turns_p90": 34, "first_input_p50": 17400, "input_p50": 34000, "input_p90": 56000,
            "output_p50": 226, "output_p90": 1049, "output_p99": 4133, "new_p50": 588, "new_p90": 4193, "new_p99": 21283,
            "think_p50": 8, "think_p90": 156, "prefix_reuse": 0.927, "reset_share": 0.010,
        },
        tolerance=0.15,
        turns=(16.256, 0.566), first=(20030, 0.296), new=(839.6, 1.772), turns_exponent=0.589, reset_share=0.006,
        output=((0.0, 8), (0.5, 226), (0.9, 1049), (0.99, 4133), (1.0, 8192)),
    ),
    "agentic-128k": Shape(
        peak=131072,
        targets={
            "turns_p50": 31, "turns_p90": 98, "first_input_p50": 19600, "input_p50": 64000, "input_p90": 107000,
            "output_p50": 206, "output_p90": 789, "output_p99": 3935, "new_p50": 617, "new_p90": 3550, "new_p99": 29933,
            "think_p50": 8, "think_p90": 206, "prefix_reuse": 0.959, "reset_share": 0.011,
        },
        tolerance=0.30,
        turns=(29.414, 0.917), first=(23516, 0.478), new=(875.5, 1.515), turns_exponent=0.392, reset_share=0.006,
        output=((0.0, 8), (0.5, 206), (0.9, 789), (0.99, 3935), (1.0, 8192)), think=(8.0, 2.535),
    ),
}


@dataclasses.dataclass(frozen=True)
class FixedLength:
    """Sessions of one request each that share nothing, as random-input benchmarks send them. input_tokens, output_tokens: its lengths."""

    input_tokens: int
    output_tokens: int


FIXED_LENGTHS = {"random-8k-1k": FixedLength(8192, 1024)}
EVERY = {**SHAPES, **FIXED_LENGTHS}
