"""GPU time of the MoE of a DeepSeek-V4.1 layer at its own sizes: fused_moe against the bytes it must read, and beside FlashInfer's experts.

    python3 -m benchmark.kernels.fused_moe --out OUT [--rows 1,6,12,48] [--inputs 4]

On is fused_moe, router to combined output. Where FlashInfer's fused_moe_90 is there as a file (it would compile for an hour), the experts alone of
SGLang's path stand beside it: cutlass_fused_moe on the same interleaved tensors with choices made beforehand, neither router nor top-k nor shared
expert nor the addition: no ratio is made of the two. Post is fused_moe with the layer's residual streams: their mix, and mHC's post. All are captured
in a graph of `--inputs` launches with other rows each, so that experts differ and weights come from memory; times are of one launch. The
floor: router, shared expert and every distinct expert with its scales, each read once, at the measured read bandwidth.

Checked before the times: logits to fp32 rounding, output through the numerics gate, streams against fp64 of that output, choices by the rule. Needs
torch, a GPU and the package; 8 GB.

Exit status: 0 if every case was measured and no check failed.
"""

from __future__ import annotations

import os
import sys

import torch

from benchmark.common import deadline
from benchmark.common.launches import point_times, poison, replay_problems
from benchmark.kernels import command
from sgl_lowlatency.bench import floors, stats, timing
from sgl_lowlatency.cli.bench import numbers
from sgl_lowlatency.kernels.fused_moe import MAX_ROWS, POINTS, FusedMoe, FusedMoeWeights, RoutingRecord
from sgl_lowlatency.kernels.hyper_connection import MIXES, STREAMS, HyperConnection
from sgl_lowlatency.reference import fused_moe as oracle
from sgl_lowlatency.reference import gate
from sgl_lowlatency.reference import hyper_connection as hyper_oracle

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, SCALING, LIMIT = 5120, 2304, 384, 6, 1.5, 10.0
LOGITS_REL_L2 = 1e-5  # of fp32 sums: 1e-7 to 1e-6
STREAMS_REL_L2 = 4e-3  # of what fp64 makes of the launch's own output: bf16 rounds by 2e-3
WEIGHTS = "random: FP4 bytes uniform and FP8 normal, scales of two octaves each, router normal of variance 1 / hidden; seed 0"


def expert_bytes() -> int:
    """One expert: 3 hidden intermediate FP4 values, and a scale byte for each 32."""
    return 3 * HIDDEN * INTERMEDIATE // 2 + 3 * HIDDEN * INTERMEDIATE // 32


def floor_bytes(rows: int, num_active: float) -> float:
    """What a launch must move: router bf16, shared expert FP8 with fp32 scales of 32 x 32, the active experts, x and out."""
    shared = 3 * HIDDEN * INTERMEDIATE + 3 * HIDDEN * INTERMEDIATE // 1024 * 4
    return NUM_EXPERTS * HIDDEN * 2 + shared + num_active * expert_bytes() + rows * HIDDEN * 4


def random_weights(device: torch.device) -> FusedMoeWeights:
    generator = torch.Generator(device=device).manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.uint8)

    def shared(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(rows, columns, generator=generator, device=device).mul_(8).to(torch.float8_e4m3fn)
        return values, torch.exp2(integers(0, 4, rows // 32, columns // 32).float() - 11)

    def experts(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        return integers(0, 256, NUM_EXPERTS, rows, columns // 2), integers(118, 122, NUM_EXPERTS, rows // 64, columns // 128, 16, 16)

    router = torch.randn(NUM_EXPERTS, HIDDEN, generator=generator, device=device).mul_(HIDDEN**-0.5).bfloat16()
    bias = torch.randn(NUM_EXPERTS, generator=generator, device=device).mul_(0.1)
    pairs = (experts(2 * INTERMEDIATE, HIDDEN), experts(HIDDEN, INTERMEDIATE), shared(2 * INTERMEDIATE, HIDDEN), shared(HIDDEN, INTERMEDIATE))
    return FusedMoeWeights(router, bias, *(tensor for pair in pairs for tensor in pair), TOP_K, SCALING, LIMIT)


def random_hyper(device: torch.device) -> HyperConnection:
    generator = torch.Generator(device=device).manual_seed(1)
    mix = torch.randn(MIXES, STREAMS * HIDDEN, generator=generator, device=device).mul_((STREAMS * HIDDEN) ** -0.5)
    base = torch.randn(MIXES, generator=generator, device=device)
    return HyperConnection(mix, torch.ones(3, device=device), base, 20, 1e-6, 1e-6)


class Ours:
    """fused_moe on `num_inputs` sets of rows."""

    def __init__(self, weights: FusedMoeWeights, rows: int, num_inputs: int) -> None:
        device = weights.router.device
        generator = torch.Generator(device=device).manual_seed(rows)
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self.weights = weights
        self.kernel = FusedMoe(HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, rows, device, blocks, deadline_s=5.0)
        self.hyper = random_hyper(device)
        self.layer = self.kernel.prepare(weights, hyper=self.hyper)
        self.x = [torch.randn(rows, HIDDEN, generator=generator, device=device).bfloat16() for _ in range(num_inputs)]
        self.out = [torch.full_like(x, float("nan")) for x in self.x]
        self.streams = [torch.randn(rows, STREAMS, HIDDEN, generator=generator, device=device).bfloat16() for _ in self.x]
        self.streams_out = [torch.full_like(streams, float("nan")) for streams in self.streams]
        self.coefficients = torch.empty(rows, MIXES, device=device)
        self.records = [
            RoutingRecord(torch.full((rows, TOP_K), -7, dtype=torch.int32, device=device), torch.zeros(rows, TOP_K, device=device),
                          torch.zeros(rows, NUM_EXPERTS, device=device)) for _ in self.x
        ]  # fmt: skip

    def launch(self, with_records: bool = False) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for x, out, record in zip(self.x, self.out, self.records, strict=True):
            self.kernel.launch(self.layer, x, out, record=record if with_records else None, stream=stream)

    def launch_with_post(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for x, streams, behind in zip(self.x, self.streams, self.streams_out, strict=True):
            self.kernel.launch(self.layer, x, None, stream=stream, streams=streams, streams_out=behind, coefficients=self.coefficients)

    def points_us(self) -> dict[str, list[float]]:
        """Of the last of the launches, by point: when the median block and the last one were there, in us from the first block's begin."""
        trace = torch.zeros(self.kernel.grid, len(POINTS), dtype=torch.int64, device=self.x[0].device)
        stream = torch.cuda.current_stream().cuda_stream
        for x, out in zip(self.x, self.out, strict=True):
            self.kernel.launch(self.layer, x, out, stream=stream, trace=trace)
        torch.cuda.synchronize()
        return point_times(trace.cpu(), POINTS)

    def num_active(self) -> float:
        return sum(record.ids.unique().numel() for record in self.records) / len(self.records)

    def problems(self) -> list[str]:
        """Of the first input."""
        x, record = self.x[0], self.records[0]
        wide = oracle.logits(self.weights, x)
        error = float((record.logits.double() - wide).norm() / wide.norm())
        found = [] if error < LOGITS_REL_L2 else [f"logits are {error:.1e} from the oracle"]
        on_cpu = FusedMoeWeights(**{**vars(self.weights), "bias": self.weights.bias.cpu()})
        ids, _, is_decided = oracle.route(on_cpu, record.logits.cpu())
        if not torch.equal(record.ids.cpu().long()[is_decided], ids[is_decided]):
            found.append("choices are not the rule's")
        self.wanted, standard = oracle.outputs(self.weights, x, record.ids.long(), record.weights)
        figure = gate.figure("out", self.out[0], standard, self.wanted)
        return found + ([] if figure.passed else [str(figure)])

    def post_problems(self) -> list[str]:
        """Of the first input, behind launches of either kind."""
        mixed = hyper_oracle.coefficients(self.hyper, self.streams[0])
        wanted = hyper_oracle.streams_behind(mixed, self.out[0], self.streams[0])
        error = float((self.streams_out[0].double() - wanted).norm() / wanted.norm())
        return [] if error < STREAMS_REL_L2 else [f"streams are {error:.1e} from the oracle"]


class FlashInferExperts:
    """The routed experts as SGLang calls them, with the choices of ours."""

    def __init__(self, ours: Ours) -> None:
        from flashinfer.fused_moe import cutlass_fused_moe
        from flashinfer.fused_moe.core import ActivationType

        self.ours, self.run, self.activation = ours, cutlass_fused_moe, ActivationType.Swiglu
        self.limit = torch.full((NUM_EXPERTS,), LIMIT, device=ours.x[0].device)
        self.out = [torch.empty_like(x) for x in ours.x]

    @staticmethod
    def is_there() -> bool:
        try:
            from flashinfer.jit import env
        except ImportError:
            return False
        return os.path.exists(os.path.join(str(env.FLASHINFER_AOT_DIR), "fused_moe_90", "fused_moe_90.so"))

    def launch(self) -> None:
        w = self.ours.weights
        for x, out, record in zip(self.ours.x, self.out, self.ours.records, strict=True):
            self.run(
                input=x, token_selected_experts=record.ids, token_final_scales=record.weights,
                fc1_expert_weights=w.gate_up, fc2_expert_weights=w.down,
                output_dtype=torch.bfloat16, quant_scales=[w.gate_up_scale.view(torch.int32), w.down_scale.view(torch.int32)],
                swiglu_limit=self.limit, use_w4_group_scaling=True, activation_type=self.activation, output=out, use_fused_finalize=False,
            )  # fmt: skip

    def problems(self) -> list[str]:
        """Against the oracle without the shared expert: this is how the layout is known to be read as FlashInfer reads it."""
        w, x, record = self.ours.weights, self.ours.x[0], self.ours.records[0]
        shared, _ = oracle.outputs(w, x, torch.full_like(record.ids.long(), -1), record.weights)
        wanted = self.ours.wanted - shared
        error = float((self.out[0].double() - wanted).norm() / wanted.norm())
        return [] if error < 0.02 else [f"FlashInfer's experts are {error:.3f} from the oracle"]


def measure(ours: Ours, groups: int, group_ms: float) -> tuple[list[float], list[float], list[float], list[str]]:
    """(ms of FlashInfer's experts, empty without them; ms of ours; ms of ours with streams; problems)."""
    poison(ours.out)
    ours.launch(with_records=True)
    ours.launch_with_post()
    torch.cuda.synchronize()
    found, runs = ours.problems() + ours.post_problems(), [ours.launch, ours.launch_with_post]
    if FlashInferExperts.is_there():
        standard = FlashInferExperts(ours)
        standard.launch()
        torch.cuda.synchronize()
        found += standard.problems()
        runs.append(standard.launch)
    before = [out.clone() for out in ours.out]
    graphs = [timing.capture(run) for run in runs]
    found += replay_problems(graphs[0].replay, ours.out, before)
    times = timing.in_turn([graph.replay for graph in graphs], groups=groups, target_ms=group_ms)
    if not all(torch.equal(a, b) for a, b in zip(before, ours.out, strict=True)):
        found.append("timed replays differ from the first launch")
    per_launch = [[t / len(ours.x) for t in ms] for ms in times]
    return (per_launch[2] if len(runs) > 2 else []), per_launch[0], per_launch[1], found


def row_of(
    rows: int, num_active: float, experts_ms: list[float], on_ms: list[float], post_ms: list[float], read_gb_s: float,
    points_us: dict[str, list[float]], wrong: list[str],
) -> dict:  # fmt: skip
    """The results row of one case."""
    return {
        "model": "deepseek-v4.1-flash", "dtype": "fp4", "tp": 1, "mode": "decode", "kernel": "fused_moe", "metric": "moe", "rows": rows,
        "active_experts": round(num_active, 2), "floor_ms": round(floors.floor_ms(floor_bytes(rows, num_active), read_gb_s), 6),
        "flashinfer_experts_ms": [round(t, 6) for t in experts_ms], "on_ms": [round(t, 6) for t in on_ms],
        "post_ms": [round(t, 6) for t in post_ms], "points_us": points_us, "problems": wrong,
    }  # fmt: skip


def table(content: dict) -> str:
    """One line a case, times in microseconds."""
    lines = [f"{content['gpu']}, driver {content['driver']}, {content['versions']}"]
    lines.append(f"{'rows':>4} {'experts':>7} {'flashinfer us':>14} {'on us':>8} {'post us':>8} {'floor us':>8} {'share':>6}  problems")
    for row in content["rows"]:
        off = f"{1e3 * stats.median(row['flashinfer_experts_ms']):14.2f}" if row["flashinfer_experts_ms"] else f"{'-':>14}"
        lines.append(
            f"{row['rows']:4d} {row['active_experts']:7.1f} {off} {1e3 * stats.median(row['on_ms']):8.2f} {1e3 * stats.median(row['post_ms']):8.2f}"
            f" {1e3 * row['floor_ms']:8.2f}"
            f" {row['on_floor_share']:6.2f}  {'; '.join(row['problems']) or '-'}"
        )
        lines.append("     us, median and last block: " + ", ".join(f"{name} {a:.1f} {b:.1f}" for name, (a, b) in row["points_us"].items()))
    return "\n".join(lines)


def main() -> int:
    parser = command.parser(__doc__, "kernel-fused-moe", deadline_s=120)
    parser.add_argument("--rows", type=numbers(1, MAX_ROWS), default=(1, 6, 12, 48), help="rows of a launch, comma list")
    parser.add_argument("--inputs", type=int, default=4, help="launches of one graph, each with rows of its own")
    args = parser.parse_args()
    if command.refused("fused_moe"):
        return 2
    results = command.begin(args, "fused_moe", WEIGHTS, table)
    device = command.device()
    read_gb_s = command.measure_bandwidth(results, 4.0)
    with torch.no_grad():
        weights = random_weights(device)
        for rows in args.rows:
            ours = Ours(weights, rows, args.inputs)
            experts_ms, on_ms, post_ms, wrong = measure(ours, args.groups, args.group_ms)
            row = results.add(**row_of(rows, ours.num_active(), experts_ms, on_ms, post_ms, read_gb_s, ours.points_us(), wrong))
            us, post_us = 1e3 * stats.median(on_ms), 1e3 * stats.median(post_ms)
            share, verdict = row["on_floor_share"], "; ".join(wrong) or "checked"
            deadline.say(f"{rows} rows: {us:.1f} us, {post_us:.1f} with streams, share of the floor {share}; {verdict}")
    return command.end(results, table)


if __name__ == "__main__":
    sys.exit(main())
