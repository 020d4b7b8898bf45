"""GPU-only time of SGLang's own decode step of DeepSeek-V4.1, and of the same step with slices of its layers that are ours, each alone and together.

    python3 -m benchmark.kernels.deepseek_step --out OUT --model DIR [--cases 1x1024,2x1024,4x1024,8x1024] [--slices …]

SGLang's model runner (no server, no drafts) loads the weights once and captures its decode graphs as a server does; then once more for each choice of
slices, over the same static inputs and metadata: each of --slices alone, attention's two, and all. A choice's first step of each size is checked
layer by layer against SGLang's launches, as a server's is: a miss is a failure of the case. A case ROWSxCONTEXT prefills the same random prompts
and runs the decode step once for each choice, so that its logits stand beside SGLang's own; then all graphs are replayed in turn, group by group.
Logits are compared twice: of graphs, where a rounding sends rows to other experts, and launch by launch on the same experts (same_experts.py), which
is what judges a choice, with the KV rows that both wrote (kv_rows.py) and the tokens that Engram's layers keep.

A results row a case and choice, `metric` "step", `kernel` the choice, off SGLang's step, on the step with it; both end with the LM head. Random rows
of a batch choose experts independently, where a request's verify rows are nearer to each other. Rows are sizes that SGLang captures: 1, 2, 4,
8, 12, 16, or those of --server-arg=--cuda-graph-bs-decode.

--model: a folder that SGLang loads, with one GPU's share of layers. --register MODULE:FUNCTION: called before, for weights that are no files.
Exit status: 0 if every case was measured and no check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmark.common import deadline, graph_trace
from benchmark.common.cases import parse_cases
from benchmark.kernels import kv_rows, same_experts, sglang_runner
from benchmark.kernels.standard_step import distance, sglang_arguments
from sgl_lowlatency.bench import provenance, stats, timing
from sgl_lowlatency.bench.results import Results
from sgl_lowlatency.config import DEEPSEEK_SLICES

OFF, AGAIN = "sglang", "sglang again"
# Relative norm of logits on the same experts. In emulation FP8 activations, which SGLang has and the slices do not, make it 0.03 behind eight layers, a
# transposed mix 0.15 and another expert more than 0.4.
NEAR = 0.1
# The same of a layer's KV rows, whose roundings to e4m3 differ by another 0.04: sqrt(0.1^2 + 0.04^2). A transposed mix makes it 0.16.
KV_NEAR = 0.11
COMPARED = (("off_repeat_distance", 6), ("same_experts_distance", 7), ("others_chosen", 6))  # of a results row, with their widths in the table
ATTENTION = "flash_fwd_splitkv_mla"  # in the name of SGLang's sparse attention on sm_90
DEADLINE_S = 5.0
PAGE_TOKENS = 256  # of SGLang's pool for this model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--name", default="deepseek-step", help="results file name")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--register", default=None, metavar="MODULE:FUNCTION", help="called before the model is loaded")
    parser.add_argument("--cases", type=parse_cases, default=parse_cases("1x1024,2x1024,4x1024,8x1024"), help="ROWSxCONTEXT, comma list")
    parser.add_argument("--slices", default=",".join(DEEPSEEK_SLICES), help="comma list of those to measure")
    parser.add_argument("--groups", type=int, default=7, help="times taken of every case")
    parser.add_argument("--group-ms", type=float, default=60.0, help="how long each replays")
    profile = "also trace a replay of SGLang's step and of that with all slices: `profile` of the results, every kernel in OUT/NAME-ROWSxCONTEXT-kernels.json"
    parser.add_argument("--profile", action="store_true", help=profile)
    parser.add_argument("--server-arg", action="append", default=[], help="one more argument of SGLang, repeatable")
    parser.add_argument("--commit", default=None, help="HASH or HASH-dirty of the code, for a copy without git")
    parser.add_argument("--deadline", type=float, default=540, help="seconds after which everything is killed")
    return parser.parse_args()


def choices(slices: list[str]) -> list[tuple[str, ...]]:
    """Of slices: each alone, attention's together, all; each once, in this order."""
    attention = tuple(name for name in slices if name.startswith("attention"))
    return list(dict.fromkeys([*((name,) for name in slices), *([attention] if attention else []), tuple(slices)]))


def pool_arguments(cases: list[tuple[int, int]]) -> list[str]:
    """A KV pool for the largest case, each request in pages of its own."""
    pages = max(rows * -(-(context + 64) // PAGE_TOKENS) for rows, context in cases)
    return ["--max-total-tokens", str((pages + 4) * PAGE_TOKENS)]


def build_step(runner: Any, slices: list[str], widths: list[int]) -> Any:
    """The plugin's step on a loaded runner's model. Raises ValueError with what the guard has against its layers."""
    from sgl_lowlatency.build.deepseek_v4 import build_slices
    from sgl_lowlatency.build.device_limits import device_limits
    from sgl_lowlatency.guard import attention_slices
    from sgl_lowlatency.guard.deepseek_v4 import layer_reasons
    from sgl_lowlatency.runtime.deepseek_v4_step import DeepseekV4Step
    from sgl_lowlatency.specs.nvidia.deepseek_v4 import BOUNDS

    layers = list(runner.model.model.layers)
    reasons = [f"layer {i}: {reason}" for i, layer in enumerate(layers) for reason in layer_reasons(layer, slices)]
    if reasons:
        raise ValueError("; ".join(reasons))
    device = layers[0].mlp.gate.weight.device
    built = build_slices(layers, slices, max(widths), device, device_limits(device).grid, DEADLINE_S)
    return DeepseekV4Step(built, widths, 1, BOUNDS, True, attention_slices.pool_reasons)


@contextlib.contextmanager
def dispatched(model: torch.nn.Module, step: Any) -> Iterator[None]:
    """SGLang's dispatch to `step` on the model."""
    from sglang.srt.kernel_plugins.nvidia.binding import MegakernelBinding, _Dispatch

    model.forward = _Dispatch(built=step, original=model.forward, binding=MegakernelBinding(model=model)).wrapped()
    try:
        yield
    finally:
        del model.forward


def capture(runner: Any, step: Any, names: tuple[str, ...]) -> sglang_runner.Graphs:
    """SGLang's decode graphs captured once more with `names` ours; its own stay. Raises what a check that fails does."""
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

    own, backend = sglang_runner.captured(runner), runner.decode_cuda_graph_runner.backend
    step.take(names)
    try:
        with dispatched(runner.model, step), model_capture_mode():
            runner.decode_cuda_graph_runner.capture()
        return sglang_runner.captured(runner)
    finally:
        backend._graphs, backend._outputs = own.graphs, own.outputs


class Bench:
    """arms: SGLang's graphs, and those of each choice of slices that could be captured, by name. notes: of the others."""

    def __init__(self, runner: Any, args: argparse.Namespace) -> None:
        self.runner, self.args, self.notes = runner, args, []
        self.replays: dict[str, Callable[[], None]] = {}
        self.arms = {OFF: sglang_runner.captured(runner)}
        slices = args.slices.split(",")
        self.step = build_step(runner, slices, sorted(runner.decode_cuda_graph_runner.capture_bs))
        deadline.say("built:", self.step.summary())
        for names in choices(slices):
            try:
                self.arms["+".join(names)] = capture(runner, self.step, names)
            except RuntimeError as error:
                self.notes.append(f"{'+'.join(names)}: {str(error)[:1000]}")
                deadline.say(self.notes[-1])

    def measure(self, rows: int, context: int, vocab: int) -> tuple[dict[str, list[float]], dict[str, float]]:
        """(times by arm, how far an arm's logits are from SGLang's, of SGLang's own those of a second run of it), all behind one prefill. Raises
        RuntimeError where a step ran outside of its graph."""
        decode_runner, logits, step = self.runner.decode_cuda_graph_runner, {}, None
        own = self.arms[OFF]
        for name, arm in [*self.arms.items(), (AGAIN, own)]:
            decode_runner.backend._graphs, decode_runner.backend._outputs = arm.graphs, arm.outputs
            try:
                case = {"rows": rows, "context": context, "vocab": vocab}
                step = sglang_runner.decode(self.runner, **case) if step is None else sglang_runner.again(self.runner, step)
            finally:
                decode_runner.backend._graphs, decode_runner.backend._outputs = own.graphs, own.outputs
            if not step.in_graph or decode_runner.bs != rows:
                raise RuntimeError(f"SGLang ran the step of {rows} rows {'padded' if step.in_graph else 'outside of a graph'}")
            logits[name] = step.logits
        key = decode_runner._replay_graph_key
        found = timing.in_turn([arm.graphs[key].replay for arm in self.arms.values()], groups=self.args.groups, target_ms=self.args.group_ms)
        self.replays = {name: arm.graphs[key].replay for name, arm in self.arms.items()}
        distances = {name: distance(logits[name], logits[OFF]) for name in self.arms} | {OFF: distance(logits[AGAIN], logits[OFF])}
        return dict(zip(self.arms, found, strict=True)), distances

    def profile(self, arms: Sequence[str]) -> dict[str, list[dict]]:
        """Of the last case, the kernels of one replay by arm, of those that were captured (graph_trace.median_step)."""
        return {name: graph_trace.record(self.replays[name]) for name in arms if name in self.replays}

    def on_the_same_experts(self, arm: str, rows: int, context: int, vocab: int) -> tuple[dict[str, Any], list[str]]:
        """(an arm's step beside SGLang's on its experts, launch by launch, as fields of a results row, what is wrong). Raises RuntimeError where SGLang's
        forward ran in the arm's place."""
        runner, layers, case = self.runner, list(self.runner.model.model.layers), {"rows": rows, "context": context, "vocab": vocab}
        ids = [layer.self_attn.layer_id for layer in layers]
        found: list[dict[int, torch.Tensor]] = []  # routers' logits by layer: the arm's, then SGLang's own
        states: list[kv_rows.State] = []  # before and behind the arm's step, before and behind SGLang's
        self.step.take(arm.split("+"))
        before = self.step.issued[rows]
        with dispatched(runner.model, self.step):
            kept = same_experts.kept_logits(layers, self.step.running)
            ours = sglang_runner.decode(runner, **case, within=lambda batch: _launch_by_launch(runner, batch, ids, kept, found, states))
        if self.step.issued[rows] != before + 1:
            raise RuntimeError(f"SGLang's own forward ran in place of {arm}: {dict(self.step.coverage.counts().fallbacks)}")
        given = same_experts.given_logits(layers, found[0])
        theirs = sglang_runner.again(runner, ours, within=lambda batch: _launch_by_launch(runner, batch, ids, given, found, states))
        moved, routers = same_experts.others_chosen(layers, found[1], found[0]), same_experts.router_distances(found[1], found[0])
        near, (keys, problems) = distance(ours.logits, theirs.logits), kv_rows.compared(states[0], states[1], states[3], rows)
        for what, value, limit in (("logits", near, NEAR), ("KV rows of a layer", max(keys, default=0.0), KV_NEAR)):
            if not value <= limit:
                problems.append(f"{what} on the same experts differ by {value:.3g} of their norm, more than {limit}")
        fields = {"same_experts_distance": round(near, 4), "others_chosen": round(moved, 4)}
        return fields | {"router_distances": [round(x, 4) for x in routers], "kv_distances": [round(x, 4) for x in keys]}, problems


def judge(bench: Bench, arm: str, rows: int, context: int, vocab: int) -> tuple[dict[str, Any], list[str]]:
    """(fields of a row that compare an arm with SGLang's step on the same experts, what is wrong)."""
    try:
        return bench.on_the_same_experts(arm, rows, context, vocab)
    except Exception as error:  # noqa: BLE001 - its times are measured already
        return {}, [f"not compared on the same experts: {type(error).__name__}: {str(error)[:400]}"]


def profiled(bench: Bench, rows: int, context: int) -> dict[str, dict[str, dict]]:
    """By case and arm, the kernels of SGLang's step and of that with all slices, which also go to a file of their own."""
    case, found = f"{rows}x{context}", bench.profile([OFF, "+".join(bench.args.slices.split(","))])
    (bench.args.out / f"{bench.args.name}-{case}-kernels.json").write_text(json.dumps(found) + "\n")
    return {case: {arm: graph_trace.summary(step) | layers_of(step) for arm, step in found.items()}}


def layers_of(step: list[dict]) -> dict[str, list]:
    """layer_us and layer_kernels from each layer's sparse attention to the next one's, and of the layer that took least, `layer`: (start_us, us, name) of
    every kernel, the next attention last. Empty where no attention is known."""
    found = graph_trace.laps(step, ATTENTION)
    shortest = min(found, key=lambda lap: lap[-1]["start_us"], default=[])
    return {
        "layer_us": [lap[-1]["start_us"] for lap in found], "layer_kernels": [len(lap) - 1 for lap in found],
        "layer": [(event["start_us"], event["us"], event["name"]) for event in shortest],
    }  # fmt: skip


def repeat_problems(distance_to_itself: float) -> list[str]:
    """What is wrong where SGLang's own step, run a second time, gives other logits."""
    if distance_to_itself <= NEAR:
        return []
    return [f"SGLang's own step, run twice, differs by {distance_to_itself:.3g} of its norm: distances prove nothing"]


@contextlib.contextmanager
def _launch_by_launch(runner: Any, batch: Any, layer_ids: Sequence[int], within: Any, entered: list, states: list) -> Iterator[None]:
    """Without graphs, inside `within`; what that yields goes to `entered`, what is cached before and behind the body to `states`. The slots of the
    batch's keys are made to hold no row that it may write."""
    kv_rows.invert(runner, layer_ids, batch)
    states.append(kv_rows.state_of(runner, layer_ids))
    with sglang_runner.without_graphs(runner), within as found:
        entered.append(found)
        yield
    states.append(kv_rows.state_of(runner, layer_ids))


def table(content: dict) -> str:
    """Every row, then what went wrong."""
    lines = [f"{content['gpu']}, {content['versions']}"]
    lines.append(f"{'rows':>4} {'context':>7} {'off ms':>8} {'on ms':>8} {'ratio':>6}  logits  repeat  on same  others  slices, problems")
    for row in content["rows"]:
        off, on = stats.median(row["off_ms"]), stats.median(row["on_ms"])
        problems = "; ".join(row["problems"]) or "-"
        times = f"{row['rows']:4d} {row['context']:7d} {off:8.4f} {on:8.4f} {row['ratio']:6.3f}"
        near = "  ".join(f"{row[name]:{width}.3f}" if name in row else "-" * width for name, width in COMPARED)
        lines.append(f"{times}  {row['logits_distance']:6.3f}  {near}  {row['kernel']}  {problems}")
    return "\n".join([*lines, *content.get("failures", [])])


def main() -> int:
    args = parse()
    if not torch.cuda.is_available():
        print("deepseek_step: no GPU is visible, and a time without one is not a measurement", file=sys.stderr)
        return 2
    results = Results(
        args.out, what="kernel-step", name=args.name, weights="random, of the model's folder", commit=args.commit,
        command=["python3", "-m", "benchmark.kernels.deepseek_step", *sys.argv[1:]],
    )  # fmt: skip
    deadline.watchdog(args.deadline, lambda: print(table(results.content)))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")  # compile the few shapes that run, not thousands
    if args.register:
        module, _, function = args.register.partition(":")
        getattr(importlib.import_module(module), function)()
    arguments = sglang_arguments(args.model, args.cases, [*pool_arguments(args.cases), *args.server_arg])
    deadline.say("loading SGLang:", *arguments[2:])
    runner = sglang_runner.load(arguments)
    deadline.say(f"ready; graphs of {runner.decode_cuda_graph_runner.capture_bs} rows")
    bench, failures, profiles = Bench(runner, args), [], {}
    failures += bench.notes
    for rows, context in args.cases:
        try:
            times, distances = bench.measure(rows, context, runner.model_config.vocab_size)
        except Exception as error:  # noqa: BLE001 - the next case may run
            failures.append(f"{rows} rows of {context} tokens: {type(error).__name__}: {str(error)[:400]}")
            results.set(failures=failures)
            continue
        deadline.say(f"{rows} rows of {context} tokens:", {arm: round(stats.median(found), 4) for arm, found in times.items()}, "ms")
        if args.profile:
            profiles |= profiled(bench, rows, context)
            results.set(profile=profiles)
        for arm in bench.arms:
            if arm == OFF:
                continue
            found, problems = judge(bench, arm, rows, context, runner.model_config.vocab_size)
            problems += repeat_problems(distances[OFF])
            results.add(
                model=args.model.name, dtype="fp8", tp=1, mode="decode", metric="step", kernel=arm, batch=rows, rows=rows, context=context,
                off_ms=[round(t, 5) for t in times[OFF]], on_ms=[round(t, 5) for t in times[arm]], logits_distance=round(distances[arm], 4),
                off_repeat_distance=round(distances[OFF], 4),
                **found, problems=problems,
            )  # fmt: skip
    results.set(failures=failures, clocks_mhz=provenance.gpu()["clocks_mhz"])
    print(table(results.content), flush=True)
    os._exit(1 if failures or any(row["problems"] for row in results.content["rows"]) else 0)  # SGLang's threads are of no use any more


if __name__ == "__main__":
    sys.exit(main())
