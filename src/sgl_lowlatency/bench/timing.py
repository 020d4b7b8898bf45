"""Times of CUDA graphs, replayed back to back between two events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches on the current stream. `run` must have run once before, so that nothing is set up in it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def group_ms(replay: Callable[[], None], count: int) -> float:
    """ms per replay of `count` replays in a row."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def in_turn(replays: Sequence[Callable[[], None]], *, groups: int, target_ms: float) -> list[list[float]]:
    """ms per replay of each, `groups` groups of back-to-back replays of about `target_ms`; group i of all before group i + 1 of any."""
    counts = []
    for replay in replays:
        group_ms(replay, 2)
        counts.append(max(int(target_ms / group_ms(replay, 3)), 3))
    found: list[list[float]] = [[] for _ in replays]
    for _ in range(groups):
        for times, replay, count in zip(found, replays, counts, strict=True):
            times.append(group_ms(replay, count))
    return found
