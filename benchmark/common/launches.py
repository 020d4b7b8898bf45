"""What benches of kernels with points of time ask of launches: the times, and whether replays leave what the checked launch has left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def point_times(trace: torch.Tensor, names: tuple[str, ...]) -> dict[str, list[float]]:
    """[median, largest] over the blocks of a trace [grid, points] of ns, in us from the smallest begin."""
    since = (trace - trace[:, 0].min()).double() / 1e3
    return {name: [round(float(since[:, i].median()), 2), round(float(since[:, i].max()), 2)] for i, name in enumerate(names)}


def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Every byte becomes 255: NaN of floats."""
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(255)


def replay_problems(replay: Callable[[], None], results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> list[str]:
    """Of one replay into poisoned results. wanted: what a launch that was checked has left in them, poisoned as they were. A NaN is unlike itself."""
    poison(results)
    replay()
    return [] if all(map(torch.equal, results, wanted)) else ["a replay leaves something else than the first launch"]
