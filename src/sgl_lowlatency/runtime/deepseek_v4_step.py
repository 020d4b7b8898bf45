"""What the spec of DeepSeek-V4.1 builds: SGLang's own forward, whose layers are issued anew around the slices of them that are ours.

A covered step is SGLang's loop over the layers with everything around it: embedding, Engram, hidden states that drafts read, the head. In it the
layers' forwards, and their MoEs', are those of runtime/deepseek_v4_layer.py and deepseek_v4_moe.py, for as many slices as were asked for. Every other
step, prefill and rows beyond the widths included, is SGLang's forward as it is.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from sglang.kernels.plugin_kernels.nvidia.spec import Step

from sgl_lowlatency import config
from sgl_lowlatency.kernels.fault import describe_attention_in_fault, describe_attention_out_fault, describe_moe_fault
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.coverage import DECODE, VERIFY, Coverage
from sgl_lowlatency.runtime.deepseek_v4_check import ATTENTION_IN_FIGURES, ATTENTION_OUT_FIGURES, MOE_FIGURES, MOE_POST_FIGURES
from sgl_lowlatency.runtime.deepseek_v4_layer import LayerSlices, LayerStep, Running
from sgl_lowlatency.runtime.deepseek_v4_moe import MoeSlice
from sgl_lowlatency.runtime.fallback import fallback_reason, hooked_module
from sgl_lowlatency.runtime.fault_watch import FaultWatch

logger = logging.getLogger(__name__)

_DESCRIPTIONS = {"attention_in": describe_attention_in_fault, "attention_out": describe_attention_out_fault, "moe": describe_moe_fault}
_FIGURES = {"attention_in": ATTENTION_IN_FIGURES, "attention_out": ATTENTION_OUT_FIGURES, "moe": MOE_FIGURES}
# Of a layer: modules that a slice does not call, so that a hook on one would not be.
_REPLACED = {
    "attention_in": ("input_layernorm", "self_attn.wqkv_a", "self_attn.q_norm", "self_attn.wq_b", "self_attn.kv_norm"),
    "attention_out": ("self_attn", "self_attn.wo_a", "self_attn.wo_b", "post_attention_layernorm"),
    "moe": ("mlp.gate", "mlp.topk", "mlp.experts", "mlp.shared_experts"),
}
_WITH_POST = frozenset({"attention_out", "moe"})  # taken together, fused_moe closes the MoE's hyper-connection and SGLang does not call the MoE


class DeepseekV4Step:
    """layers: the model's, in order, with their slices, the same of every layer. widths: rows of the steps that are served. tokens_per_request: 1 in
    a server of plain decode; in a speculative one the tokens that a verify step has a request, and then it serves verify steps alone. bounds: of
    _FIGURES, of the check that the first step of each width makes before it may be captured. check: whether it is made. pool_reasons: why the
    running forward's KV pool is not laid out as attention_in writes it. `running`: what the layers share of the forward at hand. `issued`: steps by rows, of a graph the
    one that was captured; coverage counts replays too, on the device, as long as the first of the slices is taken."""

    draft_sampler = None

    def __init__(
        self,
        layers: Sequence[tuple[Any, LayerSlices]],
        widths: Sequence[int],
        tokens_per_request: int,
        bounds: Mapping[str, float],
        check: bool,
        pool_reasons: Callable[[Any], Iterable[str]] = lambda pool: (),
    ):
        self.widths, self._tokens_per_request = tuple(sorted(widths)), tokens_per_request
        self._bounds, self._check, self._pool_reasons = bounds, check, pool_reasons
        first, self._num_layers = layers[0][1], len(layers)
        self._kernels = {name: getattr(first, name)[0] for name in _FIGURES if getattr(first, name) is not None}
        self.running, self._checked = Running(), set()
        self.take(self._kernels)
        replaced = [name for slice_name in self._kernels for name in _REPLACED[slice_name]] + (["mlp"] if _WITH_POST <= set(self._kernels) else [])
        self._replaced = [
            (f"layer {i}, {name}", module)
            for i, (layer, _) in enumerate(layers)
            for name in replaced
            if isinstance(module := _module(layer, name), torch.nn.Module)
        ]
        for number, (layer, slices) in enumerate(layers):
            moe = None if slices.moe is None else MoeSlice(self.running, number, layer, *slices.moe)
            if slices.attention_in is not None or slices.attention_out is not None:
                LayerStep(self.running, number, layer, slices, moe)
        for name, kernel in self._kernels.items():
            FaultWatch(kernel.fault, kernel.acknowledge_fault, describe=_DESCRIPTIONS[name]).start()
        if not check:
            logger.warning("SGL_LOWLATENCY_SELF_CHECK=0: %s serve without being compared to SGLang's launches", ", ".join(self._kernels))
        self.issued: collections.Counter[int] = collections.Counter()
        name, last = next(iter(self._kernels)), layers[-1][1]  # a step is over with its last layer, and every slice that was built is taken in a server
        self._kernels[name].counts.count(getattr(last, name)[1])
        mode = DECODE if tokens_per_request == 1 else VERIFY
        self.coverage = Coverage(self._kernels[name].counts.executed, mode, of=", DeepSeek-V4.1", kernel=" + ".join(self._kernels))
        self.coverage.start_reporting(config.get().log_coverage_s, sglang_state.metrics_enabled())

    def take(self, names: Iterable[str]) -> None:
        """From the next step on `names` are ours, out of those that were built, and SGLang's launches the others. Each number of rows is checked
        anew. A graph keeps what it was captured with. Raises ValueError for another name."""
        names = frozenset(names)
        if unknown := sorted(names - set(self._kernels)):
            raise ValueError(f"{unknown[0]} is not one of the slices that were built: {', '.join(self._kernels)}")
        self.running.taken = names
        self._checked.clear()

    def summary(self) -> str:
        """What was built, for SGLang's startup line."""
        extra = sum(kernel.extra_bytes for kernel in self._kernels.values())
        grid = next(iter(self._kernels.values())).grid
        return (f"{', '.join(self._kernels)} in {self._num_layers} layers, up to {self.widths[-1]} rows; {extra / 2**20:.1f} MiB beside the model; "
                f"{grid} blocks")  # fmt: skip

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Step | None:
        """The step, or None for SGLang's forward as it is, with the reason counted. Host-only."""
        reason = fallback_reason(self.widths, self._tokens_per_request, input_ids, forward_batch, *args, **kwargs)
        if reason is None and (hooked := hooked_module(self._replaced)) is not None:
            reason = f"a forward hook on {hooked}"
        if reason is not None:
            if not sglang_state.capturing_graphs():
                self.coverage.count_fallback(reason)
            return None
        return Step("decode" if self._tokens_per_request == 1 else "target_verify", int(forward_batch.batch_size) * self._tokens_per_request)

    def forward(self, step: Step, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """SGLang's forward with our slices. The first of a width is checked layer by layer: raises RuntimeError with figures, or when it is being
        captured before, or the KV pool is of another layout: the server must not serve."""
        is_capturing, run = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing(), self.running
        if wants_check := self._check and step.rows not in self._checked:
            if is_capturing:
                raise RuntimeError(f"{', '.join(self._kernels)}: {step.rows} rows are being captured before their self-check ran")
        if not self._checked and "attention_in" in run.taken and (reasons := list(self._pool_reasons(step.view.kv_pool.pool))):
            raise RuntimeError("attention_in cannot write SGLang's KV pool:\n  - " + "\n  - ".join(reasons))
        is_warm_up = sglang_state.capturing_graphs() and not is_capturing
        self.issued[step.rows] += not is_warm_up
        run.is_on, run.is_checking, run.view, run.is_verify = True, wants_check, step.view, step.mode == "target_verify"
        try:
            with self._counted(step.rows, is_warm_up, wants_check):
                output = original(*args, **kwargs)
                if wants_check:
                    self._judge(step.rows)
            self._checked.add(step.rows)
            return output
        finally:
            run.is_on, run.is_checking, run.view = False, False, None
            run.figures.clear()

    @contextlib.contextmanager
    def _counted(self, rows: int, is_warm_up: bool, is_checking: bool) -> Iterator[None]:
        """Of the launches in the body, the step's own counts, unless it serves nobody."""
        if not is_checking:
            if is_warm_up:
                self.coverage.discount(rows, 1)
            yield
            return
        with self.coverage.uncounted(rows):
            yield
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        if not is_warm_up:
            self.coverage.discount(rows, -1)

    def _judge(self, rows: int) -> None:
        misses, found = list(self._misses(rows)), []
        for name in self._judged():
            worst = max((figure for figure in self.running.figures if figure.name == name), key=lambda figure: figure.value, default=None)
            found.append(f"{name} {'nothing' if worst is None else f'{worst.value:.2g} (layer {worst.layer})'} of {self._bounds[name]:g}")
        if misses:
            raise RuntimeError(f"slices differ from SGLang's launches in a step of {rows} rows: {'; '.join(misses)}. All figures: {', '.join(found)}")
        logger.info("slices checked against SGLang's launches at %d rows: %s", rows, ", ".join(found))

    def _judged(self) -> list[str]:
        judged = [figure for name in self._kernels if name in self.running.taken for figure in _FIGURES[name]]
        return judged + (list(MOE_POST_FIGURES) if _WITH_POST <= self.running.taken else [])

    def _misses(self, rows: int) -> Iterator[str]:
        for name in self._judged():
            figures = [figure for figure in self.running.figures if figure.name == name]
            if len(figures) != self._num_layers:
                yield f"{name} of {len(figures)} layers out of {self._num_layers}"
            for figure in figures:
                if not figure.value <= self._bounds[name]:
                    yield f"{name} {figure.value:.2g} in layer {figure.layer}"


def _module(layer: Any, path: str) -> Any:
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer
