"""GPU time of a DeepSeek-V4.1 layer from attention's heads to the normed input of its MoE, at its own sizes: attention_out against its bytes.

    python3 -m benchmark.kernels.attention_out --out OUT [--rows 1,6,12,48] [--layers 4]

Captured in a graph of `--layers` launches with weights and rows of their own, so that weights come from memory and launches overlap as they would
behind another kernel; times are of one launch. The floor: wo_a, wo_b with its scales, the mix, each read once, and rows in and out, at the measured
read bandwidth. SGLang's own launches are not measured here: its linears want a server around them (a profile of one has their times).

Checked before the times: coefficients to fp32 rounding, streams and next input through the numerics gate. Needs torch, a GPU and the package; 1 GB.

Exit status: 0 if every case was measured and no check failed.
"""

from __future__ import annotations

import sys

import torch

from benchmark.common import slice_bench
from sgl_lowlatency.kernels.attention_out import POINTS, AttentionOut, AttentionOutSizes, AttentionOutWeights
from sgl_lowlatency.kernels.hyper_connection import MIXES, STREAMS, HyperConnection
from sgl_lowlatency.reference import attention_out as oracle
from sgl_lowlatency.reference import gate

SIZES = AttentionOutSizes(hidden=5120, heads=64, head_dim=512, rope_dim=64, groups=8, lora=1024)
POSITIONS = 8192
COEFFICIENTS_REL_L2 = 1e-5  # of fp32 sums and 40 normalisations: about 1e-6
WEIGHTS = "random: bf16 and FP8 normal, FP8 scales of two octaves, mix normal of variance 4 / (4 hidden); seed by layer"


def floor_bytes(rows: int) -> int:
    """What a launch must move: both projections, wo_b's scales, the mix; of a row its heads, its streams in and out, and the next input."""
    z = SIZES
    weights = z.latent * z.group_width * 2 + z.hidden * z.latent + z.hidden * z.latent // 1024 * 4 + MIXES * STREAMS * z.hidden * 4
    return weights + rows * 2 * (z.heads * z.head_dim + 2 * STREAMS * z.hidden + z.hidden)


def random_weights(device: torch.device, seed: int) -> AttentionOutWeights:
    generator, z = torch.Generator(device=device).manual_seed(seed), SIZES

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).mul_(std)

    return AttentionOutWeights(
        normal(z.latent, z.group_width, std=z.group_width**-0.5).bfloat16(), *slice_bench.fp8_matrix(generator, z.hidden, z.latent),
        slice_bench.frequencies(device, POSITIONS, z.rope_dim // 2),
        HyperConnection(
            normal(MIXES, STREAMS * z.hidden, std=2 * (STREAMS * z.hidden) ** -0.5), torch.ones(3, device=device), normal(MIXES, std=0.5), 20, 1e-6,
            1e-20,
        ),
        (1 + normal(z.hidden, std=0.2)).bfloat16(), 1e-20,
    )  # fmt: skip


class Ours:
    """attention_out of every layer, on rows of its own."""

    def __init__(self, weights: list[AttentionOutWeights], rows: int) -> None:
        device, z = weights[0].wo_a.device, SIZES
        generator = torch.Generator(device=device).manual_seed(rows)
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self.kernel = AttentionOut(z, rows, device, blocks, deadline_s=5.0)
        self.layers = [self.kernel.prepare(of) for of in weights]
        self.x = [torch.randn(rows, z.heads, z.head_dim, generator=generator, device=device).bfloat16() for _ in weights]
        self.streams = [torch.randn(rows, STREAMS, z.hidden, generator=generator, device=device).bfloat16() for _ in weights]
        self.positions = torch.randint(0, POSITIONS, (rows,), generator=generator, device=device)
        self.streams_out = [torch.full_like(t, float("nan")) for t in self.streams]
        self.out = [torch.full((rows, z.hidden), float("nan"), dtype=torch.bfloat16, device=device) for _ in weights]
        self.coefficients = torch.zeros(rows, MIXES, device=device)  # of the first layer
        self.results = [*self.streams_out, *self.out, self.coefficients]

    def launch(self, trace: torch.Tensor | None = None) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for i, layer in enumerate(self.layers):
            self.kernel.launch(
                layer, self.x[i], self.positions, self.streams[i], self.streams_out[i], self.out[i], self.coefficients if i == 0 else None,
                stream=stream, trace=trace,
            )  # fmt: skip

    def problems(self) -> list[str]:
        """Of the first layer."""
        wanted, standard = oracle.outputs(SIZES, self.layers[0].weights, self.x[0], self.positions, self.streams[0])
        error = float((self.coefficients.double() - wanted.coefficients).norm() / wanted.coefficients.norm())
        found = [] if error < COEFFICIENTS_REL_L2 else [f"coefficients are {error:.1e} from the oracle"]
        pairs = (("streams", self.streams_out[0]), ("out", self.out[0]))
        figures = [gate.figure(name, ours, getattr(standard, name), getattr(wanted, name)) for name, ours in pairs]
        return found + [str(figure) for figure in figures if not figure.passed]


def main() -> int:
    return slice_bench.main("attention_out", __doc__, WEIGHTS, POINTS, floor_bytes, random_weights, Ours)


if __name__ == "__main__":
    sys.exit(main())
