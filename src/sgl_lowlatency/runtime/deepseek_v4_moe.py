"""The MoE of a DeepSeek-V4.1 layer by fused_moe, where SGLang's layer calls it or behind attention_out with its mix and post, and its comparison with
SGLang's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sgl_lowlatency.kernels.fused_moe import FusedMoe, RoutingRecord
from sgl_lowlatency.kernels.hyper_connection import MIXES, STREAMS
from sgl_lowlatency.reference import fused_moe as oracle
from sgl_lowlatency.runtime.deepseek_v4_check import MOE_FIGURES, MOE_POST_FIGURES, Figure, row_errors
from sgl_lowlatency.runtime.deepseek_v4_layer import Running
from sgl_lowlatency.runtime.deepseek_v4_sglang import close_sublayer, stream_of


class MoeSlice:
    """Stands for `forward` of one layer's DeepseekV2MoE, layer.mlp. prepared: the layer as kernel.prepare left it."""

    def __init__(self, running: Running, number: int, layer: Any, kernel: FusedMoe, prepared: Any):
        self._running, self._number, self._layer, self._kernel, self.prepared = running, number, layer, kernel, prepared
        self._original = layer.mlp.forward
        layer.mlp.forward = self

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the original, whose sum of experts and shared expert it returns merged."""
        is_whole = not (args[1:] or kwargs.get("skip_shared_experts") or kwargs.get("return_moe_output"))
        if not self._running.is_on or "moe" not in self._running.taken or not is_whole:
            return self._original(hidden_states, *args, **kwargs)
        token_ids = kwargs.get("input_ids_global")
        if self._running.is_checking:
            self._running.figures += self._figures(hidden_states, token_ids, args, kwargs)
        out = torch.empty_like(hidden_states)
        self._launch(hidden_states, out, token_ids, self._kept_record(hidden_states))
        return out

    def close(
        self, x: torch.Tensor, streams: torch.Tensor, forward_batch: Any, input_ids: Any, input_ids_global: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(streams [rows, 4, hidden] behind the MoE, the pre [rows, 4] of their combine) of its input x [rows, hidden], which `streams` were combined
        to. The rest: of the layer's call."""
        if self._running.is_checking:
            call = {"input_ids": input_ids, "input_ids_global": input_ids_global, "leave_output_sum": True}
            self._running.figures += self._figures(x, input_ids_global, (forward_batch,), call, has_post=True)
        behind, coefficients = self._empty_post(x)
        self._launch(x, None, input_ids_global, self._kept_record(x), streams=streams, streams_out=behind, coefficients=coefficients)
        return behind, coefficients[:, :STREAMS]

    def _empty_post(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, hidden = x.shape
        return x.new_empty((rows, STREAMS, hidden)), torch.empty((rows, MIXES), dtype=torch.float32, device=x.device)

    def _kept_record(self, x: torch.Tensor) -> RoutingRecord | None:
        """Where somebody wants the router's logits, what receives them."""
        if self._running.router_logits is None:
            return None
        record = self._record(x)
        self._running.router_logits[self._number] = record.logits
        return record

    def _record(self, x: torch.Tensor) -> RoutingRecord:
        rows, weights = x.shape[0], self.prepared.weights
        return RoutingRecord(
            torch.full((rows, weights.top_k), -7, dtype=torch.int32, device=x.device), torch.zeros(rows, weights.top_k, device=x.device),
            torch.zeros(rows, weights.router.shape[0], device=x.device),
        )  # fmt: skip

    def _launch(
        self, x: torch.Tensor, out: torch.Tensor | None, token_ids: torch.Tensor | None, record: RoutingRecord | None = None, **post: torch.Tensor
    ) -> None:
        """post: FusedMoe.launch's streams, streams_out and coefficients, or nothing."""
        bound, _ = self._layer.mlp.topk.routing_inputs()
        live, token_ids = None if bound is None else bound.view(1), token_ids if self.prepared.weights.bias_alt is not None else None
        self._kernel.launch(self.prepared, x, out, token_ids, live, record, stream_of(x), **post)

    def _figures(
        self, like: torch.Tensor, token_ids: torch.Tensor | None, args: tuple, kwargs: Mapping[str, Any], has_post: bool = False
    ) -> list[Figure]:
        """On random rows of the step's own size. MOE_FIGURES: the largest relative L2 of a row whose experts are SGLang's; how far below SGLang's
        last choice, by biased score, one of ours is that SGLang has not made. has_post: MOE_POST_FIGURES too, of streams of the output's scale, so
        that what is wrong with either is seen in both."""
        weights = self.prepared.weights
        generator = torch.Generator(device=like.device).manual_seed(self._number)
        size = like.float().square().mean().sqrt().clamp(min=1e-3)
        x = (torch.randn(like.shape, generator=generator, device=like.device) * size).to(like.dtype)
        theirs = self._original(x.clone(), *args, **kwargs)
        theirs = theirs.get_merged() if hasattr(theirs, "get_merged") else theirs
        ours, post = torch.full_like(x, float("nan")), {}
        if has_post:
            behind, coefficients = (t.fill_(float("nan")) for t in self._empty_post(x))
            streams = torch.randn(behind.shape, generator=generator, device=x.device) * theirs.float().square().mean().sqrt().clamp(min=1e-3)
            post = {"streams": streams.to(x.dtype), "streams_out": behind, "coefficients": coefficients}
        record = self._record(x)
        self._launch(x, ours, token_ids, record, **post)
        biased = oracle.biased_scores(weights, self._layer.mlp.gate(x).float(), token_ids)
        wanted, own = biased.topk(weights.top_k).indices.sort(1).values, record.ids.long().sort(1).values
        is_live, is_same = (own >= 0).all(1), (own == wanted).all(1)
        gap = (biased.gather(1, wanted).amin(1) - biased.gather(1, own.clamp(min=0)).amin(1))[is_live].clamp(min=0)
        is_judged = is_live & is_same

        def worst(errors: torch.Tensor) -> float:
            return float(errors[is_judged].max()) if bool(is_judged.any()) else float("inf")

        values = [worst(row_errors(ours, theirs)), float(gap.max()) if gap.numel() else 0.0]
        if has_post:
            their_coefficients, their_streams = close_sublayer(self._layer, "ffn", theirs, post["streams"])
            values += [float(row_errors(coefficients, their_coefficients).max()), worst(row_errors(behind, their_streams))]
        names = MOE_FIGURES + MOE_POST_FIGURES if has_post else MOE_FIGURES
        return [Figure(name, self._number, value) for name, value in zip(names, values, strict=True)]
