"""The MoE of a DeepSeek-V4.1 layer by fused_moe, where SGLang's layer calls it, and its comparison with SGLang's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sgl_lowlatency.kernels.fused_moe import FusedMoe, RoutingRecord
from sgl_lowlatency.reference import fused_moe as oracle
from sgl_lowlatency.runtime.deepseek_v4_check import MOE_FIGURES, Figure, row_errors
from sgl_lowlatency.runtime.deepseek_v4_layer import Running
from sgl_lowlatency.runtime.deepseek_v4_sglang import stream_of


class MoeSlice:
    """Stands for `forward` of one layer's DeepseekV2MoE. prepared: the layer as kernel.prepare left it."""

    def __init__(self, running: Running, number: int, mlp: Any, kernel: FusedMoe, prepared: Any):
        self._running, self._number, self._mlp, self._kernel, self.prepared = running, number, mlp, kernel, prepared
        self._original = mlp.forward
        mlp.forward = self

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the original, whose sum of experts and shared expert it returns merged."""
        is_whole = not (args[1:] or kwargs.get("skip_shared_experts") or kwargs.get("return_moe_output"))
        if not self._running.is_on or "moe" not in self._running.taken or not is_whole:
            return self._original(hidden_states, *args, **kwargs)
        token_ids = kwargs.get("input_ids_global")
        if self._running.is_checking:
            self._running.figures += self._figures(hidden_states, token_ids, args, kwargs)
        out, record = torch.empty_like(hidden_states), None
        if self._running.router_logits is not None:
            record = self._record(hidden_states)
            self._running.router_logits[self._number] = record.logits
        self._launch(hidden_states, out, token_ids, record)
        return out

    def _record(self, x: torch.Tensor) -> RoutingRecord:
        rows, weights = x.shape[0], self.prepared.weights
        return RoutingRecord(
            torch.full((rows, weights.top_k), -7, dtype=torch.int32, device=x.device), torch.zeros(rows, weights.top_k, device=x.device),
            torch.zeros(rows, weights.router.shape[0], device=x.device),
        )  # fmt: skip

    def _launch(self, x: torch.Tensor, out: torch.Tensor, token_ids: torch.Tensor | None, record: RoutingRecord | None = None) -> None:
        bound, _ = self._mlp.topk.routing_inputs()
        live = None if bound is None else bound.view(1)
        self._kernel.launch(self.prepared, x, out, token_ids if self.prepared.weights.bias_alt is not None else None, live, record, stream_of(x))

    def _figures(self, like: torch.Tensor, token_ids: torch.Tensor | None, args: tuple, kwargs: Mapping[str, Any]) -> list[Figure]:
        """On random rows of the step's own size. MOE_FIGURES: the largest relative L2 of a row whose experts are SGLang's; how far below SGLang's
        last choice, by biased score, one of ours is that SGLang has not made."""
        weights = self.prepared.weights
        generator = torch.Generator(device=like.device).manual_seed(self._number)
        size = like.float().square().mean().sqrt().clamp(min=1e-3)
        x = (torch.randn(like.shape, generator=generator, device=like.device) * size).to(like.dtype)
        theirs = self._original(x.clone(), *args, **kwargs)
        theirs = theirs.get_merged() if hasattr(theirs, "get_merged") else theirs
        ours = torch.full_like(x, float("nan"))
        record = self._record(x)
        self._launch(x, ours, token_ids, record)
        biased = oracle.biased_scores(weights, self._mlp.gate(x).float(), token_ids)
        wanted, own = biased.topk(weights.top_k).indices.sort(1).values, record.ids.long().sort(1).values
        is_live, is_same = (own >= 0).all(1), (own == wanted).all(1)
        gap = (biased.gather(1, wanted).amin(1) - biased.gather(1, own.clamp(min=0)).amin(1))[is_live].clamp(min=0)
        is_judged = is_live & is_same
        out = float(row_errors(ours, theirs)[is_judged].max()) if bool(is_judged.any()) else float("inf")
        values = out, float(gap.max()) if gap.numel() else 0.0
        return [Figure(name, self._number, value) for name, value in zip(MOE_FIGURES, values, strict=True)]
