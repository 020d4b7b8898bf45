"""GPU time of an output projection with its all-reduce, residual and norm on real GPUs: NCCL's and SGLang's custom all-reduce behind a product (off)
against epilogue_multicast's pushed tiles (on).

    python3 -m benchmark.kernels.peer_sums --out OUT [--ranks 2] [--rows 1,2,6,8] [--hidden 4096] [--k 4096]

A process a rank, a GPU each. A graph holds --layers layers, each with weights of its own, one after the other as in a decode step; the time is that of a
layer, of every repeat the slower rank's. Arms:
    product      torch's product alone: what a layer costs at least
    nccl, sglang product, that library's all-reduce of bf16 partial sums, residual and norm with torch, two kernels
    nccl alone, sglang alone    its all-reduce and nothing else
    pushed       epilogue_multicast: product, push, sum in fp32, residual, norm
`sum_us` of an arm is what it takes beside the product. SGLang's is the one that its server would choose for the group (dispatch_custom_allreduce);
where sglang is not installed or has none for these GPUs, a note says so. No multicast object is made.

Checked before the times: the gate of the pushed outputs against float64, and that all ranks have the same bits of them. Needs torch, as many GPUs
as ranks, and the package; with --device cpu, SGL_LOWLATENCY_EMULATE=1 and small sizes, gloo's all-reduce stands for NCCL's. Exit status: 0 if every
case was measured and no check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmark.common import deadline
from benchmark.common import ranks as rank_processes
from benchmark.common.ranks import Place
from benchmark.kernels.epilogue_multicast import EPS, WEIGHTS, oracle
from sgl_lowlatency.bench import stats, timing
from sgl_lowlatency.bench.results import Results
from sgl_lowlatency.build.device_limits import device_limits
from sgl_lowlatency.build.symmetric_workspace import Terms, build_symmetric_workspace
from sgl_lowlatency.cli.bench import numbers
from sgl_lowlatency.kernels.epilogue_multicast import MAX_ROWS, EpilogueMulticast, RankTensors
from sgl_lowlatency.kernels.fault import describe_fault
from sgl_lowlatency.reference.gate import figure

MODULE = "benchmark.kernels.peer_sums"
MEETING_S = 60.0
PRODUCT, PUSHED = "product", "pushed"


def custom_all_reduce(place: Place) -> tuple[Any, str]:
    """(SGLang's communicator for the group or None, what it is or why there is none)."""
    if place.device.type != "cuda":
        return None, "SGLang's all-reduce needs GPUs"
    try:
        from sglang.srt.distributed.device_communicators.custom_all_reduce import dispatch_custom_allreduce
        from sglang.srt.distributed.parallel_state import init_distributed_environment
    except ImportError as error:
        return None, f"sglang does not import: {error}"
    # Its choice asks its own world group which of the ranks looks for peer access.
    init_distributed_environment(world_size=place.num_ranks, rank=place.rank, local_rank=place.rank, backend="nccl")
    make = dispatch_custom_allreduce(group=place.group, device=place.device)
    made = make(group=place.group, device=place.device)
    name = type(made).__name__
    return (None, f"sglang's {name} is disabled for these GPUs") if made.disabled else (made, f"sglang's all-reduce is {name}")


class Case:
    """All arms on this rank's tensors. nccl: the group of the collectives, of NCCL or gloo; custom: SGLang's communicator or None."""

    def __init__(self, place: Place, rows: int, hidden: int, k: int, layers: int, nccl: dist.ProcessGroup, custom: Any, deadline_s: float) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:  # the same on every rank
            return (torch.randn(*shape, generator=generator) * scale).bfloat16()

        self.place, self.nccl, self.custom = place, nccl, custom
        device, share = place.device, slice(place.rank * k // place.num_ranks, (place.rank + 1) * k // place.num_ranks)
        self.whole_weight, self.whole_input = random(hidden, k, scale=k**-0.5), random(rows, k)  # of layer 0, which is judged
        residual, norm = random(rows, hidden, scale=4.0), (1 + 0.1 * torch.randn(hidden, generator=generator)).bfloat16()
        self.input, self.residual, self.norm = self.whole_input[:, share].contiguous().to(device), residual.to(device), norm.to(device)
        first = self.whole_weight[:, share].contiguous().to(device)
        self.weights = [first, *(torch.randn_like(first.float()).mul_(k**-0.5).bfloat16() for _ in range(layers - 1))]
        self.partial = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
        limits = device_limits(device)
        blocks = min(limits.grid, hidden // 16)
        terms = Terms("epilogue_multicast", "bench", blocks, (rows,), rows, hidden)
        self.workspace = build_symmetric_workspace(terms, device, place.group, MEETING_S)
        self.steps = [
            EpilogueMulticast([weight], self.norm, blocks_per_rank=blocks, deadline_s=deadline_s, workspaces=self.workspace.mapped, rms_eps=EPS)
            for weight in self.weights
        ]
        self.ours = RankTensors(self.input, self.residual, torch.empty_like(self.residual), torch.empty_like(self.residual))

    def arms(self) -> dict[str, Callable[[], None]]:
        arms: dict[str, Callable[[], None]] = {PRODUCT: self.launch_product, PUSHED: self.launch_pushed}
        arms |= {"nccl": lambda: self.launch_standard(self._nccl_sum), "nccl alone": lambda: self.launch_alone(self._nccl_sum)}
        if self.custom is not None:
            sum_of = self.custom.custom_all_reduce
            arms |= {"sglang": lambda: self.launch_standard(sum_of), "sglang alone": lambda: self.launch_alone(sum_of)}
        return arms

    def _nccl_sum(self, partial: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(partial, group=self.nccl)
        return partial

    def launch_product(self) -> None:
        for weight in self.weights:
            torch.mm(self.input, weight.T, out=self.partial)

    def launch_alone(self, sum_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for _ in self.weights:
            sum_of(self.partial)

    def launch_standard(self, sum_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for weight in self.weights:
            torch.mm(self.input, weight.T, out=self.partial)
            total = sum_of(self.partial) + self.residual
            torch.nn.functional.rms_norm(total, (total.shape[-1],), self.norm, EPS)

    def launch_pushed(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.place.device.type == "cuda" else 0
        for layer, step in enumerate(self.steps):
            step.run([self.ours], layer, stream)

    def problems(self) -> list[str]:
        """Of the pushed layer 0, the same on every rank: what misses the gate, or is not the same everywhere."""
        self.place.barrier()
        stream = torch.cuda.current_stream().cuda_stream if self.place.device.type == "cuda" else 0
        self.steps[0].run([self.ours], 0, stream)
        self.place.barrier()
        wanted = oracle(self.whole_input[None], self.whole_weight[None], self.residual.cpu(), self.norm.cpu())
        rounded = [output.bfloat16() for output in wanted]
        outputs = [self.ours.sum.cpu(), self.ours.normed.cpu()]
        results = [figure(*output) for output in zip(("sum", "normed"), outputs, rounded, wanted, strict=True)]
        found = [str(result) for result in results if not result.passed]
        found += [describe_fault(record, "epilogue_multicast") for step in self.steps for record in step.faults()]
        digest = hashlib.sha256(b"".join(output.view(torch.int16).numpy().tobytes() for output in outputs)).hexdigest()
        of_ranks = self.place.gather((digest, found))
        said = [f"rank {rank}: {what}" for rank, (_, of_rank) in enumerate(of_ranks) for what in of_rank]
        return said + [f"rank {rank} has other bits than rank 0" for rank, (one, _) in enumerate(of_ranks) if one != of_ranks[0][0]]

    def measure(self, groups: int, group_ms: float) -> dict[str, list[list[float]]]:
        """[rank][repeat] us a layer of every arm."""
        replays = {}
        for name, run in self.arms().items():
            self.place.barrier()
            run()
            self.place.barrier()
            replays[name] = self._capture(name, run)
        counts = {}
        for name, replay in replays.items():
            self.place.barrier()
            counts[name] = max(int(group_ms / self._group_ms(replay, 2)), 2)
        counts = self.place.gather(counts)[0]  # as many launches on every rank
        own: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(groups):
            for name, replay in replays.items():
                self.place.barrier()
                own[name].append(1e3 * self._group_ms(replay, counts[name]) / len(self.weights))
        of_ranks = self.place.gather(own)
        return {name: [of_rank[name] for of_rank in of_ranks] for name in replays}

    def _capture(self, name: str, run: Callable[[], None]) -> Callable[[], None]:
        if self.place.device.type != "cuda":
            return run
        with self.custom.capture() if name.startswith("sglang") else contextlib.nullcontext():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread looks at events meanwhile
                run()
            return graph.replay

    def _group_ms(self, replay: Callable[[], None], count: int) -> float:
        replay()  # the ranks are together behind it
        if self.place.device.type == "cuda":
            return timing.group_ms(replay, count)
        began = time.perf_counter()
        for _ in range(count):
            replay()
        return 1e3 * (time.perf_counter() - began) / count


def rows_of(num_ranks: int, rows: int, hidden: int, k: int, layers: int, times: dict[str, list[list[float]]], wrong: list[str]) -> list[dict]:
    """The results rows of a case: one a rival with both arms, and one of what has none."""
    slower = {name: [max(of_repeat) for of_repeat in zip(*by_rank, strict=True)] for name, by_rank in times.items()}
    product_us = stats.median(slower[PRODUCT])
    case = {
        "model": f"out_proj-{hidden}x{k}", "dtype": "bf16", "tp": num_ranks, "mode": "decode", "kernel": "epilogue_multicast", "metric": "layer",
        "batch": rows, "rows": rows, "hidden": hidden, "k": k, "layers": layers, "product_us": round(product_us, 3),
        "on_ms": [round(us / 1e3, 6) for us in slower[PUSHED]], "sum_us": round(stats.median(slower[PUSHED]) - product_us, 3), "problems": wrong,
    }  # fmt: skip
    found = []
    for rival in (name for name in times if f"{name} alone" in times):
        found.append(case | {
            "against": rival, "off_ms": [round(us / 1e3, 6) for us in slower[rival]],
            "off_sum_us": round(stats.median(slower[rival]) - product_us, 3), "alone_us": [round(us, 3) for us in slower[f"{rival} alone"]],
        })  # fmt: skip
    return found


def table(content: dict) -> str:
    """One line a case and rival, microseconds a layer."""
    lines = [f"{content['gpu']}, driver {content['driver']}, {content['versions']}", content["notes"]]
    lines.append(
        f"{'ranks':>5} {'rows':>4} {'against':>8} {'off':>8} {'pushed':>8} {'product':>8} {'ratio':>6} | beside the product: "
        f"{'off':>7} {'pushed':>7} {'its all-reduce alone':>20}  problems"
    )
    for row in content["rows"]:
        lines.append(
            f"{row['tp']:5d} {row['rows']:4d} {row['against']:>8} {1e3 * stats.median(row['off_ms']):8.2f} {1e3 * stats.median(row['on_ms']):8.2f}"
            f" {row['product_us']:8.2f} {row['ratio']:6.2f} | {'':20}{row['off_sum_us']:7.2f} {row['sum_us']:7.2f}"
            f" {stats.median(row['alone_us']):20.2f}  {'; '.join(row['problems']) or '-'}"
        )
    return "\n".join(lines)


def child(args: argparse.Namespace) -> int:
    place = rank_processes.join(args)
    nccl = dist.new_group(backend="nccl" if place.device.type == "cuda" else "gloo")
    custom, note = custom_all_reduce(place)
    results = None
    if place.rank == 0:
        results = Results(
            args.out, what="kernel", name=args.name, weights=WEIGHTS, command=["python3", "-m", MODULE, *rank_processes.typed(sys.argv[1:])],
            commit=args.commit, notes=note,
        )  # fmt: skip
        results.set(num_gpus=place.num_ranks if place.device.type == "cuda" else 0)
    deadline.watchdog(args.deadline, None if results is None else lambda: print(table(results.content)))
    fine = True
    for rows in args.rows:
        case = Case(place, rows, args.hidden, args.k, args.layers, nccl, custom, args.kernel_deadline)
        wrong = case.problems()
        times = case.measure(args.groups, args.group_ms)
        fine = fine and not wrong
        place.barrier()
        case.workspace.close()
        if results is not None:
            for row in rows_of(place.num_ranks, rows, args.hidden, args.k, args.layers, times, wrong):
                row = results.add(**row)
                deadline.say(f"{rows} rows against {row['against']}: ratio {row['ratio']}; {'; '.join(wrong[:3]) or 'output checked'}")
    if results is not None:
        print(table(results.content), flush=True)
    place.barrier()
    return 0 if fine else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rank_processes.add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="kernel-peer-sums", help="results file name")
    parser.add_argument("--rows", type=numbers(1, MAX_ROWS), default=(1, 2, 6, 8))
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--k", type=int, default=4096, help="of all ranks together")
    parser.add_argument("--layers", type=int, default=36, help="layers in a graph")
    parser.add_argument("--groups", type=int, default=7, help="times taken of every case")
    parser.add_argument("--group-ms", type=float, default=20.0, help="how long each replays")
    parser.add_argument("--kernel-deadline", type=float, default=5.0, help="deadline of every wait in the kernel, s")
    parser.add_argument("--commit", default=None, help="HASH or HASH-dirty of the code, for a copy without git")
    parser.add_argument("--deadline", type=float, default=120, help="seconds after which everything is killed")
    args = parser.parse_args()
    if args.rank is not None:
        return child(args)
    if refusal := rank_processes.missing(args):
        print(f"peer_sums: {refusal}", file=sys.stderr)
        return 2
    return rank_processes.run(MODULE, sys.argv[1:], args.ranks, args.deadline + 10)


if __name__ == "__main__":
    sys.exit(main())
