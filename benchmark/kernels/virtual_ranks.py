"""GPU time of decode_step whose model is split over virtual ranks of one GPU (on) against the whole model's step on the same GPU (off).

    python3 -m benchmark.kernels.virtual_ranks --out OUT [--virtual-ranks 2,4] [--models qwen3-8b] [--layers 36] [--contexts 1024] [--rows 1,6,8]

Both read the same weights and the same cached K and V once; a rank has its share of them on its share of the SMs. So the difference, over the layers,
is what two sums of all ranks cost a layer, and what smaller shares lose: fewer tiles a block, and blocks left over where a rank's qkv has few.
Virtual ranks share one memory: no NVLink is in these times. Graphs of one launch each are replayed back to back between two events, in turn.

Checked before the times: every rank's hidden states have the same bits, eager and replayed, and are as near to the whole step's as two sums of
another order are.
Needs torch, a GPU and the package. Exit status: 0 if every case was measured and no check failed.
"""

from __future__ import annotations

import sys

import torch

from benchmark import models
from benchmark.common import deadline
from benchmark.kernels import command
from sgl_lowlatency.bench import decode_step, stats, timing
from sgl_lowlatency.bench.inputs import Inputs, Pool
from sgl_lowlatency.bench.results import Results
from sgl_lowlatency.bench.shapes import Shape
from sgl_lowlatency.build.device_limits import device_limits
from sgl_lowlatency.cli.bench import numbers
from sgl_lowlatency.kernels.decode_step import DecodeStep
from sgl_lowlatency.kernels.rank_group import MAX_ROWS, MAX_VIRTUAL_RANKS
from sgl_lowlatency.kernels.virtual_ranks import VirtualRanks, virtual_groups
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.plan.tiles import grid_for
from sgl_lowlatency.reference.sharding import shard_weights

HIDDEN_RELATIVE_L2 = 0.05  # of the ranks' hidden states from the whole step's: rounding to bf16 in another order, 36 layers deep


class Ranks:
    """The virtual ranks of a model whose whole step is `whole`."""

    def __init__(self, whole: decode_step.Model, num_ranks: int, rows: tuple[int, ...]) -> None:
        self.whole, self.num_ranks, device = whole, num_ranks, whole.device
        limits, geometry = device_limits(device), whole.shape.geometry
        local = geometry.shard(num_ranks)
        self.grid = grid_for(local, limits.grid // num_ranks)
        plans = {r: make_plan(local, r, self.grid, limits.shared_memory_bytes, has_head=True) for r in rows}
        shards = [shard_weights(geometry, whole.step.weights, rank, num_ranks) for rank in range(num_ranks)]
        groups = virtual_groups(num_ranks, max(rows), geometry.hidden, geometry.vocab, device)
        self.steps = [DecodeStep(local, plans, shard, device, whole.settings.kernel_deadline_s, group=group) for shard, group in zip(shards, groups)]
        self.ranks, self.plans = VirtualRanks(self.steps), plans

    def attach(self, pool: Pool) -> None:
        """Every rank's heads of the pool."""
        def share(kind: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
            return [buffer.chunk(self.num_ranks, 1)[rank].contiguous() for buffer in kind]

        self._pools = [(share(pool.k, rank), share(pool.v, rank)) for rank in range(self.num_ranks)]
        for step, (k, v) in zip(self.steps, self._pools):
            step.attach_kv(k, v, pool.req_to_token)
        if self.whole.device.type == "cuda":
            self.ranks.require_resident()

    def arguments(self, inputs: Inputs) -> list[dict]:
        """What each rank's step takes, with outputs of its own."""
        names = ("input_ids", "positions", "seq_lens", "req_pool_indices", "out_cache_loc")
        rows = inputs.hidden.shape[0]
        return [
            dict(zip(names, inputs.tensors)) | {
                "rows": rows, "hidden_out": torch.full_like(inputs.hidden, float("nan")),
                "logits": torch.full((rows, step.geometry.vocab), float("nan"), device=inputs.hidden.device),
            }
            for step in self.steps
        ]  # fmt: skip

    def launch(self, arguments: list[dict]) -> None:
        self.ranks.launch(arguments, torch.cuda.current_stream().cuda_stream if self.whole.device.type == "cuda" else 0)


def problems(ranks: Ranks, arguments: list[dict], replay, whole_hidden: torch.Tensor) -> list[str]:
    """What is wrong with an eager launch and a replay."""
    found, seen = [], []
    for run in (lambda: ranks.launch(arguments), replay):
        for one in arguments:
            one["hidden_out"].fill_(float("nan"))
            one["logits"].fill_(float("nan"))
        run()
        if whole_hidden.is_cuda:
            torch.cuda.synchronize()
        seen += [one["hidden_out"].clone() for one in arguments]
        if any(one["logits"].isnan().any() for one in arguments):
            found.append("logits are not written in full")
    found += ranks.ranks.faults()
    if not all(torch.equal(seen[0], other) for other in seen[1:]):
        found.append("ranks or replays differ")
    distance = float((seen[0].float() - whole_hidden.float()).norm() / whole_hidden.float().norm())
    if not distance <= HIDDEN_RELATIVE_L2:
        found.append(f"hidden states are {distance:.3g} from the whole step's")
    return found


def row_of(
    name: str, shape: Shape, num_ranks: int, grid: int, rows: int, context: int, off_ms: list[float], on_ms: list[float], wrong: list[str]
) -> dict:
    """The results row of one case."""
    a_layer = (stats.median(on_ms) - stats.median(off_ms)) / shape.num_layers
    return {
        "model": name, "dtype": "bf16", "tp": num_ranks, "mode": "decode", "kernel": "decode_step", "metric": "step", "batch": rows, "rows": rows,
        "virtual_ranks": num_ranks, "blocks_per_rank": grid, "context": context, "layers": shape.num_layers,
        "off_ms": [round(t, 5) for t in off_ms], "on_ms": [round(t, 5) for t in on_ms], "a_layer_us": round(1e3 * a_layer, 3), "problems": wrong,
    }  # fmt: skip


def table(content: dict) -> str:
    """One line a case."""
    lines = [f"{content['gpu']}, driver {content['driver']}, {content['versions']}"]
    lines.append(f"{'model':>14} {'ranks':>5} {'blocks':>6} {'rows':>4} {'context':>7} {'off ms':>8} {'on ms':>8} {'us a layer':>10}  problems")
    for row in content["rows"]:
        lines.append(
            f"{row['model']:>14} {row['virtual_ranks']:5d} {row['blocks_per_rank']:6d} {row['rows']:4d} {row['context']:7d}"
            f" {stats.median(row['off_ms']):8.4f} {stats.median(row['on_ms']):8.4f} {row['a_layer_us']:10.2f}  {'; '.join(row['problems']) or '-'}"
        )
    return "\n".join(lines)


def measure(name: str, shape: Shape, settings: decode_step.Settings, ranks_of: tuple[int, ...], results: Results, device: torch.device) -> None:
    """Adds a row for every number of ranks, context and row count of one model."""
    whole = decode_step.Model(shape, settings, device)
    for num_ranks in ranks_of:
        ranks = Ranks(whole, num_ranks, settings.rows)
        for context in settings.contexts:
            pool = whole.pool(context)
            ranks.attach(pool)
            for rows in settings.rows:
                inputs = Inputs.make(shape, pool, rows, context, device)
                arguments = ranks.arguments(inputs)
                whole.launch_with_head(inputs)
                ranks.launch(arguments)
                torch.cuda.synchronize()
                graphs = [timing.capture(run) for run in (lambda: whole.launch_with_head(inputs), lambda: ranks.launch(arguments))]
                graphs[0].replay()
                torch.cuda.synchronize()
                wrong = problems(ranks, arguments, graphs[1].replay, inputs.hidden.clone())
                off_ms, on_ms = timing.in_turn([graph.replay for graph in graphs], groups=settings.groups, target_ms=settings.group_ms)
                row = results.add(**row_of(name, shape, num_ranks, ranks.grid, rows, context, off_ms, on_ms, wrong), plan=ranks.plans[rows].hash[:12])
                verdict = "; ".join(wrong[:3]) or "output checked"
                deadline.say(f"{name}, {num_ranks} ranks, {rows} rows of {context}: {row['a_layer_us']} us a layer; {verdict}")
        del ranks


def main() -> int:
    default = decode_step.Settings()
    parser = command.parser(__doc__, "kernel-virtual-ranks", groups=default.groups, group_ms=default.group_ms)
    parser.add_argument("--virtual-ranks", type=numbers(2, MAX_VIRTUAL_RANKS), default=(2, 4))
    parser.add_argument("--models", default="qwen3-8b", help=f"comma list out of {', '.join(models.SHAPES)}")
    parser.add_argument("--layers", type=int, default=None, help="cut the models to this many layers")
    parser.add_argument("--contexts", type=numbers(1, None), default=(1024,))
    parser.add_argument("--rows", type=numbers(1, MAX_ROWS), default=(1, 6, 8))
    args = parser.parse_args()
    if command.refused("virtual_ranks"):
        return 2
    settings = decode_step.Settings(args.rows, args.contexts, args.groups, args.group_ms)
    results = command.begin(args, "virtual_ranks", decode_step.WEIGHTS, table, "kernel-step")
    device = command.device()
    for name in args.models.split(","):
        measure(name, models.named_shape(name, args.layers), settings, args.virtual_ranks, results, device)
        torch.cuda.empty_cache()
    return command.end(results, table)


if __name__ == "__main__":
    sys.exit(main())
