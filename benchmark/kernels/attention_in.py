"""GPU time of a DeepSeek-V4.1 layer from its residual streams to rotated queries and the new KV row, at its own sizes: attention_in and its bytes.

    python3 -m benchmark.kernels.attention_in --out OUT [--rows 1,6,12,48] [--layers 4]

As benchmark.kernels.attention_out. The floor: wqkv_a and wq_b with their scales, each read once, and rows in and out, at the measured read bandwidth.
`--layers 4`, the default, are 204 MB of weights: four times an H200's L2.

Checked before the times: next input, latent queries, queries and KV rows through the numerics gate. Needs torch, a GPU and the package; 1 GB.

Exit status: 0 if every case was measured and no check failed.
"""

from __future__ import annotations

import sys

import torch

from benchmark.common import slice_bench
from sgl_lowlatency.kernels.attention_in import HEAD_DIM, HEAD_ROPE, POINTS, AttentionIn, AttentionInSizes, AttentionInWeights, KvPages
from sgl_lowlatency.kernels.hyper_connection import STREAMS
from sgl_lowlatency.reference import attention_in as oracle
from sgl_lowlatency.reference import gate

SIZES = AttentionInSizes(hidden=5120, lora=1280, heads=64)
POSITIONS, PAGE_SIZE, NUM_PAGES = 8192, 256, 8
PAGE_BYTES = 149760  # 256 slots of 584 bytes, up to a multiple of 576
WEIGHTS = "random: FP8 normal, scales of two octaves; seed by layer"


def floor_bytes(rows: int) -> int:
    """What a launch must move: both projections and their scales; of a row its streams, x, q_lora, queries and 584 bytes of the cache."""
    z = SIZES
    elements = (z.lora + HEAD_DIM) * z.hidden + z.heads * HEAD_DIM * z.lora
    return elements + elements // 1024 * 4 + rows * (2 * (STREAMS * z.hidden + z.hidden + z.lora + z.heads * HEAD_DIM) + 584)


def random_weights(device: torch.device, seed: int) -> AttentionInWeights:
    generator, z = torch.Generator(device=device).manual_seed(seed), SIZES
    norms = [(1 + torch.randn(width, generator=generator, device=device).mul_(0.2)).bfloat16() for width in (z.hidden, z.lora, HEAD_DIM)]
    return AttentionInWeights(
        norms[0], *slice_bench.fp8_matrix(generator, z.lora + HEAD_DIM, z.hidden), norms[1], norms[2],
        *slice_bench.fp8_matrix(generator, z.heads * HEAD_DIM, z.lora), slice_bench.frequencies(device, POSITIONS, HEAD_ROPE // 2),
        1e-20, 1e-20, 1e-20,
    )  # fmt: skip


class Ours:
    """attention_in of every layer, on rows of its own."""

    def __init__(self, weights: list[AttentionInWeights], rows: int) -> None:
        device, z = weights[0].wqkv_a.device, SIZES
        generator = torch.Generator(device=device).manual_seed(rows)
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self.kernel = AttentionIn(z, rows, device, blocks, deadline_s=5.0)
        self.layers = [self.kernel.prepare(of) for of in weights]
        self.streams = [torch.randn(rows, STREAMS, z.hidden, generator=generator, device=device).bfloat16() for _ in weights]
        self.pre = torch.rand(rows, STREAMS, generator=generator, device=device)
        self.positions = torch.randint(0, POSITIONS, (rows,), generator=generator, device=device)
        self.slots = torch.randperm(PAGE_SIZE * NUM_PAGES, generator=generator, device=device)[:rows].int()
        self.caches = [KvPages(torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8, device=device), PAGE_SIZE) for _ in weights]
        self.x, self.q_lora, self.q = (
            [torch.full((rows, *shape), float("nan"), dtype=torch.bfloat16, device=device) for _ in weights]
            for shape in ((z.hidden,), (z.lora,), (z.heads, HEAD_DIM))
        )
        self.results = [*self.x, *self.q_lora, *self.q, *(cache.pages for cache in self.caches)]

    def launch(self, trace: torch.Tensor | None = None) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for i, layer in enumerate(self.layers):
            self.kernel.launch(
                layer, self.streams[i], self.pre, self.positions, self.slots, self.caches[i], self.x[i], self.q_lora[i], self.q[i],
                stream=stream, trace=trace,
            )  # fmt: skip

    def problems(self) -> list[str]:
        """Of the first layer."""
        wanted, standard = oracle.outputs(SIZES, self.layers[0].weights, self.streams[0], self.pre, self.positions)
        found = {"x": self.x[0], "q_lora": self.q_lora[0], "q": self.q[0], "kv": oracle.read_slots(self.caches[0], self.slots.long())}
        figures = [gate.figure(name, ours, getattr(standard, name), getattr(wanted, name)) for name, ours in found.items()]
        return [str(figure) for figure in figures if not figure.passed]


def main() -> int:
    return slice_bench.main("attention_in", __doc__, WEIGHTS, POINTS, floor_bytes, random_weights, Ours)


if __name__ == "__main__":
    sys.exit(main())
