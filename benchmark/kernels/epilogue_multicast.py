"""GPU time of an output projection with its all-reduce, residual and norm, on virtual ranks of one GPU: a plain product, a copy to every rank and
a reduction (off) against epilogue_multicast (on), on the same tensors in one process.

    python3 -m benchmark.kernels.epilogue_multicast --out OUT [--rows 1,6,8] [--ranks 2,4] [--hidden 4096] [--k 4096]

A graph holds --layers layers, each with weights of its own, one after the other as in a decode step; the time is that of a layer, all its ranks
together. Off: one batched product of all ranks to memory (`torch.bmm`), one copy of every rank's partial sums to every rank's buffer, the sum over
ranks, residual and norm with torch. Product is off's first kernel alone: a layer costs at least that. The graphs are replayed back to back
between two events, in turn. Virtual ranks share one memory: no NVLink is in these times.

Checked before the times: the numerics gate of both outputs against float64, and that every rank has the same bits.
Needs torch, a GPU and the package. Exit status: 0 if every case was measured and no check failed.
"""

from __future__ import annotations

import sys

import torch

from benchmark.common import deadline
from benchmark.kernels import command
from sgl_lowlatency.bench import stats, timing
from sgl_lowlatency.cli.bench import numbers
from sgl_lowlatency.kernels.epilogue_multicast import MAX_ROWS, EpilogueMulticast, RankTensors
from sgl_lowlatency.kernels.symmetric_workspace import MAX_RANKS, virtual_workspaces
from sgl_lowlatency.reference.gate import figure

WEIGHTS = "random, normal: weights of variance 1 / K, activations of 1, residual of 16, bf16, seed 0"
EPS = 1e-6


def oracle(inputs: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, normed) in float64. inputs: [ranks, rows, K]; weights: [ranks, hidden, K]."""
    total = residual.double() + torch.bmm(inputs.double(), weights.double().mT).sum(0)
    return total, total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS) * norm.double()


def problems(ours: list[RankTensors], standard: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> list[str]:
    """What of a layer's outputs misses the gate, or is not the same on every rank."""
    outputs = zip(("sum", "normed"), (ours[0].sum, ours[0].normed), standard, wanted, strict=True)
    found = [str(result) for result in (figure(*output) for output in outputs) if not result.passed]
    for rank, one in enumerate(ours[1:], 1):
        if not (torch.equal(one.sum, ours[0].sum) and torch.equal(one.normed, ours[0].normed)):
            found.append(f"rank {rank} has other bits than rank 0")
    return found


class Case:
    """Both arms on the tensors of all layers."""

    def __init__(self, ranks: int, rows: int, hidden: int, k: int, layers: int, device: torch.device, blocks: int, deadline_s: float = 5.0) -> None:
        generator = torch.Generator(device=device).manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * scale).bfloat16()

        self.ranks, self.rows, self.device = ranks, rows, device
        self.weights = [random(ranks, hidden, k // ranks, scale=k**-0.5) for _ in range(layers)]
        self.inputs = random(ranks, rows, k // ranks)
        self.residual = random(rows, hidden, scale=4.0)
        self.norm = (1 + 0.1 * torch.randn(hidden, generator=generator, device=device)).bfloat16()
        self.partial = torch.empty(ranks, rows, hidden, dtype=torch.bfloat16, device=device)
        self.slots = torch.empty(ranks, ranks, rows, hidden, dtype=torch.bfloat16, device=device)
        self.standard: list[tuple[torch.Tensor, torch.Tensor]] = []
        mapped = virtual_workspaces(ranks, rows, hidden, device)
        self.steps = [
            EpilogueMulticast(list(weight), self.norm, blocks_per_rank=blocks, deadline_s=deadline_s, workspaces=mapped, rms_eps=EPS)
            for weight in self.weights
        ]
        self.ours = [
            [RankTensors(self.inputs[rank], self.residual, torch.empty_like(self.residual), torch.empty_like(self.residual)) for rank in range(ranks)]
            for _ in range(layers)
        ]

    def launch_ours(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0
        for layer, (step, tensors) in enumerate(zip(self.steps, self.ours, strict=True)):
            step.run(tensors, layer, stream)

    def launch_product(self) -> None:
        for weight in self.weights:
            torch.bmm(self.inputs, weight.mT, out=self.partial)

    def launch_standard(self) -> None:
        self.standard = []
        for weight in self.weights:
            torch.bmm(self.inputs, weight.mT, out=self.partial)
            self.slots.copy_(self.partial.unsqueeze(0).expand_as(self.slots))
            total = self.slots.sum(1, dtype=torch.float32) + self.residual
            normed = torch.nn.functional.rms_norm(total, (total.shape[-1],), None, EPS).bfloat16() * self.norm
            self.standard.append((total[0].bfloat16(), normed[0]))

    def problems(self) -> list[str]:
        """Of the newest launches of both arms, by layer."""
        found = []
        for layer, (ours, standard, weight) in enumerate(zip(self.ours, self.standard, self.weights, strict=True)):
            wanted = oracle(self.inputs, weight, self.residual, self.norm)
            found += [f"layer {layer}: {what}" for what in problems(ours, standard, wanted)]
        return found

    def measure(self, groups: int, group_ms: float) -> tuple[list[float], list[float], list[float], list[str]]:
        """(ms a layer of off, of on, of the product alone, problems)."""
        runs = (self.launch_standard, self.launch_ours, self.launch_product)
        for run in runs:
            run()
        torch.cuda.synchronize()
        graphs = [timing.capture(run) for run in runs]  # the outputs are now the graphs'
        for tensors in self.ours:
            for one in tensors:
                one.sum.fill_(float("nan"))
                one.normed.fill_(float("nan"))
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        found = self.problems()
        times = timing.in_turn([graph.replay for graph in graphs], groups=groups, target_ms=group_ms)
        off, on, product = ([ms / len(self.weights) for ms in arm] for arm in times)
        return off, on, product, found


def row_of(
    ranks: int, rows: int, hidden: int, k: int, layers: int, off_ms: list[float], on_ms: list[float], product_ms: list[float], wrong: list[str]
) -> dict:
    """The results row of one case."""
    return {
        "model": f"out_proj-{hidden}x{k}", "dtype": "bf16", "tp": ranks, "mode": "decode", "kernel": "epilogue_multicast", "metric": "layer",
        "batch": rows, "rows": rows, "virtual_ranks": ranks, "hidden": hidden, "k": k, "layers": layers,
        "off_ms": [round(t, 6) for t in off_ms], "on_ms": [round(t, 6) for t in on_ms],
        "product_ms": [round(t, 6) for t in product_ms], "problems": wrong,
    }  # fmt: skip


def table(content: dict) -> str:
    """One line a case, times in microseconds."""
    lines = [f"{content['gpu']}, driver {content['driver']}, {content['versions']}"]
    lines.append(f"{'ranks':>5} {'rows':>4} {'off us':>8} {'on us':>8} {'product us':>10} {'ratio':>6} {'ci95':>15}  problems")
    for row in content["rows"]:
        low, high = row["ratio_ci95"]
        lines.append(
            f"{row['virtual_ranks']:5d} {row['rows']:4d} {1e3 * stats.median(row['off_ms']):8.2f} {1e3 * stats.median(row['on_ms']):8.2f}"
            f" {1e3 * stats.median(row['product_ms']):10.2f} {row['ratio']:6.2f} {f'{low:.2f}..{high:.2f}':>15}  {'; '.join(row['problems']) or '-'}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = command.parser(__doc__, "kernel-epilogue-multicast", deadline_s=120)
    parser.add_argument("--rows", type=numbers(1, MAX_ROWS), default=(1, 6, 8))
    parser.add_argument("--ranks", type=numbers(1, MAX_RANKS), default=(2, 4))
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--k", type=int, default=4096, help="of all ranks together")
    parser.add_argument("--layers", type=int, default=36, help="layers in a graph")
    args = parser.parse_args()
    if command.refused("epilogue_multicast"):
        return 2
    results = command.begin(args, "epilogue_multicast", WEIGHTS, table)
    device = command.device()
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    for ranks in args.ranks:
        for rows in args.rows:
            case = Case(ranks, rows, args.hidden, args.k, args.layers, device, num_sms // ranks)
            off_ms, on_ms, product_ms, wrong = case.measure(args.groups, args.group_ms)
            row = results.add(**row_of(ranks, rows, args.hidden, args.k, args.layers, off_ms, on_ms, product_ms, wrong))
            deadline.say(f"{ranks} ranks, {rows} rows: ratio {row['ratio']}; {'; '.join(wrong[:3]) or 'output checked'}")
    return command.end(results, table)


if __name__ == "__main__":
    sys.exit(main())
