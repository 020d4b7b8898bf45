"""A Triton kernel that reads and does next to nothing else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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


def read_xor(source: torch.Tensor, programs: int, block: int) -> torch.Tensor:
    """XOR of all elements of `source` [n] int32, n a multiple of `block`, as `programs` partial results [programs] int32."""
    if source.numel() % block:
        raise ValueError(f"{source.numel()} elements are not a multiple of {block}")
    out = torch.empty(programs, dtype=torch.int32, device=source.device)
    _read_kernel[(programs,)](source, out, source.numel() // block, BLOCK=block, num_warps=8)
    return out
