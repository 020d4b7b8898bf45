"""Before a width serves: SGLang's own forward and ours, on the same inputs of our making, compared output by output.

The data SGLang warms up with (token 0, position 0, length 1, slot 0) exercises nothing, so the check writes its own: random
tokens, requests of many lengths over scattered pages, K and V at the model's scale; for verify, a chain of draft tokens behind
each. Whatever it touches is put back. It runs on the forward's thread with the device idle on both sides, so no other stream
sees its data. Where the model captures auxiliary hidden states, these are compared too (runtime/self_check_aux.py).

With FP8 weights, ours is compared to SGLang's forward with exact products (runtime/exact_linears.py). SGLang's own forward, which rounds
activations to FP8, is compared to that too: how far it is off stands in the report, and over the first two layers, which meet every
matrix of a layer and add little rounding, it must agree, or we misread the weights.

Of MoE models, SGLang's layers start each from our own stream and take the experts that ours chose; stream and choice are judged by
themselves (runtime/self_check_streams.py, self_check_moe.py). The figures are then those of one layer's rounding, and the bounds much tighter. Dense
models can be checked in the same way, without the choice.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, RoutingRecord
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.exact_linears import exact_linears
from sgl_lowlatency.runtime.self_check_aux import AUX_FIGURES, aux_errors, split_layers, with_neighbours
from sgl_lowlatency.runtime.self_check_moe import (
    MOE_FIGURES, distinct_experts, other_choices, routed_as, routing_errors,
)
from sgl_lowlatency.runtime.self_check_inputs import CheckInputs, like_keys, make_inputs, value_scale
from sgl_lowlatency.runtime.self_check_streams import STREAM_FIGURES, stream_errors, streamed_as
from sgl_lowlatency.runtime.sglang_state import KvState

SEED = 20_241
# Over the logits [rows, vocab], and over the K and V rows that the step wrote, of the first layer (one norm, one matrix and
# one rotation away from the embedding: hardly any error of rounding) and of all layers.
FIGURES = ("logits.relative_l2", "first_layer_kv.relative_l2", "kv.relative_l2")
# Of SGLang's own forward on FP8 weights against its exact one: over the K and V rows of the first two layers.
SGLANG_FP8_FIGURE = "sglang_fp8.first_layers_kv.relative_l2"


@dataclass
class SelfCheckReport:
    """lengths: of every request, as SGLang counts them. figures: the worst value of each tolerance's name. misses: one sentence a
    figure out of tolerance, empty on a pass. sglang_fp8: of FP8 weights, FIGURES of SGLang's own forward, for people to read
    beside ours. choices, other_choices: of MoE layers, rows that were routed, and those of them where SGLang would have taken other experts;
    experts_a_layer: distinct experts that the rows of a batch took, on average.
    """

    rows: int
    tokens_per_request: int = 1
    lengths: list[int] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    sglang_fp8: dict[str, float] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)
    choices: int = 0
    other_choices: int = 0
    experts_a_layer: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value:.2g}" for name, value in sorted(self.figures.items()))
        verdict = "FAILED: " + "; ".join(self.misses) if self.misses else "passed"
        beside = ", ".join(f"{name} {value:.2g}" for name, value in sorted(self.sglang_fp8.items()))
        beside = f"; SGLang's own FP8 activations: {beside}" if beside else ""
        if self.choices:
            beside += f"; {self.other_choices} of {self.choices} choices of experts are not SGLang's; {self.experts_a_layer:.1f} experts a layer"
        what = f"{self.rows} rows" if self.tokens_per_request == 1 else f"verify of {self.rows} rows, {self.tokens_per_request} a request"
        return f"{what}, lengths {self.lengths}, {self.seconds:.2f} s: {verdict} ({figures}{beside})"


@dataclass(frozen=True)
class _Outputs:
    logits: torch.Tensor  # [rows, vocab] fp32
    kv_rows: torch.Tensor  # [layers, 2, rows, num_kv_heads * head_dim] fp32: the new tokens' K and V
    aux: dict[int, torch.Tensor]  # by layer [rows, hidden] fp32: the stream that enters it


class SelfCheck:
    """Checks one model's widths.

    weights: the model's, as the kernel reads them. tolerances: name in FIGURES -> the largest relative L2 error,
    ||ours - SGLang's|| / ||SGLang's||, of any row; SGLANG_FP8_FIGURE is for FP8 weights only, AUX_FIGURES are for models that capture,
    MOE_FIGURES for MoE layers. by_layer: SGLang's layers start from our streams, as those of MoE models always do, and STREAM_FIGURES are figures.
    Raises ValueError for a name that this model's check has no figure of.
    """

    def __init__(
        self, model: torch.nn.Module, geometry: Geometry, weights: DecodeStepWeights, tolerances: Mapping[str, float], by_layer: bool = False
    ):
        by_layer = by_layer or geometry.is_moe
        known = (*FIGURES, SGLANG_FP8_FIGURE, *AUX_FIGURES, *(STREAM_FIGURES if by_layer else ()), *(MOE_FIGURES if geometry.is_moe else ()))
        if unknown := sorted(set(tolerances) - set(known)):
            raise ValueError(f"the self-check has no figure {unknown[0]!r}, only {', '.join(known)}")
        self._model, self._geometry, self._weights = model, geometry, weights
        self._is_fp8, self._by_layer = weights.format != "bf16", by_layer
        self._tolerances = {name: bound for name, bound in tolerances.items() if self._is_fp8 or name != SGLANG_FP8_FIGURE}

    @torch.no_grad()
    def run(
        self,
        original: Callable[..., Any],
        ours: Callable[..., Any],
        template: Any,
        kv: KvState,
    ) -> SelfCheckReport:
        """Compares `original` and `ours`, both called as (input_ids, positions, forward_batch), at template's batch size. Where the model
        captures auxiliary hidden states, both return them as hidden_states when a batch asks for all of them. Of layers that are compared one by
        one `ours` also takes a RoutingRecord with streams, `routing`.

        template: the running forward's ForwardBatch, of decode or verify, not changed. Misses are reported, not raised.
        """
        start_s = time.perf_counter()
        rows = int(template.input_ids.shape[0])
        report = SelfCheckReport(rows=rows, tokens_per_request=rows // int(template.batch_size))
        generator = torch.Generator().manual_seed(SEED + rows)
        inputs = make_inputs(self._geometry, kv, rows, generator, report.tokens_per_request)
        captured, distinct = sglang_state.captured_layers(self._model), []
        with _kept(kv, inputs), sglang_state.attention_metadata_kept():
            self._fill(kv, inputs, generator)
            for batch in inputs.batches:
                report.lengths += batch.tokens["seq_lens"].tolist()
                kv.req_to_token[inputs.request_rows, : inputs.columns] = batch.table
                forward_batch = sglang_state.check_batch(template, **batch.tokens, wants_hidden_states=bool(captured))
                record = RoutingRecord.empty(self._geometry, rows, inputs.slots.device, with_streams=True) if self._by_layer else None
                sglang_state.plan_attention(forward_batch)
                actual = self._outputs(ours if record is None else functools.partial(ours, routing=record), forward_batch, kv, captured)
                sglang_state.plan_attention(forward_batch)
                with ExitStack() as stand_ins:
                    notes: list[list[torch.Tensor]] = []
                    if record is not None:
                        came = stand_ins.enter_context(streamed_as(self._model, record))
                        notes = [came]
                    if self._geometry.is_moe:
                        routers = stand_ins.enter_context(routed_as(self._model, record))
                        notes += [routers.logits, routers.ids]
                    expected = self._expected(original, forward_batch, kv, captured, report, notes)
                _note(report.figures, _errors(actual, expected, captured))
                if record is not None:
                    _note(report.figures, stream_errors(record, came))
                if self._geometry.is_moe:
                    _note(report.figures, routing_errors(record, routers))
                    others = other_choices(record, routers)
                    report.choices, report.other_choices = report.choices + others.numel(), report.other_choices + int(others.sum())
                    distinct.append(distinct_experts(record))
        report.experts_a_layer = sum(distinct) / len(distinct) if distinct else 0.0
        report.misses = [
            f"{name} {report.figures[name]:.3g} is not within {bound:g}"
            for name, bound in self._tolerances.items()
            if (captured or name not in AUX_FIGURES) and not report.figures[name] <= bound
        ]
        report.seconds = time.perf_counter() - start_s
        return report

    def _fill(self, kv: KvState, inputs: CheckInputs, generator: torch.Generator) -> None:
        """Writes a real-scale context: K as the k norm or the projection leaves it, V as the projection makes it."""
        device = inputs.slots.device
        noise = torch.Generator(device).manual_seed(int(torch.randint(1 << 31, (1,), generator=generator)))
        for layer, tensors in enumerate(self._weights.layers):
            shape = (len(inputs.slots), *kv.k[layer].shape[1:])
            k = like_keys(torch.randn(shape, generator=noise, device=device), tensors)
            v = torch.randn(shape, generator=noise, device=device) * inputs.loudness[:, None, None]
            v *= value_scale(tensors, self._geometry)
            kv.k[layer][inputs.slots] = k.to(torch.bfloat16)
            kv.v[layer][inputs.slots] = v.to(torch.bfloat16)

    def _expected(
        self, original: Callable[..., Any], forward_batch: Any, kv: KvState, captured: tuple[int, ...], report: SelfCheckReport,
        notes: Sequence[list[torch.Tensor]],
    ) -> _Outputs:
        """What ours is compared to: SGLang's forward; of FP8 weights with exact products, and its own is noted beside. The layers beside
        the captured ones are captured too. notes: of MoE layers what stand-ins note of a forward; of the forward returned they stay."""
        layers = with_neighbours(captured, self._geometry.num_layers)
        with sglang_state.capturing(self._model, layers):
            sglang = self._outputs(original, forward_batch, kv, layers)
            if not self._is_fp8:
                return sglang
            for note in notes:
                note.clear()
            with exact_linears(self._model, self._weights):
                sglang_state.plan_attention(forward_batch)
                exact = self._outputs(original, forward_batch, kv, layers)
        errors = _errors(sglang, exact, captured)
        _note(report.sglang_fp8, errors)
        _note(report.figures, {SGLANG_FP8_FIGURE: errors["kv.relative_l2"][:2]})
        return exact

    def _outputs(self, forward: Callable[..., Any], forward_batch: Any, kv: KvState, captured: Sequence[int]) -> _Outputs:
        written = forward_batch.out_cache_loc
        # poison: a row that is not written cannot pass
        for buffer in (*kv.k, *kv.v):
            buffer[written] = float("nan")
        output = forward(forward_batch.input_ids, forward_batch.positions, forward_batch)
        aux = split_layers(output.hidden_states, captured, self._geometry.hidden) if captured else {}
        pairs = [torch.stack([k[written], v[written]]) for k, v in zip(kv.k, kv.v)]
        return _Outputs(logits=output.next_token_logits.float().clone(), kv_rows=torch.stack(pairs).float().flatten(start_dim=3), aux=aux)


def _errors(actual: _Outputs, expected: _Outputs, captured: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """FIGURES of every row, and AUX_FIGURES of the captured layers."""
    kv_errors = relative_l2(actual.kv_rows, expected.kv_rows)
    errors = dict(zip(FIGURES, (relative_l2(actual.logits, expected.logits), kv_errors[:1], kv_errors)))
    return errors | (aux_errors(actual.aux, expected.aux, captured) if captured else {})


def _note(figures: dict[str, float], errors: Mapping[str, torch.Tensor]) -> None:
    """Keeps the worst of each."""
    for name, of_rows in errors.items():
        worst = float(of_rows.max()) if not bool(of_rows.isnan().any()) else float("nan")
        known = figures.get(name, 0.0)
        # NaN stays: it compares false with everything, also with the tolerance
        figures[name] = known if known != known or known > worst else worst


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """||actual - expected|| / ||expected|| over the last dimension; NaN where either side has one."""
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1)


@contextmanager
def _kept(kv: KvState, inputs: CheckInputs) -> Iterator[None]:
    """Saves the slots and request rows of `inputs` to host memory and puts them back, the device idle on both sides."""
    _synchronize(inputs.slots.device)
    rows = kv.req_to_token[inputs.request_rows, : inputs.columns].clone()
    saved = [(buffer, buffer[inputs.slots].cpu()) for buffer in (*kv.k, *kv.v)]
    try:
        yield
    finally:
        for buffer, values in saved:
            buffer[inputs.slots] = values.to(buffer.device)
        kv.req_to_token[inputs.request_rows, : inputs.columns] = rows
        _synchronize(inputs.slots.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
