"""The BuiltMonokernels SGLang installs on AMD: the decoder layers of a step by k1 and k2, two launches each, on the current stream.

SGLang routes by its shape key and knows no other way than `forward`, so a step that is not ours after all (a hook, input embeddings) runs the model's
own forward from here. Steps that SGLang never routes to us pass `count_unrouted`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sgl_lowlatency import config
from sgl_lowlatency.kernels.fault import describe_mono_fault
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.kernels.monokernel import MonoInputs
from sgl_lowlatency.runtime import sglang_state
from sgl_lowlatency.runtime.self_check import SelfCheck
from sgl_lowlatency.runtime.supervision import Supervision

if TYPE_CHECKING:
    from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, RoutingRecord
    from sgl_lowlatency.kernels.monokernel import Monokernels

# A spec's bound, <launch>.<output>.<metric>, by the self-check's figure: of the launch whose output it is.
FIGURES = {
    "k1.first_layer_kv.rel": "first_layer_kv.relative_l2",
    "k1.kv.rel": "kv.relative_l2",
    "k2.logits.rel": "logits.relative_l2",
    "k2.stream.rel": "stream.relative_l2",
    "k2.added.rel": "added.relative_l2",
    "k2.router_logits.rel": "router_logits.relative_l2",
    "k2.routing_gap.rel": "routing.gap",
    "k2.wrong_choices.max_abs": "routing.wrong_choices",
}


class AmdStep:
    """The embedding, the final norm, the LM head and the logits processor are the model's own; what lies between is the kernels'.

    model: a rank's, with its own `forward`. geometry: the rank's share, of the whole vocabulary. bounds: names of FIGURES. tokens_per_request: 1 in a
    server of plain decode, in a speculative one the tokens of a request in a verify step; steps of another kind are the model's. rope_table: gives
    the model's cos/sin table, asked at the first step: SGLang makes it longer after the build (load_model, reserve_rope_cache_for_long_sequences).
    exchange: as Supervision has it. One instance a process, used from SGLang's forward thread.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        geometry: Geometry,
        kernels: Monokernels,
        weights: DecodeStepWeights,
        bounds: Mapping[str, float],
        rope_table: Callable[[], torch.Tensor],
        tokens_per_request: int = 1,
        exchange: Callable[[Mapping[str, Any]], list[dict]] | None = None,
    ):
        self._model, self._geometry, self._kernels, self._original = model, geometry, kernels, model.forward
        self._tokens_per_request, self._rope_table = tokens_per_request, rope_table
        self._kv: sglang_state.KvState | None = None
        inner = model.model
        tolerances = {FIGURES[name]: bound for name, bound in bounds.items()}
        self._supervision = Supervision(
            kernel="monokernel", launcher=kernels, describe=describe_mono_fault, widths=sorted(rows for rows, _ in kernels.widths),
            tokens_per_request=tokens_per_request,
            # not the embedding and the last norm, which are called as ever
            replaced=[("model", inner), *((f"model.layers.{name}" if name else "model.layers", module) for name, module in inner.layers.named_modules())],
            self_check=SelfCheck(model, geometry, weights, tolerances, by_layer=True) if config.get().self_check else None, exchange=exchange,
        )  # fmt: skip
        self.coverage = self._supervision.coverage

    def summary(self) -> str:
        """What was built, for the log."""
        g, kernels = self._geometry, self._kernels
        verify = "" if self._tokens_per_request == 1 else f" (verify, {self._tokens_per_request} tokens a request)"
        num_ranks = kernels.workspaces.layout.num_ranks
        ranks = "" if num_ranks == 1 else f", rank {kernels.rank} of {num_ranks}"
        return (
            f"monokernel{verify}{ranks}: {g.num_layers} layers of two launches, hidden {g.hidden}, {g.num_q_heads}/{g.num_kv_heads} heads of "
            f"{g.head_dim}, {g.mlp_words}; {kernels.extra_bytes / 2**20:.1f} MiB beside the model; {kernels.grid} workgroups, {kernels.isa}"
        )

    def count_unrouted(self) -> Callable[..., Any]:
        """The model's forward as it is, for SGLang to call in the steps that it does not route here: each is counted with its reason."""

        @functools.wraps(self._original)
        def forward(input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            reason = self._supervision.batch_reason(input_ids, forward_batch, *args, **kwargs)
            self._supervision.count_fallback(reason or "a step that SGLang does not route here")
            return self._original(input_ids, positions, forward_batch, *args, **kwargs)

        return forward

    @torch.no_grad()
    def forward(self, plan: Any, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The LogitsProcessorOutput of the step that SGLang routed by `plan`, a key.

        Without gradients, as the forward that it replaces. Raises RuntimeError when the pools cannot be read or the self-check of this number of rows
        fails: the server must not serve.
        """
        rows = int(plan.key.rows)
        reason = self._supervision.batch_reason(input_ids, forward_batch, *args, **kwargs)
        captures = "auxiliary hidden states" if self._model.capture_aux_hidden_states else None
        reason = reason or self._supervision.model_reason(rows, captures)
        if reason is not None:
            self._supervision.count_fallback(reason)
            return self._original(input_ids, positions, forward_batch, *args, **kwargs)
        pool = sglang_state.running_pool()
        if self._kv is None:
            self._kv = sglang_state.read_kv_state(pool, self._geometry)
            self._kernels.attach_kv(self._kv.k, self._kv.v, self._kv.req_to_token)
            self._kernels.attach_rope(self._rope_table())
        self._supervision.check(
            rows, self._original, functools.partial(self._run, is_poisoned=True), forward_batch, self._kv,
            backs_only_padding=sglang_state.backs_only_padding(pool),
        )  # fmt: skip
        self._supervision.before_launch(rows)
        return self._run(input_ids, positions, forward_batch)

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, is_poisoned: bool = False, routing: RoutingRecord | None = None
    ) -> Any:
        """is_poisoned: what the kernels must write is NaN before, so that nothing left unwritten passes a check. routing: kept."""
        inner = self._model.model
        embedding = inner.embed_tokens(input_ids)
        inputs = MonoInputs(
            positions, forward_batch.out_cache_loc, forward_batch.seq_lens, forward_batch.req_pool_indices, self._tokens_per_request,
            lengths_are_prefix=self._tokens_per_request > 1,
        )  # fmt: skip
        if is_poisoned:
            self._kernels.poison()
        stream = torch.cuda.current_stream(embedding.device).cuda_stream if embedding.is_cuda else 0
        x, residual = self._kernels.launch(embedding, inputs, stream, routing)
        # Copies: the norm may write in place, and hidden states that SGLang keeps must outlast the next step.
        hidden, _ = inner.norm(x.clone(), residual.clone())
        return self._model.logits_processor(input_ids, hidden, self._model.lm_head, forward_batch, None)
