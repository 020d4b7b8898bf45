"""Two kernels in Triton, whose AMD backend compiles without a GPU: layouts of the MFMA and of LDS that nobody here chose."""

from __future__ import annotations

from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def softmax_rows(x, y, n, BLOCK: tl.constexpr):
    """y [rows, n] f32 = softmax of x [rows, n] bf16; a program a row."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * n + column, mask=column < n, other=-float("inf")).to(tl.float32)
    power = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * n + column, power / tl.sum(power, 0), mask=column < n)


@triton.jit
def matmul(a, b, c, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c [M, programs * N] f32 = a [M, depth] b [depth, programs * N], bf16."""
    row, column, k = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K)
    width = tl.num_programs(0) * N
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, depth, K):
        left = tl.load(a + row[:, None] * depth + (start + k)[None, :])
        right = tl.load(b + (start + k)[:, None] * width + column[None, :])
        total += tl.dot(left, right)
    tl.store(c + row[:, None] * width + column[None, :], total)


_SIGNATURES = {
    "softmax_rows": (softmax_rows, {"x": "*bf16", "y": "*fp32", "n": "i32"}, {"BLOCK": 1024}),
    "matmul": (matmul, {"a": "*bf16", "b": "*bf16", "c": "*fp32", "depth": "i32"}, {"M": 32, "N": 32, "K": 32}),
}


def compile_to(path: Path, name: str, isa: str) -> Path:
    """Writes the code object of one kernel, four waves a workgroup."""
    function, signature, constants = _SIGNATURES[name]
    built = triton.compile(ASTSource(function, signature, constants), target=GPUTarget("hip", isa, 64), options={"num_warps": 4})
    path.write_bytes(built.asm["hsaco"])
    return path
