"""GPU-only time of SGLang's own decode step, and of decode_step on the same weights, KV cache and batch beside it.

    python3 -m benchmark.kernels.standard_step --out OUT [--model qwen3-8b] [--cases 1x1024,2x1024,4x1024,8x1024,1x8000,1x32000]

SGLang's model runner (no server, no plugin, random weights of real scale) captures its decode graphs as a server does. A case
ROWSxCONTEXT prefills random prompts, runs the decode step through SGLang once, and then replays its graph back to back between two
events: what the host does between steps is in no time here. In turn with it, group by group, are replayed:

- the same graph without the LM head: SGLang captures once more, of the model up to its final norm;
- decode_step, without its LM head and with it (--off-only leaves both out).

Two results rows a case, `metric` "step_head" (with the LM head) and "step" (embedding to final norm): off is SGLang, on decode_step.
No sampling is in any of them: SGLang samples outside of its graph. Checked before the times: SGLang's graph ran the step, its
logits are the head's of the hidden states that the graph without head gives, and decode_step's hidden states are near these.
Metadata that SGLang's attention backend prepares outside of the graph for every step is not in its time.

Exit status: 0 if every case was measured and no check failed. A case that fails is recorded, and the next one runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmark import models
from benchmark.common import deadline
from benchmark.common.cases import parse_cases
from sgl_lowlatency.bench import decode_step, floors, provenance, read_bandwidth, stats, timing
from sgl_lowlatency.bench.results import Results

CASES = "1x1024,2x1024,4x1024,8x1024,1x8000,1x32000"
SPARE_TOKENS = 1024  # of the KV pool, beyond the largest case
NEAR_HEAD = 0.02  # relative norm: logits of two bf16 products of the same operands
NEAR_STEP = 0.2  # relative norm of hidden states: two bf16 forwards of tens of layers; another step's are 1.4 apart


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work", type=Path, default=None, help="folder of the model's config (default: OUT/work)")
    parser.add_argument("--name", default=None, help="results file name (default: standard-step-MODEL[-fp8])")
    parser.add_argument("--model", default="qwen3-8b", choices=sorted(models.SHAPES))
    parser.add_argument("--layers", type=int, default=None, help="cut the model to this many layers")
    parser.add_argument("--cases", type=parse_cases, default=parse_cases(CASES), help=f"ROWSxCONTEXT, comma list (default {CASES})")
    parser.add_argument("--quantization", choices=("fp8",), help="FP8 matrices, a scale for every 128 x 128; SGLang's step only")
    parser.add_argument("--off-only", action="store_true", help="SGLang's step only")
    parser.add_argument("--groups", type=int, default=7, help="times taken of every case")
    parser.add_argument("--group-ms", type=float, default=60.0, help="how long each replays")
    parser.add_argument("--server-arg", action="append", default=[], help="one more argument of SGLang, repeatable")
    parser.add_argument("--commit", default=None, help="HASH or HASH-dirty of the code, for a copy without git")
    parser.add_argument("--deadline", type=float, default=540, help="seconds after which everything is killed")
    args = parser.parse_args()
    args.work = args.work or args.out / "work"
    args.slug = f"{args.model}-{args.quantization}" if args.quantization else args.model
    args.off_only = args.off_only or args.quantization is not None  # decode_step is bf16
    return args


def sglang_arguments(model: Path, cases: list[tuple[int, int]], extra: list[str]) -> list[str]:
    """What a server that serves these cases would be started with."""
    from benchmark.serve import server

    sizes = server.gpu_arguments(
        context=max(context for _, context in cases) + 64,
        max_batch=max(rows for rows, _ in cases),
        max_tokens=max(rows * (context + 1) for rows, context in cases) + SPARE_TOKENS,
    )
    return ["--model-path", str(model), "--skip-tokenizer-init", *sizes, *extra]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|; NaN where either is not finite."""
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def far(what: str, value: float, limit: float) -> list[str]:
    """A problem unless value <= limit; NaN is one too."""
    return [] if value <= limit else [f"{what} differ by {value:.3g} of their norm, more than {limit}"]


class Bench:
    """A loaded runner with its graphs, those without the head, and, where it runs, decode_step beside them."""

    def __init__(self, runner, args: argparse.Namespace) -> None:
        from benchmark.kernels import sglang_runner
        from benchmark.kernels.plugin_step import PluginStep

        self.runner, self.args, self.notes = runner, args, []
        self.full = sglang_runner.captured(runner)
        self.body = self.plugin = None
        try:
            self.body = sglang_runner.capture_without_head(runner)
        except Exception as error:  # noqa: BLE001 - whatever SGLang raises: its own step is still worth measuring
            self._note("no graph without the LM head", error)
        if not args.off_only:
            try:
                self.plugin = PluginStep(runner, [rows for rows, _ in args.cases])
            except (ValueError, RuntimeError) as error:
                self._note("no decode_step", error)

    def _note(self, what: str, error: Exception) -> None:
        self.notes.append(f"{what}: {type(error).__name__}: {str(error)[:400]}")
        deadline.say(self.notes[-1])

    def measure(self, rows: int, context: int, vocab: int) -> tuple[dict[str, list[float]], list[str], dict]:
        """(times by arm, problems, facts) of one case. Raises RuntimeError when SGLang does not run the step in a graph."""
        from benchmark.kernels import sglang_runner

        step = sglang_runner.decode(self.runner, rows=rows, context=context, vocab=vocab)
        decode_runner = self.runner.decode_cuda_graph_runner
        key = decode_runner._replay_graph_key
        if not step.in_graph or decode_runner.bs != rows:
            raise RuntimeError(f"SGLang ran the step of {rows} rows {'padded' if step.in_graph else 'outside of a graph'}")
        replays = {"standard": self.full.graphs[key].replay}
        problems, facts = [], {"lengths_ok": step.batch.seq_lens.tolist() == [context] * rows}
        if not facts["lengths_ok"]:
            problems.append(f"sequence lengths are {step.batch.seq_lens.tolist()}")
        replays["standard"]()
        logits = self.full.outputs[key].next_token_logits[:rows].clone()
        problems += far("logits of a replay and of the step", distance(logits, step.logits), NEAR_HEAD)
        hidden = None
        if self.body:
            replays["standard_body"] = self.body.graphs[key].replay
            replays["standard_body"]()
            hidden = self.body.outputs[key][:rows].clone()
            head = self.runner.model.lm_head.weight.detach()[:vocab]
            facts["head_distance"] = distance(hidden @ head.T, logits)
            problems += far("logits and those of the graph without head", facts["head_distance"], NEAR_HEAD)
        if self.plugin:
            problems += self._add_plugin(step.batch, hidden, logits, replays, facts)
        found = timing.in_turn(list(replays.values()), groups=self.args.groups, target_ms=self.args.group_ms)
        return dict(zip(replays, found, strict=True)), problems, facts

    def _add_plugin(self, batch, hidden, logits, replays: dict, facts: dict) -> list[str]:
        """Adds decode_step's replays; returns what is wrong with its output."""
        plugin = self.plugin
        plugin.bind(batch)
        plugin.launch_with_head()
        torch.cuda.synchronize()
        self.graphs = [timing.capture(run) for run in (plugin.launch, plugin.launch_with_head)]  # kept while they are replayed
        plugin.hidden.fill_(float("nan"))
        plugin.logits.fill_(float("nan"))
        self.graphs[1].replay()
        torch.cuda.synchronize()
        replays["plugin_body"], replays["plugin"] = (graph.replay for graph in self.graphs)
        problems = plugin.problems()
        if hidden is not None:
            facts["step_distance"] = distance(plugin.hidden, hidden)
            problems += far("hidden states of decode_step and SGLang", facts["step_distance"], NEAR_STEP)
        facts["logits_distance"] = distance(plugin.logits, logits)
        return problems + far("logits of decode_step and SGLang", facts["logits_distance"], NEAR_STEP)


ARMS = {"step_head": ("standard", "plugin", True), "step": ("standard_body", "plugin_body", False)}  # off, on, with head


def rows_of(args, shape, rows: int, context: int, times: dict, problems: list[str], facts: dict, read_gb_s: float) -> list[dict]:
    """The results rows of one case: with the LM head, and without where that was measured."""
    found = []
    for metric, (off, on, with_head) in ARMS.items():
        if off not in times and on not in times:
            continue
        num_bytes = floors.step_bytes(shape, rows=rows, context=context, with_head=with_head, fp8=args.quantization == "fp8")
        row = {"model": args.slug, "dtype": args.quantization or "bf16", "tp": 1, "mode": "decode", "metric": metric}
        row |= {"batch": rows, "rows": rows, "context": context, "layers": shape.num_layers}
        row |= {"floor_ms": floors.floor_ms(num_bytes, read_gb_s), "floor_bytes": num_bytes, "read_gb_s": round(read_gb_s)}
        for field, arm in (("off_ms", off), ("on_ms", on)):
            if arm in times:
                row[field] = [round(t, 5) for t in times[arm]]
        if on in times:
            row["kernel"] = "decode_step"
        if off in times:
            row["off_floor_share"] = round(row["floor_ms"] / stats.median(times[off]), 4)
        found.append(row | {"problems": problems, **facts})
    for field, full, body in (("off_head_ms", "standard", "standard_body"), ("on_head_ms", "plugin", "plugin_body")):
        if full in times and body in times:
            found[0][field] = round(stats.median(times[full]) - stats.median(times[body]), 5)
    return found


def table(content: dict) -> str:
    """Every row, then what went wrong."""
    lines = [f"{content['gpu']}, read {content.get('bandwidth_gb_s', {}).get('read_gb_s')} GB/s, {content['versions']}"]
    lines.append(
        f"{'metric':10s} {'rows':>4} {'context':>7} {'off ms':>8} {'on ms':>8} {'ratio':>6} {'ci95':>15} {'floor':>8}"
        f" {'off':>5} {'on':>5} {'off head':>8} {'on head':>8}  problems"
    )

    def cell(value, form: str, width: int) -> str:
        return format(value, form) if value is not None else "-".rjust(width)

    for row in content["rows"]:
        off, on = (stats.median(row[f]) if f in row else None for f in ("off_ms", "on_ms"))
        low, high = row.get("ratio_ci95", (None, None))
        interval = f"[{low:.3f}, {high:.3f}]" if low is not None else "-"
        lines.append(
            f"{row['metric']:10s} {row['rows']:4d} {row['context']:7d} {cell(off, '8.4f', 8)} {cell(on, '8.4f', 8)}"
            f" {cell(row.get('ratio'), '6.3f', 6)} {interval:>15} {row['floor_ms']:8.4f} {cell(row.get('off_floor_share'), '5.2f', 5)}"
            f" {cell(row.get('on_floor_share'), '5.2f', 5)} {cell(row.get('off_head_ms'), '8.4f', 8)}"
            f" {cell(row.get('on_head_ms'), '8.4f', 8)}  {'; '.join(row['problems']) or '-'}"
        )
    return "\n".join([*lines, *content.get("failures", [])])


def main() -> int:
    args = parse()
    if not torch.cuda.is_available():
        print("standard_step: no GPU is visible, and a time without one is not a measurement", file=sys.stderr)
        return 2
    shape = models.named_shape(args.model, args.layers)
    results = Results(
        args.out,
        what="kernel-step",
        name=args.name or f"standard-step-{args.slug}",
        weights=f"{decode_step.WEIGHTS}{', FP8 in blocks of 128 x 128' if args.quantization else ''}",
        command=["python3", "-m", "benchmark.kernels.standard_step", *sys.argv[1:]],
        commit=args.commit,
    )
    deadline.watchdog(args.deadline, lambda: print(table(results.content)))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")  # FP8: compile the few shapes that run, not thousands
    bandwidth = read_bandwidth.measure()  # before SGLang takes the memory
    results.set(bandwidth_gb_s={key: round(value) for key, value in bandwidth.items()})
    from benchmark.kernels import sglang_runner
    from benchmark.serve import warm_kernels

    model = models.write_model(args.work / "model", shape, fp8=args.quantization == "fp8")
    arguments = sglang_arguments(model, args.cases, args.server_arg)
    deadline.say("loading SGLang:", *arguments[2:])
    batches = [tokens for rows, context in args.cases for tokens in (rows, rows * (context - 1))]
    warming = warm_kernels.start(model, batches, algorithm=None, work=args.work)
    bench = Bench(sglang_runner.load(arguments), args)
    deadline.say("kernels:", warm_kernels.finish(warming, limit_s=60))
    failures = list(bench.notes)
    backend = type(bench.runner.attn_backend).__name__
    results.set(attention_backend=backend, failures=failures)
    deadline.say(f"ready; {backend}, graphs of {bench.runner.decode_cuda_graph_runner.capture_bs} rows")
    for rows, context in args.cases:
        try:
            times, problems, facts = bench.measure(rows, context, shape.vocab)
        except Exception as error:  # noqa: BLE001 - the next case may run
            failures.append(f"{rows} rows of {context} tokens: {type(error).__name__}: {str(error)[:400]}")
            results.set(failures=failures)
            deadline.say(failures[-1])
            continue
        for row in rows_of(args, shape, rows, context, times, problems, facts, bandwidth["read_gb_s"]):
            results.add(**row)
        medians = {arm: round(stats.median(found), 4) for arm, found in times.items()}
        deadline.say(f"{rows} rows of {context} tokens: {medians} ms, {facts}, {problems or 'ok'}")
    results.set(clocks_mhz=provenance.gpu()["clocks_mhz"])
    print(table(results.content), flush=True)
    failed = bool(failures) or any(row["problems"] for row in results.content["rows"])
    os._exit(1 if failed else 0)  # SGLang's process groups and watchdogs are of no use any more


if __name__ == "__main__":
    sys.exit(main())
