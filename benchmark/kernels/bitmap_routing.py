"""GPU time of MoE routing: SGLang's softmax router and alignment (off), bitmap_routing (on), on the same logits in one process.

    python3 -m benchmark.kernels.bitmap_routing --out OUT [--rows 1,2,4,8,16] [--experts 64,128,256,384] [--top-k 8]

A graph holds the routing of --layers layers, each with logits of its own, one after the other as in a decode step; the time is that of a layer.
Off is what SGLang runs for a Qwen3-MoE layer between the router's matrix product and the experts' first: `fused_topk` and
`moe_align_block_size` for tiles of 16 rows. The graphs are replayed back to back between two events, in turn. In a step other kernels stand between
two layers' routings: what an early start of the next launch hides here, it may not hide there.

Checked before the times: ids and their order equal, weights to float32's rounding, the experts of SGLang's tiles and the choices in each
are those of the bitmaps. Needs torch, SGLang, a GPU and the package.

Exit status: 0 if every case was measured and no check failed.
"""

from __future__ import annotations

import sys

import torch

from benchmark.common import deadline
from benchmark.kernels import command
from sgl_lowlatency.bench import stats, timing
from sgl_lowlatency.cli.bench import numbers
from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.bitmap_routing import MAX_EXPERTS, BitmapRouting, Routing

TILE_ROWS = 16  # of SGLang's grouped matrix product at these sizes: moe_align_block_size's block_size
WEIGHTS = "random logits, normal of variance 4, bf16, seed 0"
NEAR_WEIGHT = 1e-5  # relative: float32 exponentials and sums in two orders


def layer_logits(rows: int, num_experts: int, layers: int, device: torch.device) -> list[torch.Tensor]:
    """[rows, num_experts] bf16 of every layer."""
    generator = torch.Generator(device=device).manual_seed(0)
    return [(2 * torch.randn(rows, num_experts, generator=generator, device=device)).bfloat16() for _ in range(layers)]


def choices_of_tiles(tokens: list[int], tile_rows: int, num_choices: int) -> list[list[int]]:
    """The choices (indices of the flattened ids) in each of SGLang's tiles, ascending; padding left out."""
    tiles = [tokens[begin : begin + tile_rows] for begin in range(0, len(tokens), tile_rows)]
    return [sorted(choice for choice in tile if choice < num_choices) for tile in tiles]


def problems(ours: Routing, ids: torch.Tensor, weights: torch.Tensor, tokens: list[int], experts: list[int]) -> list[str]:
    """What of a Routing is not SGLang's. ids, weights: [rows, top_k]; tokens, experts: of its alignment, up to the padded total; at most
    TILE_ROWS rows, so that an expert has one tile."""
    found = []
    if not torch.equal(ours.ids, ids.to(ours.ids.dtype)):
        found.append("ids differ")
    if not torch.allclose(ours.weights, weights, rtol=NEAR_WEIGHT, atol=0.0):
        found.append(f"weights differ by {((ours.weights - weights).abs() / weights).max().item():.3g}")
    num_active = ours.num_active.item()
    if ours.experts[:num_active].tolist() != experts:
        found.append("active experts differ")
    top_k, flat = ids.shape[1], ours.ids.flatten().tolist()
    rows_of = [ours.row_bits[expert].item() & 0xFFFFFFFF for expert in experts]
    mine = [[i for i, chosen in enumerate(flat) if chosen == e and bits >> i // top_k & 1] for e, bits in zip(experts, rows_of, strict=True)]
    if mine != choices_of_tiles(tokens, TILE_ROWS, len(flat)) or sum(bits.bit_count() for bits in rows_of) != len(flat):
        found.append("rows of experts differ")
    return found


class Case:
    """Both arms on the logits of all layers."""

    def __init__(self, rows: int, num_experts: int, top_k: int, layers: int, device: torch.device) -> None:
        self.num_experts, self.top_k = num_experts, top_k
        self.logits = layer_logits(rows, num_experts, layers, device)
        self.hidden = torch.empty(rows, 1, device=device)  # fused_topk asks for its number of rows
        self.router = BitmapRouting(num_experts, top_k, device)
        self.ours = [self.router.outputs(rows) for _ in self.logits]
        self.standard: list[tuple[torch.Tensor, ...]] = []

    def launch_ours(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for logits, out in zip(self.logits, self.ours, strict=True):
            self.router.route(logits, out, stream=stream)

    def launch_standard(self) -> None:
        from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size
        from sglang.srt.layers.moe.topk import fused_topk

        self.standard = []
        for logits in self.logits:
            weights, ids = fused_topk(self.hidden, logits, self.top_k, True)
            self.standard.append((ids, weights, *moe_align_block_size(ids, TILE_ROWS, self.num_experts)))

    def problems(self) -> list[str]:
        """Of the newest launches of both arms, by layer."""
        found = []
        for layer, (ours, (ids, weights, tokens, experts, total)) in enumerate(zip(self.ours, self.standard, strict=True)):
            padded = total.item()
            wrong = problems(ours, ids, weights, tokens[:padded].tolist(), experts[: padded // TILE_ROWS].tolist())
            found += [f"layer {layer}: {what}" for what in wrong]
        return found

    def measure(self, groups: int, group_ms: float) -> tuple[list[float], list[float], list[str]]:
        """(ms a layer of SGLang's, ms a layer of ours, problems)."""
        runs = (self.launch_standard, self.launch_ours)
        for run in runs:
            run()
        torch.cuda.synchronize()
        graphs = [timing.capture(run) for run in runs]  # the outputs are now the graphs'
        for out in self.ours:
            out.buffer.fill_(-77)
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        found = self.problems()
        times = timing.in_turn([graph.replay for graph in graphs], groups=groups, target_ms=group_ms)
        off, on = ([ms / len(self.logits) for ms in arm] for arm in times)
        return off, on, found


def row_of(rows: int, num_experts: int, top_k: int, layers: int, off_ms: list[float], on_ms: list[float], wrong: list[str]) -> dict:
    """The results row of one case."""
    return {
        "model": f"softmax-{num_experts}-top{top_k}", "dtype": "bf16", "tp": 1, "mode": "decode", "kernel": "bitmap_routing", "metric": "layer",
        "batch": rows, "rows": rows, "experts": num_experts, "top_k": top_k, "layers": layers,
        "off_ms": [round(t, 6) for t in off_ms], "on_ms": [round(t, 6) for t in on_ms], "problems": wrong,
    }  # fmt: skip


def table(content: dict) -> str:
    """One line a case, times in microseconds."""
    lines = [f"{content['gpu']}, driver {content['driver']}, {content['versions']}"]
    lines.append(f"{'experts':>7} {'top k':>5} {'rows':>4} {'off us':>8} {'on us':>8} {'ratio':>6} {'ci95':>15}  problems")
    for row in content["rows"]:
        low, high = row["ratio_ci95"]
        lines.append(
            f"{row['experts']:7d} {row['top_k']:5d} {row['rows']:4d} {1e3 * stats.median(row['off_ms']):8.2f}"
            f" {1e3 * stats.median(row['on_ms']):8.2f} {row['ratio']:6.2f} {f'{low:.2f}..{high:.2f}':>15}  {'; '.join(row['problems']) or '-'}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = command.parser(__doc__, "kernel-bitmap-routing")
    parser.add_argument("--rows", type=numbers(1, min(TILE_ROWS, abi.MAX_ROWS)), default=(1, 2, 4, 8, 16))
    parser.add_argument("--experts", type=numbers(8, MAX_EXPERTS), default=(64, 128, 256, 384))
    parser.add_argument("--top-k", type=int, default=8, help="experts of a row")
    parser.add_argument("--layers", type=int, default=48, help="routings in a graph")
    args = parser.parse_args()
    if command.refused("bitmap_routing"):
        return 2
    results = command.begin(args, "bitmap_routing", WEIGHTS, table)
    device = command.device()
    for num_experts in args.experts:
        for rows in args.rows:
            off_ms, on_ms, wrong = Case(rows, num_experts, args.top_k, args.layers, device).measure(args.groups, args.group_ms)
            row = results.add(**row_of(rows, num_experts, args.top_k, args.layers, off_ms, on_ms, wrong))
            deadline.say(f"{num_experts} experts, {rows} rows: ratio {row['ratio']}; {'; '.join(wrong[:3]) or 'output checked'}")
    return command.end(results, table)


if __name__ == "__main__":
    sys.exit(main())
