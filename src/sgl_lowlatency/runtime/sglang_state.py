"""The one module that reads SGLang's pools, metadata and batches, so that a change upstream breaks one file.

Used of SGLang 0.5.23: the KV pool, `ForwardView.kv_pool.pool` on NVIDIA (`get_kv_buffer`, `page_size`, `post_capture_active`); the attention
backend of `forward_context.get_attn_backend()` (`token_to_kv_pool`, `init_forward_metadata`, `kv_index_translator.bind_runner_slots`,
`req_to_token_pool.req_to_token`); the ForwardBatch fields that `check_batch` names and the verify input's that `_chain` does;
the model's `capture_aux_hidden_states` and `model.layers_to_capture`; `layer_boundary.residual.batch` (`snapshot`, `set_written`);
`capture_mode.is_capture_mode`; `runtime_context.get_observability().enable_metrics`, `get_flags().moe.in_speculative_scope`, `get_spec()`
(`speculative_algorithm`, `speculative_num_draft_tokens`) and `get_parallel().tp_group` (`rank_in_group`, `world_size`, `cpu_group`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sgl_lowlatency.kernels.geometry import Geometry


@dataclasses.dataclass(frozen=True)
class KvState:
    """SGLang's KV memory.

    k, v: per layer [num_slots, num_kv_heads, head_dim] bf16; slots below `page_size` are padding.
    req_to_token: [request rows, context] int32, the slot of every token of a request; row 0 is padding.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    req_to_token: torch.Tensor
    page_size: int

    @property
    def num_slots(self) -> int:
        return self.k[0].shape[0]


def running_pool() -> Any:
    """The KV pool of the running forward's attention backend, where the contract hands none out."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    return get_attn_backend().token_to_kv_pool


def read_kv_state(pool: Any, geometry: Geometry) -> KvState:
    """pool: of the running forward. Raises RuntimeError naming what is not laid out as the kernels read it."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    req_to_token = get_attn_backend().req_to_token_pool.req_to_token
    buffers = [pool.get_kv_buffer(layer) for layer in range(geometry.num_layers)]
    k, v = [pair[0] for pair in buffers], [pair[1] for pair in buffers]
    row_shape, first = (geometry.num_kv_heads, geometry.head_dim), k[0]
    wrong = []
    for layer, pair in enumerate(buffers):
        for name, tensor in zip("kv", pair):
            if tuple(tensor.shape[1:]) != row_shape or tensor.dtype != torch.bfloat16:
                wrong.append(f"{name} of layer {layer} is {tuple(tensor.shape)} {tensor.dtype}, not [slots, {row_shape}] bf16")
            elif tensor.shape[0] != first.shape[0] or tensor.stride() != first.stride():
                wrong.append(f"{name} of layer {layer} is laid out unlike k of layer 0")
            elif tensor.stride()[1:] != (geometry.head_dim, 1):
                wrong.append(f"{name} of layer {layer} has strides {tensor.stride()}: a slot is not contiguous")
    if req_to_token.dtype != torch.int32 or req_to_token.dim() != 2 or req_to_token.stride(1) != 1:
        wrong.append(f"req_to_token is {tuple(req_to_token.shape)} {req_to_token.dtype}, not [requests, context] int32")
    if wrong:
        raise RuntimeError("the kernels cannot read SGLang's KV pool:\n  - " + "\n  - ".join(wrong))
    return KvState(k=k, v=v, req_to_token=req_to_token, page_size=int(pool.page_size))


def backs_only_padding(pool: Any) -> bool:
    """Whether only the padding page of the KV pool has memory behind it (post-capture KV sizing, before it ends)."""
    return bool(getattr(pool, "post_capture_active", False))


@contextlib.contextmanager
def attention_metadata_kept() -> Iterator[None]:
    """Lets the body plan the attention backend for batches of its own; puts the running forward's metadata back."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    kept = dict(vars(backend))
    try:
        yield
    finally:
        for name in vars(backend).keys() - kept.keys():
            delattr(backend, name)
        vars(backend).update(kept)


def plan_attention(forward_batch: Any) -> None:
    """Plans the running forward's attention backend for `forward_batch`, whose out_cache_loc are the slots as they are."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    if backend.kv_index_translator is not None:
        backend.kv_index_translator.bind_runner_slots(forward_batch)
    backend.init_forward_metadata(forward_batch)


def check_batch(
    template: Any,
    *,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    wants_hidden_states: bool = False,
) -> Any:
    """A ForwardBatch with the given int64 tensors, everything else as in `template`, outputs unbound. wants_hidden_states: of every row.

    input_ids, positions, out_cache_loc: [rows]. seq_lens, req_pool_indices: [requests]. A decode template has one row a request
    and its seq_lens include it; a verify template has several, which its seq_lens leave out and which form one chain.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    spec_info = template.spec_info
    if template.forward_mode.is_target_verify():
        spec_info = _chain(spec_info, input_ids, positions, seq_lens)
    return dataclasses.replace(
        template,
        batch_size=seq_lens.shape[0],
        input_ids=input_ids,
        positions=positions,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens.cpu(),
        seq_lens_sum=int(seq_lens.sum()),
        orig_seq_lens=seq_lens,
        req_pool_indices=req_pool_indices,
        req_pool_indices_cpu=None,
        out_cache_loc=out_cache_loc,
        out_cache_loc_virtual=None,
        kv_loc_plan=None,
        kv_loc_cols=None,
        residual_stream=None,
        spec_info=spec_info,
        return_logprob=False,
        capture_hidden_mode=CaptureHiddenMode.FULL if wants_hidden_states else CaptureHiddenMode.NULL,
        next_token_logits_buffer=None,
        aux_hidden_states_buffer=None,
        forward_metadata_ready=False,
    )


def _chain(spec_info: Any, input_ids: torch.Tensor, positions: torch.Tensor, prefix_lens: torch.Tensor) -> Any:
    """A verify input as `spec_info`, for one chain of drafts a request. Backends that read a mask get the chain's: flat, of
    every request [drafts, prefix + drafts] bool. DFLASH and DSPARK have none: plain causal."""
    drafts = input_ids.shape[0] // prefix_lens.shape[0]
    made = copy.copy(spec_info)
    made.draft_token, made.positions = input_ids, positions
    if spec_info.custom_mask is not None:
        causal = torch.ones((drafts, drafts), dtype=torch.bool, device=input_ids.device).tril()
        masks = [torch.cat((causal.new_ones((drafts, prefix)), causal), dim=1).flatten() for prefix in prefix_lens.tolist()]
        made.custom_mask = torch.cat(masks)
    of_the_live_batch = {
        "seq_lens_cpu": prefix_lens.cpu(), "seq_lens_sum": int(prefix_lens.sum()), "live_seq_lens_cpu": prefix_lens.cpu(),
        "kv_loc_plan": None, "kv_loc_cols": None, "candidate_max_seq_len_upper_bound": None,
    }
    for name, value in of_the_live_batch.items():
        if hasattr(made, name):  # each algorithm's input has some of them
            setattr(made, name, value)
    return made


def captured_layers(model: Any) -> tuple[int, ...]:
    """The layers whose input the model's forward hands over as auxiliary hidden states, in its order: ascending, each once, those that
    it has. () when it captures none."""
    if not model.capture_aux_hidden_states:
        return ()
    return tuple(layer for layer in range(len(model.model.layers)) if layer in model.model.layers_to_capture)


@contextlib.contextmanager
def capturing(model: Any, layers: Sequence[int]) -> Iterator[None]:
    """Lets the model's forward capture the inputs of `layers` within the body; of a model that captures none, [] changes nothing."""
    kept = model.model.layers_to_capture
    model.model.layers_to_capture = list(layers) if model.capture_aux_hidden_states else kept
    try:
        yield
    finally:
        model.model.layers_to_capture = kept


def stream_entering(hidden_states: Any, forward_batch: Any) -> torch.Tensor:
    """The residual stream [rows, hidden] that enters a layer whose forward is called with these: what the layer before left plus its residual,
    added in float32 and rounded to bf16 as the fused add and norm rounds what it carries on. A tensor of its own; nothing is consumed."""
    from sglang.srt.layers.layer_boundary.residual import batch

    return batch.snapshot(hidden_states, forward_batch)


def enter_with(stream: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """Lets the next layer start from `stream` [rows, hidden] bf16 as from one that is written already, with nothing to add: its norm reads it
    and the layer adds to it in place. Returns the hidden_states to call the layer with."""
    from sglang.srt.layers.layer_boundary.residual import batch

    return batch.set_written(stream, forward_batch)


def capturing_graphs() -> bool:
    """Whether SGLang is capturing its graphs: the eager warm-up runs before each capture included, replays not."""
    from sglang.srt.model_executor.runner_utils import capture_mode

    return capture_mode.is_capture_mode


def metrics_enabled() -> bool:
    """Whether this server exports Prometheus metrics (--enable-metrics)."""
    from sglang.srt.runtime_context import get_observability

    return bool(get_observability().enable_metrics)


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """This process's place among the ranks that share the model. group: a process group of theirs on the CPU (gloo), None of one rank."""

    rank: int
    num_ranks: int
    group: Any


def tensor_parallel() -> TensorParallel:
    """Of the server, once its groups are there."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    return TensorParallel(group.rank_in_group, group.world_size, group.cpu_group if group.world_size > 1 else None)


def building_draft_model() -> bool:
    """Whether the model being built is the draft model of a speculative server, not the served one."""
    from sglang.srt.runtime_context import get_flags

    return bool(get_flags().moe.in_speculative_scope)


def tokens_per_request() -> int:
    """Of this server's decode or verify steps, for a contract that does not say it."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    return 1 if spec.speculative_algorithm is None else int(spec.speculative_num_draft_tokens or 1)
