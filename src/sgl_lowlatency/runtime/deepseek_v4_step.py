"""What the spec of DeepSeek-V4.1 builds: SGLang's own forward with the MoE of every layer taken by fused_moe in the steps that it covers.

Attention, Engram, mHC, KV and hidden states that drafts read stay SGLang's: a covered step is its forward, in which the layers' `mlp.forward`
launches the kernel. Everything else, prefill and rows beyond the widths included, is SGLang's forward as it is.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.kernels.plugin_kernels.nvidia.spec import Step

from sgl_lowlatency.kernels.fault import describe_moe_fault
from sgl_lowlatency.kernels.fused_moe import FusedMoe, FusedMoeWeights, RoutingRecord
from sgl_lowlatency.reference import fused_moe as oracle
from sgl_lowlatency.runtime.fault_watch import FaultWatch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of one layer, by the spec's bounds. out: the largest relative L2 of a row whose experts are SGLang's. gap: how far below SGLang's last choice,
    by biased score, one of ours is that SGLang has not made."""

    layer: int
    out: float
    gap: float


class MoeSlice:
    """Stands for `forward` of one layer's DeepseekV2MoE."""

    def __init__(self, step: DeepseekV4Step, number: int, mlp: Any, layer: Any):
        self._step, self._number, self._mlp, self._layer, self._original = step, number, mlp, layer, mlp.forward

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the original, whose sum of experts and shared expert it returns merged."""
        is_whole = not (args[1:] or kwargs.get("skip_shared_experts") or kwargs.get("return_moe_output"))
        if not self._step.is_running or not is_whole:
            return self._original(hidden_states, *args, **kwargs)
        token_ids = kwargs.get("input_ids_global")
        if self._step.is_checking:
            self._step.differences.append(self._compare(hidden_states, token_ids, args, kwargs))
        out = torch.empty_like(hidden_states)
        self._launch(hidden_states, out, token_ids)
        return out

    def _launch(self, x: torch.Tensor, out: torch.Tensor, token_ids: torch.Tensor | None, record: RoutingRecord | None = None) -> None:
        bound, _ = self._mlp.topk.routing_inputs()
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        live = None if bound is None else bound.view(1)
        self._step.kernel.launch(self._layer, x, out, token_ids if self._layer.weights.bias_alt is not None else None, live, record, stream)

    def _compare(self, hidden_states: torch.Tensor, token_ids: torch.Tensor | None, args: tuple, kwargs: Mapping[str, Any]) -> Difference:
        """On random rows of the step's own size: warm-up data is one token in every row."""
        rows, weights = hidden_states.shape[0], self._layer.weights
        generator = torch.Generator(device=hidden_states.device).manual_seed(self._number)
        size = hidden_states.float().square().mean().sqrt().clamp(min=1e-3)
        x = (torch.randn(hidden_states.shape, generator=generator, device=hidden_states.device) * size).to(hidden_states.dtype)
        theirs = self._original(x.clone(), *args, **kwargs)
        theirs = theirs.get_merged() if hasattr(theirs, "get_merged") else theirs
        ours = torch.full_like(x, float("nan"))
        record = RoutingRecord(
            torch.full((rows, weights.top_k), -7, dtype=torch.int32, device=x.device), torch.zeros(rows, weights.top_k, device=x.device),
            torch.zeros(rows, weights.router.shape[0], device=x.device),
        )  # fmt: skip
        self._launch(x, ours, token_ids, record)
        biased = oracle.biased_scores(weights, self._mlp.gate(x).float(), token_ids)
        wanted, own = biased.topk(weights.top_k).indices.sort(1).values, record.ids.long().sort(1).values
        is_live, is_same = (own >= 0).all(1), (own == wanted).all(1)
        gap = (biased.gather(1, wanted).amin(1) - biased.gather(1, own.clamp(min=0)).amin(1))[is_live].clamp(min=0)
        error = (ours.float() - theirs.float()).norm(dim=1) / theirs.float().norm(dim=1).clamp(min=1e-30)
        is_judged = is_live & is_same
        out = float("inf") if not bool(is_judged.any()) else float(error[is_judged].max().nan_to_num(nan=float("inf")))
        return Difference(self._number, out, float(gap.max()) if gap.numel() else 0.0)


class DeepseekV4Step:
    """layers: the MoE modules of the model's layers, in order, with their weights. widths: rows of the steps that are served. bounds:
    "moe.relative_l2" and "routing.gap", of the check that the first step of each width which is not captured makes. check: whether it is made."""

    draft_sampler = None

    def __init__(
        self,
        layers: Sequence[tuple[Any, FusedMoeWeights]],
        kernel: FusedMoe,
        widths: Sequence[int],
        tokens_per_request: int,
        bounds: Mapping[str, float],
        check: bool,
    ):
        self.kernel, self.widths = kernel, tuple(sorted(widths))
        self._tokens_per_request, self._bounds, self._check = tokens_per_request, bounds, check
        self.is_running = self.is_checking = False
        self.differences: list[Difference] = []
        self._checked: set[int] = set()
        for number, (mlp, weights) in enumerate(layers):
            mlp.forward = MoeSlice(self, number, mlp, kernel.prepare(weights))
        self._num_layers = len(layers)
        FaultWatch(kernel.fault, kernel.acknowledge_fault, describe=describe_moe_fault).start()

    def summary(self) -> str:
        """What was built, for SGLang's startup line."""
        k = self.kernel
        return (f"fused_moe in {self._num_layers} layers, {k.num_experts} experts of {k.intermediate}, top {k.top_k}, up to {self.widths[-1]} rows; "
                f"{k.extra_bytes / 2**20:.1f} MiB beside the model; {k.grid} blocks")  # fmt: skip

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Step | None:
        """The step, or None for SGLang's forward as it is. Host-only."""
        mode, rows = forward_batch.forward_mode, input_ids.shape[0]
        if rows not in self.widths:
            return None
        if mode.is_target_verify():
            return Step("target_verify", rows) if self._tokens_per_request > 1 else None
        is_plain = mode.is_decode() and forward_batch.spec_info is None and self._tokens_per_request == 1
        return Step("decode", rows) if is_plain else None

    def forward(self, step: Step, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """SGLang's forward with our MoE. The first of a width that no graph captures is checked layer by layer: raises RuntimeError with figures."""
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.is_running, self.is_checking = True, self._check and not is_capturing and step.rows not in self._checked
        try:
            output = original(*args, **kwargs)
            if self.is_checking:
                self._judge(step.rows)
            return output
        finally:
            self.is_running = self.is_checking = False
            self.differences.clear()

    def _judge(self, rows: int) -> None:
        if len(self.differences) != self._num_layers:
            raise RuntimeError(f"fused_moe was asked for {len(self.differences)} layers of {self._num_layers} in a step of {rows} rows")
        out, gap = max(self.differences, key=lambda d: d.out), max(self.differences, key=lambda d: d.gap)
        found = f"relative L2 {out.out:.4f} (layer {out.layer}), routing gap {gap.gap:.2e} (layer {gap.layer})"
        if not (out.out <= self._bounds["moe.relative_l2"] and gap.gap <= self._bounds["routing.gap"]):
            raise RuntimeError(f"fused_moe differs from SGLang's MoE in a step of {rows} rows: {found}; bounds {dict(self._bounds)}")
        self._checked.add(rows)
        logger.info("fused_moe checked against SGLang's MoE at %d rows: %s", rows, found)
