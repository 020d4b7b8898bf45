"""GPU time of decode_step whose model is split over real GPUs, and where a layer of it spends that time.

    python3 -m benchmark.kernels.parallel_step --out OUT [--ranks 2] [--models qwen3-8b] [--rows 1,2,8] [--contexts 1024] [--layers N]

A process a rank, a GPU each. Arms, all on the same weights and the same cached K and V, each with workspaces of its own:
    whole       the whole model's step on each GPU by itself
    served      the tensor-parallel step that servers run
    timed       the same with the clock read at points of a layer: its time says what the clock costs, its phases where a layer's time goes
No server, no scheduler, no sampling: what a served step takes beside `served` is not the kernel's. A step ends with its LM head, as served ones do.
Graphs of one launch are replayed back to back between two events, behind one replay that brings the ranks together; arms in turn; of every repeat the
slower rank counts.

Checked before the times: all ranks' hidden states have the same bits, timed or not, eager and replayed, and are as near to the whole
step's as sums of another order are; logits are written in full. Needs torch, as many GPUs as ranks, and the package; with --device cpu,
SGL_LOWLATENCY_EMULATE=1 and small shapes. Exit status: 0 if every case was measured and no check failed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmark import models
from benchmark.common import deadline
from benchmark.common import ranks as rank_processes
from benchmark.common.ranks import Place
from sgl_lowlatency.bench import decode_step, floors, read_bandwidth, stats, timeline, timing
from sgl_lowlatency.bench.inputs import Inputs, Pool
from sgl_lowlatency.bench.results import Results
from sgl_lowlatency.bench.shapes import Shape
from sgl_lowlatency.build.device_limits import device_limits
from sgl_lowlatency.build.rank_group import meet
from sgl_lowlatency.cli.bench import numbers
from sgl_lowlatency.kernels.decode_step import DecodeStep
from sgl_lowlatency.kernels.fault import describe_fault
from sgl_lowlatency.kernels.rank_group import MAX_TIMED_ROWS
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.plan.tiles import grid_for
from sgl_lowlatency.reference.inputs import random_weights
from sgl_lowlatency.reference.sharding import shard_weights

MODULE = "benchmark.kernels.parallel_step"
HIDDEN_RELATIVE_L2 = 0.05  # of hidden states from the whole step's: rounding to bf16 in another order, 36 layers deep
MEETING_S = 60.0
ARMS = WHOLE, SERVED, TIMED = "whole", "served", "timed"
LAUNCHES = 8  # whose timelines are read


class Arm:
    """A step and what one case launches of it."""

    def __init__(self, name: str, step: DecodeStep, device: torch.device) -> None:
        self.name, self.step, self.device = name, step, device
        self.replay: Callable[[], None] = self.launch

    def begin(self, inputs: Inputs) -> None:
        """Outputs of its own; on a GPU a graph, behind a first launch."""
        rows, g = inputs.hidden.shape[0], self.step.geometry
        self.hidden = torch.full_like(inputs.hidden, float("nan"))
        self.logits = torch.full((rows, g.vocab), float("nan"), device=self.device)
        self._inputs = (rows, *inputs.tensors)
        self.replay = self.launch
        self.launch()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.replay = timing.capture(self.launch).replay

    def launch(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0
        self.step.launch(*self._inputs, self.hidden, stream, logits=self.logits)

    def outputs(self, run: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, logits) of one run."""
        self.hidden.fill_(float("nan"))
        self.logits.fill_(float("nan"))
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.hidden.cpu(), self.logits.cpu()


class Rank:
    """A model's arms on this rank. rows: of the steps."""

    def __init__(self, place: Place, name: str, shape: Shape, rows: tuple[int, ...], kernel_deadline_s: float = 5.0) -> None:
        self.place, self.shape, self.rows, device = place, shape, rows, place.device
        geometry, limits = shape.geometry, device_limits(device)
        local = geometry.shard(place.num_ranks)
        weights = random_weights(geometry, 0, device, shape.has_qk_norm, shape.has_qkv_bias, has_lm_head=True)
        shard = shard_weights(geometry, weights, place.rank, place.num_ranks)

        def plans_of(g, grid):
            return {r: make_plan(g, r, grid, limits.shared_memory_bytes, has_head=True) for r in rows}

        whole_plans = plans_of(geometry, grid_for(geometry, limits.grid))
        self.plans = plans_of(local, grid_for(local, limits.grid))
        self.arms = [Arm(WHOLE, DecodeStep(geometry, whole_plans, weights, device, kernel_deadline_s), device)]

        points = (next(iter(self.plans.values())).grid, local.num_layers, len(timeline.POINTS))
        for arm, clock in ((SERVED, None), (TIMED, torch.zeros(points, dtype=torch.int64, device=device))):
            group = meet(f"{name}, {arm}", geometry.vocab, self.plans, device, place.group, MEETING_S)
            step = DecodeStep(local, self.plans, shard, device, kernel_deadline_s, group=group, timeline=clock)
            self.arms.append(Arm(arm, step, device))

    def attach(self, pool: Pool) -> None:
        """The whole pool to the whole step, this rank's heads of it to the others."""
        def share(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
            return [buffer.chunk(self.place.num_ranks, 1)[self.place.rank].contiguous() for buffer in buffers]

        k, v = share(pool.k), share(pool.v)
        self.arms[0].step.attach_kv(pool.k, pool.v, pool.req_to_token)
        for arm in self.arms[1:]:
            arm.step.attach_kv(k, v, pool.req_to_token)

    def problems(self) -> list[str]:
        """Of the begun case, what is wrong, the same on every rank."""
        found, digests = [], []
        for arm in self.arms:
            for how, run in (("eager", arm.launch), ("replayed", arm.replay)):
                self.place.barrier()
                hidden, logits = arm.outputs(run)
                if arm.name == WHOLE:
                    whole_hidden = hidden
                    continue
                digests.append((f"{arm.name}, {how}", hashlib.sha256(hidden.view(torch.int16).numpy().tobytes()).hexdigest()))
                if logits.isnan().any():
                    found.append(f"{arm.name}, {how}: logits are not written in full")
                distance = float((hidden.float() - whole_hidden.float()).norm() / whole_hidden.float().norm())
                if not distance <= HIDDEN_RELATIVE_L2:
                    found.append(f"{arm.name}, {how}: hidden states are {distance:.3g} from the whole step's")
            record = arm.step.fault()
            found += [] if record is None else [describe_fault(record)]
        of_ranks = self.place.gather((digests, found))
        first = of_ranks[0][0][0][1]
        different = [f"{name} on rank {rank}" for rank, (of_rank, _) in enumerate(of_ranks) for name, digest in of_rank if digest != first]
        said = [f"rank {rank}: {what}" for rank, (_, of_rank) in enumerate(of_ranks) for what in of_rank]
        return said + ([f"other bits than {SERVED}, eager on rank 0: {', '.join(different)}"] if different else [])

    def times(self, groups: int, group_ms: float) -> list[list[list[float]]]:
        """[arm][rank][repeat] ms a step."""
        counts = []
        for arm in self.arms:
            self.place.barrier()
            counts.append(max(int(group_ms / self._group_ms(arm, 3)), 3))
        counts = self.place.gather(counts)[0]  # as many launches on every rank
        own: list[list[float]] = [[] for _ in self.arms]
        for _ in range(groups):
            for found, arm, count in zip(own, self.arms, counts, strict=True):
                self.place.barrier()
                found.append(self._group_ms(arm, count))
        of_ranks = self.place.gather(own)
        return [[of_rank[index] for of_rank in of_ranks] for index in range(len(self.arms))]

    def _group_ms(self, arm: Arm, count: int) -> float:
        arm.replay()  # the ranks are together behind it
        if self.place.device.type == "cuda":
            return timing.group_ms(arm.replay, count)
        began = time.perf_counter()
        for _ in range(count):
            arm.replay()
        return 1e3 * (time.perf_counter() - began) / count

    def phases(self) -> tuple[list[dict], list[str]]:
        """(of the timed arm, over LAUNCHES launches and all ranks; why a rank has none: a block without tiles of an operation passes no point of
        it)"""
        taken, arm = [], self.arms[ARMS.index(TIMED)]
        self.place.barrier()
        for _ in range(LAUNCHES):
            arm.step.timeline.zero_()
            arm.replay()
            taken.append(arm.step.timeline.cpu())
        own, wrong = [], None
        try:
            own = timeline.rows(torch.cat(taken), self.place.rank)
        except ValueError as error:
            wrong = f"rank {self.place.rank}: {error}"
        found = self.place.gather((own, wrong))
        return [row for rows, _ in found for row in rows], [text for _, text in found if text is not None]


def row_of(name: str, shape: Shape, num_ranks: int, rows: int, context: int, arm: str, by_rank: list[list[float]], read_gb_s: float | None,
           wrong: list[str]) -> dict:
    """The results row of one arm of a case."""
    on_ms = [max(of_repeat) for of_repeat in zip(*by_rank, strict=True)]
    tp = 1 if arm == WHOLE else num_ranks
    row = {
        "model": name, "dtype": "bf16", "tp": tp, "mode": "decode", "kernel": "decode_step", "metric": "step", "batch": rows, "rows": rows,
        "context": context, "layers": shape.num_layers, "arm": arm, "on_ms": [round(ms, 5) for ms in on_ms],
        "by_rank_ms": [[round(ms, 5) for ms in of_rank] for of_rank in by_rank], "problems": wrong,
    }  # fmt: skip
    if read_gb_s is not None:
        moved = floors.step_bytes(shape, rows=rows, context=context, with_head=True) // tp
        row |= {"floor_ms": floors.floor_ms(moved, read_gb_s), "floor_bytes": moved, "read_gb_s": round(read_gb_s)}
    return row


def table(content: dict) -> str:
    """One line an arm, then the phases of each case."""
    lines = [f"{content['gpu']}, driver {content['driver']}, {content['versions']}"]
    lines.append(f"{'model':>12} {'tp':>2} {'rows':>4} {'context':>7} {'arm':>6} {'ms':>8} {'us a layer':>10} {'of floor':>8}  problems")
    for row in (row for row in content["rows"] if row["metric"] == "step"):
        ms = stats.median(row["on_ms"])
        share = f"{100 * row['on_floor_share']:.0f} %" if "on_floor_share" in row else "-"
        lines.append(
            f"{row['model']:>12} {row['tp']:2d} {row['rows']:4d} {row['context']:7d} {row['arm']:>6} {ms:8.4f} {1e3 * ms / row['layers']:10.2f}"
            f" {share:>8}  {'; '.join(row['problems']) or '-'}"
        )
    for row in (row for row in content["rows"] if row["metric"] == "timeline"):
        lines.append(f"\n{row['model']}, {row['rows']} rows of {row['context']}")
        lines.append(timeline.table(row["phases"]) if row["phases"] else "; ".join(row["problems"]))
    return "\n".join(lines)


def measure(place: Place, name: str, shape: Shape, args: argparse.Namespace, results: Results | None, read_gb_s: float | None) -> bool:
    """All cases of a model; rank 0 keeps the rows. Whether every check passed."""
    rank, fine = Rank(place, name, shape, args.rows, args.kernel_deadline), True
    try:
        for context in args.contexts:
            pool = Pool(shape, max(args.rows), context, place.device)
            rank.attach(pool)
            for rows in args.rows:
                inputs = Inputs.make(shape, pool, rows, context, place.device)
                for arm in rank.arms:
                    place.barrier()
                    arm.begin(inputs)
                wrong = rank.problems()
                fine = fine and not wrong
                of_arms = rank.times(args.groups, args.group_ms)
                phases, missed = rank.phases()
                fine = fine and not missed
                if results is None:
                    continue
                case = name, shape, place.num_ranks, rows, context
                for arm, by_rank in zip(rank.arms, of_arms, strict=True):
                    row = results.add(**row_of(*case, arm.name, by_rank, read_gb_s, wrong), plan=rank.plans[rows].hash[:12])
                    deadline.say(f"{name}, {rows} rows of {context}, {arm.name}: {stats.median(row['on_ms']):.4f} ms")
                results.add(model=name, tp=place.num_ranks, metric="timeline", rows=rows, context=context, phases=phases, problems=missed)
                deadline.say("; ".join(wrong) or "output checked")
    except RuntimeError:  # a kernel that ended itself took the CUDA context with it; its record says why
        for arm in rank.arms:
            if (record := arm.step.fault()) is not None:
                deadline.say(f"rank {place.rank}, {arm.name}: {describe_fault(record)}")
        raise
    return fine


def child(args: argparse.Namespace) -> int:
    place = rank_processes.join(args)
    results, read_gb_s = None, None
    if place.device.type == "cuda":
        read_gb_s = min(place.gather(read_bandwidth.measure()["read_gb_s"]))
    if place.rank == 0:
        results = Results(
            args.out, what="kernel-step", name=args.name, weights=decode_step.WEIGHTS,
            command=["python3", "-m", MODULE, *rank_processes.typed(sys.argv[1:])], commit=args.commit,
        )  # fmt: skip
        results.set(num_gpus=place.num_ranks if place.device.type == "cuda" else 0)
    deadline.watchdog(args.deadline, None if results is None else lambda: print(table(results.content)))
    fine = all([measure(place, name, models.named_shape(name, args.layers), args, results, read_gb_s) for name in args.models.split(",")])
    if results is not None:
        print(table(results.content), flush=True)
    place.barrier()
    return 0 if fine else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rank_processes.add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="kernel-parallel-step", help="results file name")
    parser.add_argument("--models", default="qwen3-8b", help=f"comma list out of {', '.join(models.SHAPES)}; dense ones")
    parser.add_argument("--layers", type=int, default=None, help="cut the models to this many layers")
    parser.add_argument("--contexts", type=numbers(1, None), default=(1024,))
    parser.add_argument("--rows", type=numbers(1, MAX_TIMED_ROWS), default=(1, 2, 8))
    parser.add_argument("--groups", type=int, default=5, help="times taken of every case")
    parser.add_argument("--group-ms", type=float, default=50.0, help="how long each replays")
    parser.add_argument("--kernel-deadline", type=float, default=5.0, help="deadline of every wait in the kernel, s")
    parser.add_argument("--commit", default=None, help="HASH or HASH-dirty of the code, for a copy without git")
    parser.add_argument("--deadline", type=float, default=200, help="seconds after which everything is killed")
    args = parser.parse_args()
    if args.rank is not None:
        return child(args)
    if refusal := rank_processes.missing(args):
        print(f"parallel_step: {refusal}", file=sys.stderr)
        return 2
    return rank_processes.run(MODULE, sys.argv[1:], args.ranks, args.deadline + 10)


if __name__ == "__main__":
    sys.exit(main())
