"""Random layers at real scale as SGLang holds them on sm_90, and launches of attention_out compared with the oracle."""

import torch
from fused_moe_cases import fp8_matrix
from hyper_connection_cases import coefficients_problems, random_hyper

from sgl_lowlatency.kernels.attention_out import POINTS, AttentionOut, AttentionOutSizes, AttentionOutWeights
from sgl_lowlatency.kernels.hyper_connection import MIXES, STREAMS
from sgl_lowlatency.reference import attention_out as oracle
from sgl_lowlatency.reference import gate

REAL = AttentionOutSizes(hidden=5120, heads=64, head_dim=512, rope_dim=64, groups=8, lora=1024)
SMALL = AttentionOutSizes(hidden=256, heads=4, head_dim=64, rope_dim=16, groups=2, lora=64)
POSITIONS = 97


def random_weights(sizes, device="cpu", seed=0):
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape, std=1.0):
        return torch.randn(*shape, generator=generator, device=device) * std

    wo_b, wo_b_scale = fp8_matrix(generator, device, sizes.hidden, sizes.latent)
    angles = torch.arange(POSITIONS, device=device)[:, None] * 0.7 ** torch.arange(sizes.rope_dim // 2, device=device)
    return AttentionOutWeights(
        normal(sizes.latent, sizes.group_width, std=sizes.group_width**-0.5).bfloat16(), wo_b, wo_b_scale,
        torch.polar(torch.ones_like(angles), angles), random_hyper(normal, sizes.hidden, device),
        (1 + normal(sizes.hidden, std=0.2)).bfloat16(), 1e-6,
    )  # fmt: skip


class Layer:
    """A layer and the kernel. Results are of the newest launch."""

    def __init__(self, sizes=SMALL, max_rows=48, grid=4, device="cpu", emulation=None, seed=0):
        self.device, self.sizes = torch.device(device), sizes
        self.weights = random_weights(sizes, device, seed)
        self.kernel = AttentionOut(sizes, max_rows, self.device, grid, deadline_s=2.0, emulation=emulation)
        self.layer = self.kernel.prepare(self.weights)

    def inputs(self, rows, seed=0, padding=0):
        """x, positions and streams. padding: elements between the rows of x."""
        generator, z = torch.Generator().manual_seed(1000 + seed), self.sizes
        wide = torch.randn(rows, z.heads * z.head_dim + padding, generator=generator).bfloat16().to(self.device)
        x = wide[:, : z.heads * z.head_dim].unflatten(1, (z.heads, z.head_dim))
        positions = torch.randint(0, POSITIONS, (rows,), generator=generator).to(self.device)
        positions[0] = 0
        return x, positions, torch.randn(rows, STREAMS, z.hidden, generator=generator).bfloat16().to(self.device)

    def run(self, x, positions, streams, stream=0):
        rows, nan = x.shape[0], float("nan")
        self.streams = torch.full((rows, STREAMS, self.sizes.hidden), nan, dtype=torch.bfloat16, device=self.device)
        self.out = torch.full((rows, self.sizes.hidden), nan, dtype=torch.bfloat16, device=self.device)
        self.coefficients = torch.full((rows, MIXES), nan, device=self.device)
        self.trace = torch.zeros(self.kernel.grid, len(POINTS), dtype=torch.int64, device=self.device)
        self.kernel.launch(self.layer, x, positions, streams, self.streams, self.out, self.coefficients, stream, self.trace)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def problems(self, x, positions, streams):
        """What is wrong with the newest launch: coefficients beyond fp32 rounding, streams and out through the numerics gate."""
        wanted, standard = oracle.outputs(self.sizes, self.weights, x, positions, streams)
        found = coefficients_problems(self.coefficients, wanted.coefficients)
        self.figures = [gate.figure(name, getattr(self, name), getattr(standard, name), getattr(wanted, name)) for name in ("streams", "out")]
        if not bool((self.trace[:, 0] > 0).all() and (self.trace.diff(dim=1) >= 0).all()):
            found.append(f"times are not in order: {self.trace.tolist()}")
        return found + [str(figure) for figure in self.figures if not figure.passed]
