"""The BuiltMegakernel SGLang installs: decides a step on the host, runs it on the current stream, hands over to the logits processor."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.plugin_kernels.nvidia.spec import Step

from sgl_lowlatency import config
from sgl_lowlatency.kernels.fault import describe_fault
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.lm_head import ComputedLogits, computes_logits, logits_for
from sgl_lowlatency.runtime.self_check import SelfCheck
from sgl_lowlatency.runtime.supervision import Supervision

if TYPE_CHECKING:
    from sgl_lowlatency.kernels.decode_step import DecodeStep
    from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
    from sgl_lowlatency.plan.static_plan import StaticPlan

logger = logging.getLogger(__name__)


class NvidiaStep:
    """`decode_step` from the embedding to the logits, or to the final norm, then the model's own logits processor, which gets the auxiliary
    hidden states that the model captures at the first forward.

    head_reasons: why the LM head is the logits processor's; it is the kernel's where step.weights have one.
    tokens_per_request: 1 in a server of plain decode; in a speculative one the tokens that a verify step has a request, and then
    it serves verify steps alone. exchange: of several ranks that share the model, of which geometry, step and plans are one's, as Supervision has it.
    widths: rows it serves. draft_sampler: None, it offers none. One instance a process, used from
    SGLang's forward thread.
    """

    draft_sampler = None

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        geometry: Geometry,
        step: DecodeStep,
        plans: Mapping[int, StaticPlan],
        tolerances: Mapping[str, float],
        device_name: str,
        tokens_per_request: int = 1,
        head_reasons: Sequence[str] = (),
        exchange: Callable[[Mapping[str, Any]], list[dict]] | None = None,
    ):
        self._head_reasons = tuple(head_reasons)
        self.widths = tuple(sorted(plans))
        self._tokens_per_request = tokens_per_request
        self._model, self._geometry, self._step, self._plans = model, geometry, step, plans
        self._device_name = device_name
        self._kv: sglang_state.KvState | None = None
        checked = geometry if step.group is None else dataclasses.replace(geometry, vocab=step.group.num_tokens)  # ids are of the whole vocabulary
        self._supervision = Supervision(
            kernel="decode_step", launcher=step, describe=describe_fault, widths=self.widths, tokens_per_request=tokens_per_request,
            # not the logits processor, which is called as ever
            replaced=[("model." + name if name else "model", module) for name, module in model.model.named_modules()],
            self_check=SelfCheck(model, checked, step.weights, tolerances) if config.get().self_check else None, exchange=exchange,
        )  # fmt: skip
        self.coverage = self._supervision.coverage

    def summary(self) -> str:
        """What was built, for SGLang's startup line."""
        g, widest = self._geometry, self._plans[self.widths[-1]]
        verify = "" if self._tokens_per_request == 1 else f" (verify, {self._tokens_per_request} tokens a request)"
        head = "LM head inside" if self._step.weights.lm_head is not None else f"LM head SGLang's ({'; '.join(self._head_reasons)})"
        group = self._step.group
        ranks = "" if group is None else f", rank {group.rank} of {group.workspaces.layout.num_ranks}"
        return (
            f"decode_step{verify}{ranks} for {g.num_layers} layers, hidden {g.hidden}, {g.num_q_heads}/{g.num_kv_heads} heads of "
            f"{g.head_dim}, {g.mlp_words}; {head}; {self._step.extra_bytes / 2**20:.1f} MiB beside the model; "
            f"{widest.grid} blocks on {self._device_name}; "
            f"plan {widest.hash[:12]}"
        )

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Step | None:
        """The step of `forward_batch`, or None for SGLang's forward, with the reason counted. Reads host state only."""
        per_request = self._tokens_per_request
        rows = int(forward_batch.batch_size) * per_request
        reason = self._supervision.batch_reason(input_ids, forward_batch, *args, **kwargs)
        reason = reason or self._supervision.model_reason(rows, self._capture_reason())
        if reason is not None:
            self._supervision.count_fallback(reason)
            return None
        return Step(mode="decode" if per_request == 1 else "target_verify", rows=rows)

    def _capture_reason(self) -> str | None:
        captured = sglang_state.captured_layers(self._model)
        if self._model.capture_aux_hidden_states and not captured:
            return "auxiliary hidden states of no layer"
        if self._kv is not None and captured != self._step.captured:
            return "auxiliary hidden states of other layers than at the first step"
        return None

    def forward(
        self,
        step: Step,
        original: Callable[..., Any],
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Runs `step` in place of `original` and returns the LogitsProcessorOutput it would.

        Raises RuntimeError when the pools cannot be read or the self-check of this width fails: the server must not serve.
        """
        pool = step.view.kv_pool.pool
        if self._kv is None:
            self._kv = sglang_state.read_kv_state(pool, self._geometry)
            self._step.attach_kv(self._kv.k, self._kv.v, self._kv.req_to_token)
            self._capture(sglang_state.captured_layers(self._model))  # SGLang names them after the build
        self._supervision.check(
            step.rows, original, functools.partial(self._run, is_poisoned=True), forward_batch, self._kv,
            backs_only_padding=sglang_state.backs_only_padding(pool),
        )  # fmt: skip
        self._supervision.before_launch(step.rows)
        return self._run(input_ids, positions, forward_batch)

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        is_poisoned: bool = False,
        routing: RoutingRecord | None = None,
    ) -> Any:
        """is_poisoned: what the kernel must write is NaN before, so that nothing left unwritten passes a check. routing: of MoE layers, kept."""
        rows = forward_batch.batch_size * self._tokens_per_request
        # A fresh tensor each call: the caching allocator hands its memory out again only to later work of this stream, and
        # under capture it lives in the graph's pool, so hidden states that SGLang keeps last as long as its own forward's.
        hidden = torch.empty((rows, self._geometry.hidden), dtype=torch.bfloat16, device=input_ids.device)
        aux = hidden.new_empty((rows, len(self._step.captured) * self._geometry.hidden)) if self._step.captured else None
        lm_head, logits = self._model.lm_head, None
        if computes_logits(self._model, self._step.weights.lm_head):
            logits = logits_for(forward_batch, rows, self._geometry.vocab, hidden.device)
            lm_head = ComputedLogits(lm_head, hidden, logits, is_shard=self._step.group is not None)
        if is_poisoned:
            for output in (hidden, aux, logits):
                if output is not None:
                    output.fill_(float("nan"))
        stream = torch.cuda.current_stream(hidden.device).cuda_stream if hidden.is_cuda else 0
        self._step.launch(
            rows,
            input_ids,
            positions,
            forward_batch.seq_lens,
            forward_batch.req_pool_indices,
            forward_batch.out_cache_loc,
            hidden,
            stream,
            lengths_are_prefix=self._tokens_per_request > 1,
            aux_out=aux,
            logits=logits,
            routing=routing,
        )
        return self._model.logits_processor(input_ids, hidden, lm_head, forward_batch, aux)

    def _capture(self, layers: tuple[int, ...]) -> None:
        self._step.capture(layers)
        if layers:
            logger.info("decode_step hands over the inputs of layers %s as auxiliary hidden states", ", ".join(map(str, layers)))
