"""GPU time of a DeepSeek-V4.1 layer from attention's heads to the normed input of its MoE, at its own sizes: attention_out against its bytes.

    python3 -m benchmark.kernels.attention_out --out OUT [--rows 1,6,12,48] [--layers 4]

Captured in a graph of `--layers` launches with weights and rows of their own, so that weights come from memory and launches overlap as they would
behind another kernel; times are of one launch. The floor: wo_a, wo_b with its scales, the mix, each read once, and rows in and out, at the measured
read bandwidth. SGLang's own launches are not measured here: its linears want a server around them (a profile of one has their times).

Checked before the times: coefficients to fp32 rounding, streams and next input through the numerics gate. Needs torch, a GPU and the package; 1 GB.

Exit status: 0 if every case was measured and no check failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmark.common import deadline
from benchmark.kernels.fused_moe import point_times
from sgl_lowlatency.bench import floors, read_bandwidth, stats, timing
from sgl_lowlatency.bench.results import Results
from sgl_lowlatency.cli.bench import missing, numbers
from sgl_lowlatency.kernels.attention_out import MAX_ROWS, MIXES, POINTS, STREAMS, AttentionOut, AttentionOutSizes, AttentionOutWeights
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

    scale = torch.exp2(torch.randint(0, 4, (z.hidden // 32, z.latent // 32), generator=generator, device=device).float() - 12)
    angles = torch.arange(POSITIONS, device=device)[:, None] * 1e4 ** -(torch.arange(z.rope_dim // 2, device=device) / (z.rope_dim // 2))
    return AttentionOutWeights(
        normal(z.latent, z.group_width, std=z.group_width**-0.5).bfloat16(), normal(z.hidden, z.latent, std=8.0).to(torch.float8_e4m3fn), scale,
        torch.polar(torch.ones_like(angles), angles), normal(MIXES, STREAMS * z.hidden, std=2 * (STREAMS * z.hidden) ** -0.5),
        torch.ones(3, device=device), normal(MIXES, std=0.5), (1 + normal(z.hidden, std=0.2)).bfloat16(), 20, 1e-6, 1e-20, 1e-20,
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
        self.coefficients = torch.zeros(rows, MIXES, device=device)

    def launch(self, trace: torch.Tensor | None = None) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for i, layer in enumerate(self.layers):
            self.kernel.launch(
                layer, self.x[i], self.positions, self.streams[i], self.streams_out[i], self.out[i], self.coefficients if i == 0 else None,
                stream=stream, trace=trace,
            )  # fmt: skip

    def points_us(self) -> dict[str, list[float]]:
        """Of the last launch, by point: when the median block and the last one were there, in us from the first block's begin."""
        trace = torch.zeros(self.kernel.grid, len(POINTS), dtype=torch.int64, device=self.positions.device)
        self.launch(trace)
        torch.cuda.synchronize()
        return point_times(trace.cpu(), POINTS)

    def problems(self) -> list[str]:
        """Of the first layer."""
        wanted, standard = oracle.outputs(SIZES, self.layers[0].weights, self.x[0], self.positions, self.streams[0])
        error = float((self.coefficients.double() - wanted.coefficients).norm() / wanted.coefficients.norm())
        found = [] if error < COEFFICIENTS_REL_L2 else [f"coefficients are {error:.1e} from the oracle"]
        pairs = (("streams", self.streams_out[0]), ("out", self.out[0]))
        figures = [gate.figure(name, ours, getattr(standard, name), getattr(wanted, name)) for name, ours in pairs]
        return found + [str(figure) for figure in figures if not figure.passed]


def measure(ours: Ours, groups: int, group_ms: float) -> tuple[list[float], list[str]]:
    """(ms of a launch, problems)."""
    ours.launch()
    torch.cuda.synchronize()
    found, before = ours.problems(), [t.clone() for t in ours.out]
    graph = timing.capture(ours.launch)
    (times,) = timing.in_turn([graph.replay], groups=groups, target_ms=group_ms)
    if not all(torch.equal(a, b) for a, b in zip(before, ours.out, strict=True)):
        found.append("replays differ from the first launch")
    return [t / len(ours.layers) for t in times], found


def row_of(rows: int, on_ms: list[float], read_gb_s: float, points_us: dict[str, list[float]], wrong: list[str]) -> dict:
    """The results row of one case."""
    return {
        "model": "deepseek-v4.1-flash", "dtype": "bf16, fp8", "tp": 1, "mode": "decode", "kernel": "attention_out", "metric": "attention_out",
        "rows": rows, "floor_ms": round(floors.floor_ms(floor_bytes(rows), read_gb_s), 6), "on_ms": [round(t, 6) for t in on_ms],
        "points_us": points_us, "problems": wrong,
    }  # fmt: skip


def table(content: dict) -> str:
    """Two lines a case, times in microseconds."""
    lines = [f"{content['gpu']}, driver {content['driver']}, {content['versions']}"]
    lines.append(f"{'rows':>4} {'on us':>8} {'floor us':>8} {'share':>6}  problems")
    for row in content["rows"]:
        on, floor = 1e3 * stats.median(row["on_ms"]), 1e3 * row["floor_ms"]
        lines.append(f"{row['rows']:4d} {on:8.2f} {floor:8.2f} {row['on_floor_share']:6.2f}  {'; '.join(row['problems']) or '-'}")
        lines.append("     us, median and last block: " + ", ".join(f"{name} {a:.1f} {b:.1f}" for name, (a, b) in row["points_us"].items()))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="kernel-attention-out", help="results file name")
    parser.add_argument("--rows", type=numbers(1, MAX_ROWS), default=(1, 6, 12, 48), help="rows of a launch, comma list")
    parser.add_argument("--layers", type=int, default=4, help="launches of one graph, each with weights and rows of its own")
    parser.add_argument("--groups", type=int, default=7, help="times taken of every case")
    parser.add_argument("--group-ms", type=float, default=30.0, help="how long each replays")
    parser.add_argument("--commit", default=None, help="HASH or HASH-dirty of the code, for a copy without git")
    parser.add_argument("--deadline", type=float, default=120, help="seconds after which everything is killed")
    args = parser.parse_args()
    if refusal := missing():
        print(f"attention_out: {refusal}", file=sys.stderr)
        return 2
    results = Results(
        args.out, what="kernel", name=args.name, weights=WEIGHTS,
        command=["python3", "-m", "benchmark.kernels.attention_out", *sys.argv[1:]], commit=args.commit,
    )  # fmt: skip
    deadline.watchdog(args.deadline, lambda: print(table(results.content)))
    device = torch.device("cuda", torch.cuda.current_device())
    bandwidth = read_bandwidth.measure(4.0)
    results.set(bandwidth_gb_s={key: round(value) for key, value in bandwidth.items()})
    with torch.no_grad():
        weights = [random_weights(device, seed) for seed in range(args.layers)]
        for rows in args.rows:
            ours = Ours(weights, rows)
            on_ms, wrong = measure(ours, args.groups, args.group_ms)
            row = results.add(**row_of(rows, on_ms, bandwidth["read_gb_s"], ours.points_us(), wrong))
            us = 1e3 * stats.median(on_ms)
            deadline.say(f"{rows} rows: {us:.1f} us, share of the floor {row['on_floor_share']}; {'; '.join(wrong) or 'checked'}")
    print(table(results.content))
    return 1 if any(row["problems"] for row in results.content["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
