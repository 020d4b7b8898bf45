"""Kernel-level time of `decode_step` against its byte floor, with its LM head and without.

Every layer has its own weights and its own KV, slots are scattered, weights and KV are real-scale random. A time is the median
over groups of CUDA-graph replays between two events. The floor is the bytes of the step (floors.py) over the read bandwidth
measured in the same process. Each case is measured three times, in turn: a launch that ends at the final norm; one that ends with the
LM head, as served; and for comparison one graph of the first followed by the LM head as a product of its own (lm_head.py), whose
weights the step's have pushed out of the L2 cache, as in serving. Each case is checked: no fault, every launch counted, hidden states and
logits finite, written in full and bitwise the same eager, replayed and replayed again, logits near a float32 product.

The floor of a MoE model counts the distinct experts that the rows of the case take, layer by layer: a launch of its own tells them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from sgl_lowlatency.bench import floors, provenance, stats, timing
from sgl_lowlatency.bench.inputs import Inputs, Pool
from sgl_lowlatency.bench.lm_head import LmHead, logits_problems
from sgl_lowlatency.bench.results import Results
from sgl_lowlatency.bench.shapes import Shape
from sgl_lowlatency.build.device_limits import device_limits
from sgl_lowlatency.kernels.decode_step import DecodeStep
from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.kernels.fault import DecodeStepFault, describe_fault
from sgl_lowlatency.plan.panels import DEFAULT_PANEL_BUDGET_BYTES
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.plan.tiles import grid_for
from sgl_lowlatency.reference.inputs import random_weights

WEIGHTS = "real-scale random, seed 0"
WEIGHT_FORMATS = {"bf16": "bf16", "fp8": "fp8_block"}  # of --weights, as abi.WEIGHT_FORMATS names them


@dataclasses.dataclass(frozen=True)
class Settings:
    """rows, contexts: the cases. groups, group_ms: repeats of a time, and how long each replays. kernel_deadline_s: of every wait
    in the kernel. panel_budget_bytes: of activations in shared memory at a time. weights: of the layers' matrices, bf16 or fp8 (a scale
    a block of 128 x 128)."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (32, 1024, 8000)
    groups: int = 7
    group_ms: float = 60.0
    kernel_deadline_s: float = 5.0
    panel_budget_bytes: int = DEFAULT_PANEL_BUDGET_BYTES
    weights: str = "bf16"


class Model:
    """The weights of a shape on a GPU, its step, and the LM head as a product of its own."""

    def __init__(self, shape: Shape, settings: Settings, device: torch.device) -> None:
        self.shape, self.settings, self.device = shape, settings, device
        limits, geometry = device_limits(device), shape.geometry
        grid = grid_for(geometry, limits.grid)
        weights = random_weights(geometry, 0, device, shape.has_qk_norm, shape.has_qkv_bias, WEIGHT_FORMATS[settings.weights], has_lm_head=True)
        sizes = grid, limits.shared_memory_bytes, settings.panel_budget_bytes
        self.plans = {rows: make_plan(geometry, rows, *sizes, element_bytes=weights.element_bytes, has_head=True) for rows in settings.rows}
        self.step = DecodeStep(geometry, self.plans, weights, device, deadline_s=settings.kernel_deadline_s)
        self.head = LmHead(weights.lm_head[: shape.vocab], max(settings.rows))
        self._logits = torch.empty((max(settings.rows), shape.vocab), dtype=torch.float32, device=device)

    def pool(self, context: int) -> Pool:
        """A KV pool of this context for the widest step, attached."""
        pool = Pool(self.shape, max(self.settings.rows), context, self.device)
        self.step.attach_kv(pool.k, pool.v, pool.req_to_token)
        return pool

    def launch(self, inputs: Inputs, logits: torch.Tensor | None = None, routing: RoutingRecord | None = None) -> None:
        rows = inputs.hidden.shape[0]
        self.step.launch(rows, *inputs.tensors, inputs.hidden, torch.cuda.current_stream().cuda_stream, logits=logits, routing=routing)

    def distinct_experts(self, inputs: Inputs) -> list[int] | None:
        """Of every layer, experts that at least one row takes; None of a dense model."""
        if not self.shape.is_moe:
            return None
        record = RoutingRecord.empty(self.shape.geometry, inputs.hidden.shape[0], self.device)
        self.launch(inputs, routing=record)
        return [len(set(of_layer)) for of_layer in record.ids.flatten(1).tolist()]

    def launch_with_head(self, inputs: Inputs) -> None:
        self.launch(inputs, self._logits[: inputs.hidden.shape[0]])

    def launch_and_cublas(self, inputs: Inputs) -> None:
        self.launch(inputs)
        self.head.launch(inputs.hidden)

    def problems(
        self, inputs: Inputs, replay: Callable[[], None], replay_with_head: Callable[[], None], replay_and_cublas: Callable[[], None]
    ) -> list[str]:
        """Of an eager launch and replays of all kinds: faults, lost launches, unwritten, non-finite, wrong or unrepeatable output."""
        rows = inputs.hidden.shape[0]
        before, outputs, logits = self.step.executed().get(rows, 0), [], []
        with_head = (lambda: self.launch_with_head(inputs), replay_with_head, replay_with_head)
        runs = (lambda: self.launch(inputs), replay, replay, *with_head, replay_and_cublas)
        for run in runs:
            inputs.hidden.fill_(float("nan"))
            self._logits.fill_(float("nan"))
            run()
            torch.cuda.synchronize()
            outputs.append(inputs.hidden.clone())
            if run in with_head:
                logits.append(self._logits[:rows].clone())
        problems = []
        if (record := self.step.fault()) is not None:
            problems.append(describe_fault(record))
        if (done := self.step.executed().get(rows, 0) - before) != len(runs):
            problems.append(f"{done} of {len(runs)} launches counted")
        if not outputs[0].isfinite().all():
            problems.append("output is not finite or not written in full")
        if not all(torch.equal(outputs[0], other) for other in outputs[1:]):
            problems.append("eager and replayed outputs differ")
        if not all(torch.equal(logits[0], other) for other in logits[1:]):
            problems.append("eager and replayed logits differ")
        if logits[0].isnan().any():
            problems.append("logits are not written in full")
        problems += logits_problems(logits[0], inputs.hidden, self.head.weight)
        return problems + [f"cuBLAS: {problem}" for problem in self.head.problems(inputs.hidden)]


def row_of(
    name: str, shape: Shape, rows: int, context: int, on_ms: list[float], step_head_ms: list[float], step_cublas_ms: list[float],
    read_gb_s: float, weights: str = "bf16", distinct_experts: list[int] | None = None,
) -> dict:
    """The results row of one case from its times: the step's without the LM head, with it, and with it by cuBLAS behind; floors of both.
    distinct_experts: of a MoE model, that the rows take, by layer."""
    experts = None if distinct_experts is None else sum(distinct_experts) / len(distinct_experts)
    case = {"rows": rows, "context": context, "fp8": weights == "fp8", "experts": experts}
    floor_bytes, head_floor_bytes = (floors.step_bytes(shape, **case, with_head=with_head) for with_head in (False, True))
    step_head_floor_ms = floors.floor_ms(head_floor_bytes, read_gb_s)
    return {
        "model": name, "dtype": weights, "tp": 1, "mode": "decode", "kernel": "decode_step", "metric": "step",
        "batch": rows, "rows": rows, "context": context, "layers": shape.num_layers,
        "on_ms": [round(t, 5) for t in on_ms],
        "floor_ms": floors.floor_ms(floor_bytes, read_gb_s), "floor_bytes": floor_bytes, "read_gb_s": round(read_gb_s),
        "step_head_ms": [round(t, 5) for t in step_head_ms],
        "step_cublas_ms": [round(t, 5) for t in step_cublas_ms],
        "head_ms": round(stats.median(step_head_ms) - stats.median(on_ms), 5),
        "step_head_floor_ms": step_head_floor_ms, "step_head_floor_bytes": head_floor_bytes,
        "step_head_floor_share": round(step_head_floor_ms / stats.median(step_head_ms), 4),
    } | ({} if experts is None else {"experts_a_layer": round(experts, 3), "distinct_experts": distinct_experts})  # fmt: skip


def measure(
    name: str, shape: Shape, settings: Settings, results: Results, read_gb_s: float, device: torch.device, say: Callable[[str], None]
) -> None:
    """Adds one results row for every context and row count of one model. say: prints a line of progress."""
    say(f"{name}: drawing the weights of {shape.num_layers} layers")
    model = Model(shape, settings, device)
    stages = ", ".join(f"{plan.num_stages} at {rows} rows" for rows, plan in model.plans.items())
    say(f"{name}: {torch.cuda.memory_allocated(device) / 1e9:.1f} GB on the GPU, grid {model.step.grid}, ring stages {stages}")
    try:
        for context in settings.contexts:
            measure_context(name, model, context, results, read_gb_s, say)
    except RuntimeError as error:  # a kernel that ended itself took the CUDA context with it; its record says why
        if (record := model.step.fault()) is not None:
            raise DecodeStepFault(describe_fault(record)) from error
        raise
    results.set(clocks_mhz=provenance.gpu(device_id(device))["clocks_mhz"])


def measure_context(
    name: str, model: Model, context: int, results: Results, read_gb_s: float, say: Callable[[str], None]
) -> None:
    """Adds one results row for every row count at one context."""
    shape, settings, device = model.shape, model.settings, model.device
    pool = model.pool(context)
    for rows in settings.rows:
        inputs = Inputs.make(shape, pool, rows, context, device)
        model.launch_and_cublas(inputs)
        torch.cuda.synchronize()
        graphs = [timing.capture(lambda run=run: run(inputs)) for run in (model.launch, model.launch_with_head, model.launch_and_cublas)]
        replays = [graph.replay for graph in graphs]
        problems, distinct_experts = model.problems(inputs, *replays), model.distinct_experts(inputs)
        on_ms, step_head_ms, step_cublas_ms = timing.in_turn(replays, groups=settings.groups, target_ms=settings.group_ms)
        row = row_of(name, shape, rows, context, on_ms, step_head_ms, step_cublas_ms, read_gb_s, settings.weights, distinct_experts)
        row = results.add(**row, plan=model.plans[rows].hash[:12], problems=problems)
        say(
            f"{name}, {rows} rows of {context} tokens: {stats.median(on_ms):.4f} ms, {100 * row['on_floor_share']:.0f} % of the "
            f"floor, {stats.median(step_head_ms):.4f} ms with the LM head (by cuBLAS "
            f"{stats.median(step_cublas_ms):.4f}); "
            + (f"{row['experts_a_layer']:.1f} experts a layer; " if distinct_experts else "") + ("; ".join(problems) or "output checked")
        )


def device_id(device: torch.device) -> str | None:
    """What `nvidia-smi --id` takes for this device: CUDA and nvidia-smi count differently. None where torch does not tell."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid else None
