"""Measured read bandwidth of the card: the denominator of every floor.

    python3 -m sgl_lowlatency.bench.read_bandwidth [--gib 8]

Three ways, the best counts: a kernel of ours that only reads, torch's sum, and a copy (bytes read plus bytes written).
"""

from __future__ import annotations

import argparse

import torch

from sgl_lowlatency.bench import stats
from sgl_lowlatency.kernels.read_bytes import read_bytes



def _median_ms(run, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return stats.median(times[2:])


def _by_method(gib: float, repeats: int) -> dict[str, float]:
    elements = int(gib * 2**30) // 4096 * 1024
    source = torch.randint(-(2**31), 2**31 - 1, (elements,), dtype=torch.int32, device="cuda")
    half = source[: elements // 2]
    target = torch.empty_like(half)
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    methods = {
        "plain_read": lambda: read_bytes(source, out),
        "torch_sum": lambda: source.view(torch.float32).sum(),
        "torch_copy": lambda: target.copy_(half),
    }
    return {name: source.numel() * 4 / _median_ms(run, repeats) / 1e6 for name, run in methods.items()}


def measure(gib: float = 8.0, repeats: int = 7) -> dict[str, float]:
    """GB/s (10^9 bytes a second) by method, and the best of them under "read_gb_s"; of less than `gib` where less is free."""
    gib = min(gib, torch.cuda.mem_get_info()[0] / 2**30 / 2)  # the copy's target is half of the source
    found = _by_method(gib, repeats)
    torch.cuda.empty_cache()
    return found | {"read_gb_s": max(found.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0)
    args = parser.parse_args()
    for method, value in measure(args.gib).items():
        print(f"{method:12s} {value:8.0f} GB/s")


if __name__ == "__main__":
    main()
