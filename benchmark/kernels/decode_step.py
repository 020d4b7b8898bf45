"""Kernel-level time of `decode_step` against its byte floor. Needs torch, a GPU and this package; not SGLang.

    python3 -m benchmark.kernels.decode_step --out OUT [--models qwen3-8b] [--contexts 32,1024,8000] [--rows 1,2,4,8,16]
    ncu --clock-control none ... python3 -m benchmark.kernels.decode_step --out OUT --once --contexts 1024 --rows 1

Every layer has its own weights and its own KV, slots are scattered, weights and KV are real-scale random. A time is the median
over groups of CUDA-graph replays between two events. The floor is the bytes of the step (floors.py, no LM head) over the read
bandwidth measured in the same process. Each case is checked: no fault, every launch counted, output finite, written in full and
bitwise the same eager, replayed and replayed again. `--once` launches a single step between profiler marks and measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from benchmark import models
from benchmark.common import deadline, floors, provenance, stats
from benchmark.common.results import Results
from benchmark.oracle import rope_table
from benchmark.random_weights import draw, tensor_plan
from sgl_lowlatency.kernels.decode_step import DecodeStep, DecodeStepWeights, LayerTensors
from sgl_lowlatency.kernels.fault import describe_fault
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.static_plan import make_plan


def geometry_of(shape: models.Shape) -> Geometry:
    fields = dataclasses.asdict(shape)
    del fields["has_qk_norm"]
    return Geometry(**fields, rms_eps=1e-6)


def make_weights(shape: models.Shape, device, seed: int = 0) -> DecodeStepWeights:
    """Real-scale random weights, fused as SGLang fuses them; no two layers share memory."""
    config = models.hf_config(shape)
    plan = {name: (dims, mean, std) for name, dims, mean, std in tensor_plan(config)}

    def get(name: str) -> torch.Tensor:
        return draw(name, *plan[name], seed=seed, device=device)

    layers = []
    for index in range(shape.num_layers):
        at = f"model.layers.{index}."
        fused = [
            torch.cat([get(f"{at}{n}.weight") for n in names])
            for names in (
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                ("mlp.gate_proj", "mlp.up_proj"),
            )
        ]
        single = (
            "input_layernorm",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.down_proj",
        )
        norm, q_norm, k_norm, out_proj, post, down = (get(f"{at}{n}.weight") for n in single)
        if not shape.has_qk_norm:
            q_norm = k_norm = None
        layers.append(LayerTensors(norm, fused[0], q_norm, k_norm, out_proj, post, fused[1], down))
    cos, sin = rope_table(shape.max_position, shape.head_dim, config["rope_theta"], device)
    return DecodeStepWeights(
        get("model.embed_tokens.weight"), get("model.norm.weight"), torch.cat((cos, sin), dim=1).contiguous(), layers
    )


class Pool:
    """A KV pool of random K and V and the request table of up to `rows` requests of `context` tokens, slots scattered."""

    def __init__(self, shape: models.Shape, rows: int, context: int, device) -> None:
        generator = torch.Generator(device=device).manual_seed(7)
        slots, dims = rows * context + 1, (shape.num_kv_heads, shape.head_dim)
        make = lambda: torch.randn((slots, *dims), generator=generator, device=device, dtype=torch.bfloat16)  # noqa: E731
        self.k = [make() for _ in range(shape.num_layers)]
        self.v = [make() for _ in range(shape.num_layers)]
        order = torch.randperm(slots - 1, generator=generator, device=device).to(torch.int32) + 1  # slot 0 is padding
        self.req_to_token = torch.zeros((rows + 1, context + 8), dtype=torch.int32, device=device)
        self.req_to_token[1:, :context] = order.view(rows, context)


@dataclasses.dataclass
class Inputs:
    """Device tensors of one step of `rows` requests that have `context` tokens with the new one."""

    tensors: tuple[torch.Tensor, ...]
    hidden: torch.Tensor

    @classmethod
    def make(cls, shape: models.Shape, pool: Pool, rows: int, context: int, device) -> Inputs:
        generator = torch.Generator(device=device).manual_seed(rows * 100003 + context)
        ids = torch.randint(10, shape.vocab, (rows,), generator=generator, device=device)
        lengths = torch.full((rows,), context, dtype=torch.int64, device=device)
        requests = torch.arange(1, rows + 1, dtype=torch.int64, device=device)
        slots = pool.req_to_token[1 : rows + 1, context - 1].to(torch.int64)
        hidden = torch.full((rows, shape.hidden), float("nan"), dtype=torch.bfloat16, device=device)
        return cls((ids, lengths - 1, lengths, requests, slots.contiguous()), hidden)


def launch(step: DecodeStep, rows: int, inputs: Inputs) -> None:
    step.launch(rows, *inputs.tensors, inputs.hidden, torch.cuda.current_stream().cuda_stream)


def graph_of(step: DecodeStep, rows: int, inputs: Inputs) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(step, rows, inputs)
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, *, groups: int, group_ms: float) -> list[float]:
    """ms per replay of `groups` groups of back-to-back replays of about `group_ms` each."""

    def group(count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    group(2)
    count = max(int(group_ms / group(3)), 3)
    return [group(count) for _ in range(groups)]


def verify(step: DecodeStep, rows: int, inputs: Inputs, graph: torch.cuda.CUDAGraph) -> list[str]:
    """Problems of an eager launch and two replays: faults, lost launches, unwritten, non-finite or unrepeatable output."""
    before, outputs = step.executed().get(rows, 0), []
    for run in (lambda: launch(step, rows, inputs), graph.replay, graph.replay):
        inputs.hidden.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        outputs.append(inputs.hidden.clone())
    problems = []
    if (record := step.fault()) is not None:
        problems.append(describe_fault(record))
    if (done := step.executed().get(rows, 0) - before) != 3:
        problems.append(f"{done} of 3 launches counted")
    if not outputs[0].isfinite().all():
        problems.append("output is not finite or not written in full")
    if not all(torch.equal(outputs[0], other) for other in outputs[1:]):
        problems.append("eager and replayed outputs differ")
    return problems


def run_model(name: str, args, results: Results, read_gb_s: float) -> None:
    """One results row for every context and row count of one model."""
    device = torch.device("cuda")
    shape = models.named_shape(name, args.layers)
    rows_list, contexts = ([int(x) for x in text.split(",")] for text in (args.rows, args.contexts))
    geometry = geometry_of(shape)
    properties = torch.cuda.get_device_properties(device)
    extra = {"panel_budget_bytes": args.panel_budget} if args.panel_budget else {}
    grid, smem = properties.multi_processor_count, properties.shared_memory_per_block_optin
    plans = {rows: make_plan(geometry, rows, grid, smem, **extra) for rows in rows_list}
    weights = make_weights(shape, device)
    step = DecodeStep(geometry, plans, weights, device, deadline_s=args.kernel_deadline)
    deadline.say(
        f"{name}: weights ready, {torch.cuda.memory_allocated() / 1e9:.1f} GB; stages {[p.num_stages for p in plans.values()]}"
    )
    for context in contexts:
        pool = Pool(shape, max(rows_list), context, device)
        step.attach_kv(pool.k, pool.v, pool.req_to_token)
        for rows in rows_list:
            inputs = Inputs.make(shape, pool, rows, context, device)
            if args.once:
                launch(step, rows, inputs)
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                launch(step, rows, inputs)
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
                continue
            launch(step, rows, inputs)
            torch.cuda.synchronize()
            graph = graph_of(step, rows, inputs)
            problems = verify(step, rows, inputs, graph)
            times = time_graph(graph, groups=args.groups, group_ms=args.group_ms)
            num_bytes = floors.step_bytes(shape, rows=rows, context=context, with_head=False)
            row = {"model": name, "dtype": "bf16", "tp": 1, "mode": "decode", "kernel": "decode_step", "metric": "step"}
            row |= {
                "batch": rows,
                "rows": rows,
                "context": context,
                "layers": shape.num_layers,
                "on_ms": [round(t, 5) for t in times],
            }
            row |= {
                "floor_ms": floors.floor_ms(num_bytes, read_gb_s),
                "floor_bytes": num_bytes,
                "read_gb_s": round(read_gb_s),
            }
            row = results.add(**row, plan=plans[rows].hash[:12], problems=problems)
            median = stats.median(times)
            deadline.say(
                f"{name} rows {rows} context {context}: {median:.4f} ms, {num_bytes / median / 1e6:.0f} GB/s, {problems or 'ok'}"
            )
        del pool
        torch.cuda.empty_cache()
    results.set(clocks_mhz=provenance.gpu()["clocks_mhz"])


def table(results: Results) -> str:
    lines = [f"{results.content['gpu']}, read {results.content.get('bandwidth_gb_s')}"]
    lines.append(f"{'model':12s} {'rows':>4} {'ctx':>6} {'ms':>8} {'floor':>8} {'share':>6} {'spread':>7} problems")
    for row in results.content["rows"]:
        on = row["on_ms"]
        lines.append(
            f"{row['model']:12s} {row['rows']:4d} {row['context']:6d} {stats.median(on):8.4f} {row['floor_ms']:8.4f}"
            f" {row['on_floor_share']:6.3f} {stats.spread(on):7.2%} {row['problems'] or '-'}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="kernel-decode-step", help="results file name")
    parser.add_argument("--models", default="qwen3-8b", help="comma list of geometries")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--contexts", default="32,1024,8000")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--groups", type=int, default=7)
    parser.add_argument("--group-ms", type=float, default=60.0)
    parser.add_argument("--panel-budget", type=int, default=None, help="bytes of activations in shared memory at a time")
    parser.add_argument("--kernel-deadline", type=float, default=5.0, help="deadline of every wait in the kernel, s")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--deadline", type=float, default=300)
    args = parser.parse_args()
    results = Results(
        args.out,
        what="kernel-step",
        name=args.name,
        weights="real-scale random, seed 0",
        command=["python3", "-m", "benchmark.kernels.decode_step", *sys.argv[1:]],
        commit=args.commit,
    )
    deadline.watchdog(args.deadline, lambda: print(table(results)))
    read_gb_s = 1.0
    if not args.once:
        from benchmark.kernels import read_bandwidth

        bandwidth = read_bandwidth.measure()
        results.set(bandwidth_gb_s={key: round(value) for key, value in bandwidth.items()})
        read_gb_s = bandwidth["read_gb_s"]
    for name in args.models.split(","):
        run_model(name, args, results, read_gb_s)
        torch.cuda.empty_cache()
    print(table(results))
    return 1 if any(row["problems"] for row in results.content["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
