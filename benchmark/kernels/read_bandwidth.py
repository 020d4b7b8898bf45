"""Measured read bandwidth of the card: the denominator of every floor.

    python3 -m benchmark.kernels.read_bandwidth [--gib 8]

Three ways, the best counts: a Triton kernel that only reads, torch's sum, and a copy (bytes read plus bytes written).
"""

from __future__ import annotations

import argparse

import torch
import triton
import triton.language as tl

from benchmark.common import stats

BLOCK = 4096  # int32 elements of one load of a program: 16 KiB


@triton.jit
def _read_kernel(source, out, num_blocks, BLOCK: tl.constexpr):
    """Program p XORs blocks p, p + programs, ... of `source` into out[p]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.zeros([BLOCK], dtype=tl.int32)
    for _ in range(program, num_blocks, programs):
        seen ^= tl.load(source + at, eviction_policy="evict_first")
        at += programs.to(tl.int64) * BLOCK
    total = tl.xor_sum(seen, axis=0)
    tl.store(out + program, total)


def read_xor(source: torch.Tensor, programs: int) -> torch.Tensor:
    """XOR of all elements of `source` [n] int32, n a multiple of BLOCK, as `programs` partial results [programs] int32."""
    if source.numel() % BLOCK:
        raise ValueError(f"{source.numel()} elements are not a multiple of {BLOCK}")
    out = torch.empty(programs, dtype=torch.int32, device=source.device)
    _read_kernel[(programs,)](source, out, source.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)
    return out


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
    elements = int(gib * 2**30) // 4 // BLOCK * BLOCK
    source = torch.randint(-(2**31), 2**31 - 1, (elements,), dtype=torch.int32, device="cuda")
    half = source[: elements // 2]
    target = torch.empty_like(half)
    programs = torch.cuda.get_device_properties(source.device).multi_processor_count * 8
    num_bytes = source.numel() * 4
    return {
        "triton_read": num_bytes / _median_ms(lambda: read_xor(source, programs), repeats) / 1e6,
        "torch_sum": num_bytes / _median_ms(lambda: source.view(torch.float32).sum(), repeats) / 1e6,
        "torch_copy": num_bytes / _median_ms(lambda: target.copy_(half), repeats) / 1e6,
    }


def measure(gib: float = 8.0, repeats: int = 7) -> dict[str, float]:
    """GB/s (10^9 bytes a second) by method, and the best of them under "read_gb_s"."""
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
