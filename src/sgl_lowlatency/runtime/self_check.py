"""Before a width serves: SGLang's own forward and ours, on the same inputs of our making, compared output by output.

The data SGLang warms up with (token 0, position 0, length 1, slot 0) exercises nothing, so the check writes its own: random
tokens, requests of many lengths over scattered pages, K and V at the model's scale; for verify, a chain of draft tokens behind
each. Whatever it touches is put back. It runs on the forward's thread with the device idle on both sides, so no other stream
sees its data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.self_check_inputs import CheckInputs, like_keys, make_inputs, value_scale
from sgl_lowlatency.runtime.sglang_state import KvState

SEED = 20_241
# Over the logits [rows, vocab], and over the K and V rows that the step wrote, of the first layer (one norm, one matrix and
# one rotation away from the embedding: hardly any error of rounding) and of all layers.
FIGURES = ("logits.relative_l2", "first_layer_kv.relative_l2", "kv.relative_l2")


@dataclass
class SelfCheckReport:
    """lengths: of every request, as SGLang counts them. figures: the worst value of each tolerance's name. misses: one sentence a
    figure out of tolerance, empty on a pass."""

    rows: int
    tokens_per_request: int = 1
    lengths: list[int] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value:.2g}" for name, value in sorted(self.figures.items()))
        verdict = "FAILED: " + "; ".join(self.misses) if self.misses else "passed"
        what = f"{self.rows} rows" if self.tokens_per_request == 1 else f"verify of {self.rows} rows, {self.tokens_per_request} a request"
        return f"{what}, lengths {self.lengths}, {self.seconds:.2f} s: {verdict} ({figures})"


@dataclass(frozen=True)
class _Outputs:
    logits: torch.Tensor  # [rows, vocab] fp32
    kv_rows: torch.Tensor  # [layers, 2, rows, num_kv_heads * head_dim] fp32: the new tokens' K and V


class SelfCheck:
    """Checks one model's widths.

    tolerances: name in FIGURES -> the largest relative L2 error, ||ours - SGLang's|| / ||SGLang's||, of any row. Raises
    ValueError for another name.
    """

    def __init__(self, model: torch.nn.Module, geometry: Geometry, tolerances: Mapping[str, float]):
        unknown = sorted(set(tolerances) - set(FIGURES))
        if unknown:
            raise ValueError(f"the self-check has no figure {unknown[0]!r}, only {', '.join(FIGURES)}")
        self._layers = list(model.model.layers)
        self._geometry, self._tolerances = geometry, tolerances

    @torch.no_grad()
    def run(
        self,
        original: Callable[..., Any],
        ours: Callable[..., Any],
        template: Any,
        kv: KvState,
    ) -> SelfCheckReport:
        """Compares `original` and `ours`, both called as (input_ids, positions, forward_batch), at template's batch size.

        template: the running forward's ForwardBatch, of decode or verify, not changed. Misses are reported, not raised.
        """
        start_s = time.perf_counter()
        rows = int(template.input_ids.shape[0])
        report = SelfCheckReport(rows=rows, tokens_per_request=rows // int(template.batch_size))
        generator = torch.Generator().manual_seed(SEED + rows)
        inputs = make_inputs(self._geometry, kv, rows, generator, report.tokens_per_request)
        with _kept(kv, inputs), sglang_state.attention_metadata_kept():
            self._fill(kv, inputs, generator)
            for batch in inputs.batches:
                report.lengths += batch.tokens["seq_lens"].tolist()
                kv.req_to_token[inputs.request_rows, : inputs.columns] = batch.table
                forward_batch = sglang_state.check_batch(template, **batch.tokens)
                sglang_state.plan_attention(forward_batch)
                expected = self._outputs(original, forward_batch, kv)
                sglang_state.plan_attention(forward_batch)
                actual = self._outputs(ours, forward_batch, kv)
                self._compare(expected, actual, report)
        report.misses = [
            f"{name} {report.figures[name]:.3g} is not within {bound:g}"
            for name, bound in self._tolerances.items()
            if not report.figures[name] <= bound
        ]
        report.seconds = time.perf_counter() - start_s
        return report

    def _fill(self, kv: KvState, inputs: CheckInputs, generator: torch.Generator) -> None:
        """Writes a real-scale context: K as the k norm or the projection leaves it, V as the projection makes it."""
        device = inputs.slots.device
        noise = torch.Generator(device).manual_seed(int(torch.randint(1 << 31, (1,), generator=generator)))
        for layer, module in enumerate(self._layers):
            shape = (len(inputs.slots), *kv.k[layer].shape[1:])
            attention = module.self_attn
            k = like_keys(torch.randn(shape, generator=noise, device=device), attention, module.input_layernorm.weight)
            v = torch.randn(shape, generator=noise, device=device) * inputs.loudness[:, None, None]
            v *= value_scale(attention.qkv_proj.weight, module.input_layernorm.weight, self._geometry)
            kv.k[layer][inputs.slots] = k.to(torch.bfloat16)
            kv.v[layer][inputs.slots] = v.to(torch.bfloat16)

    def _outputs(self, forward: Callable[..., Any], forward_batch: Any, kv: KvState) -> _Outputs:
        written = forward_batch.out_cache_loc
        # poison: a row that is not written cannot pass
        for buffer in (*kv.k, *kv.v):
            buffer[written] = float("nan")
        logits = forward(forward_batch.input_ids, forward_batch.positions, forward_batch).next_token_logits
        pairs = [torch.stack([k[written], v[written]]) for k, v in zip(kv.k, kv.v)]
        return _Outputs(logits=logits.float().clone(), kv_rows=torch.stack(pairs).float().flatten(start_dim=3))

    def _compare(self, expected: _Outputs, actual: _Outputs, report: SelfCheckReport) -> None:
        kv_errors = relative_l2(actual.kv_rows, expected.kv_rows)
        for name, errors in zip(FIGURES, (relative_l2(actual.logits, expected.logits), kv_errors[:1], kv_errors)):
            worst = float(errors.max()) if not bool(errors.isnan().any()) else float("nan")
            known = report.figures.get(name, 0.0)
            # NaN stays: it compares false with everything, also with the tolerance
            report.figures[name] = known if known != known or known > worst else worst


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
