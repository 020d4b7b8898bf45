"""A decoder layer of DeepSeek-V4.1 in a step of ours: SGLang's layer issued anew around attention_in and attention_out, each by itself or both.

    SGLang's loop     Engram, hidden states that drafts read, the post of the MoE in front (where one of these or our layer asks for it)
    attention_in      combine and norm, wqkv_a, q norm, wq_b, rope, K norm, rope and store: what `_forward_prepare` returns of MQALayer.forward
    SGLang's backend  compressor and indexer in layers that have them, sparse attention
    attention_out     inverse rope, wo_a, wo_b; mix, post, combine and norm: what ffn_boundary.prepare returns
    fused_moe         behind attention_out: the MoE, its mix and its post (runtime/deepseek_v4_moe.py)
    SGLang's layer    otherwise: the MoE, which may be fused_moe within; its mix beside it, and its post behind it

Everything is issued on the forward's stream, in this order, and captured with it. Without attention_out SGLang's mix runs on its stream of its own
beside attention, from the same fork as ever: the input it is forked in front of is a tensor that attention_in has still to write. With attention_out
it is the kernel's, and of the MoE behind it fused_moe's: then no layer forks. Between layers the state is SGLang's: an output whose post is
outstanding, with the streams it was made from; or, behind fused_moe's post, streams with nothing outstanding and the pre of their combine.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from sgl_lowlatency.kernels.attention_in import HEAD_DIM, AttentionIn
from sgl_lowlatency.kernels.attention_out import AttentionOut
from sgl_lowlatency.kernels.fused_moe import FusedMoe
from sgl_lowlatency.kernels.hyper_connection import MIXES, STREAMS
from sgl_lowlatency.kernels.slice import Layer
from sgl_lowlatency.runtime import deepseek_v4_sglang as sglang_layer
from sgl_lowlatency.runtime.deepseek_v4_check import Figure, attention_in_figures, attention_out_figures

if TYPE_CHECKING:
    from sgl_lowlatency.runtime.deepseek_v4_moe import MoeSlice


@dataclasses.dataclass
class Running:
    """What the layers of a model share. taken: slices, of those that were built, that a step of ours takes. is_on: one runs. is_checking: and every
    layer compares what it takes with SGLang's, into `figures`. view: of the running forward, SGLang's ForwardView. router_logits: where somebody
    wants them, what fused_moe's router says in each layer, fp32 [rows, experts] by the layer's number."""

    taken: frozenset[str] = frozenset()
    is_on: bool = False
    is_checking: bool = False
    is_verify: bool = False
    view: Any = None
    figures: list[Figure] = dataclasses.field(default_factory=list)
    router_logits: dict[int, torch.Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class LayerSlices:
    """Of one layer: each kernel, which all layers share, and the layer as it is prepared for it; None: SGLang's launches stay."""

    attention_in: tuple[AttentionIn, Layer] | None = None
    attention_out: tuple[AttentionOut, Layer] | None = None
    moe: tuple[FusedMoe, Any] | None = None


class LayerStep:
    """Stands for `forward` of one DeepseekV4CudaDecoderLayer, and for what its attention prepares its queries by. Outside a step of ours both are
    SGLang's."""

    def __init__(self, running: Running, number: int, layer: Any, slices: LayerSlices, moe: MoeSlice | None = None):
        """moe: what stands for the layer's MoE, if fused_moe does."""
        self._running, self._number, self._layer, self._slices, self._moe = running, number, layer, slices, moe
        self._original, attn = layer.forward, layer.self_attn
        self._entered: tuple[torch.Tensor, torch.Tensor | None] | None = None  # streams and pre of a layer that is about to prepare its queries
        if slices.attention_in is not None:
            self._prepare, self._prepare_on_streams = attn._forward_prepare, attn._forward_prepare_multi_stream
            attn._forward_prepare, attn._forward_prepare_multi_stream = self._queries_and_keys, self._queries
        layer.forward = self

    def __call__(
        self, positions: torch.Tensor, hidden_states: Any, input_ids: Any, forward_batch: Any, input_ids_global: Any, *,
        allow_cross_layer_fusion: bool = True,
    ) -> Any:  # fmt: skip
        """As the original."""
        rest = {"input_ids": input_ids, "forward_batch": forward_batch, "input_ids_global": input_ids_global}
        rest["allow_cross_layer_fusion"] = allow_cross_layer_fusion
        takes_in, takes_out = "attention_in" in self._running.taken, "attention_out" in self._running.taken
        if not self._running.is_on or not (takes_in or takes_out):
            return self._original(positions=positions, hidden_states=hidden_states, **rest)
        layer = self._layer
        streams, pre = sglang_layer.entering(hidden_states, forward_batch)
        x = None
        if takes_in:
            x, self._entered = streams.new_empty((streams.shape[0], streams.shape[2])), (streams, pre)
        try:
            if not takes_out:
                hidden_states = sglang_layer.enter_with(streams, pre, forward_batch, x)
                return self._original(positions=positions, hidden_states=hidden_states, **rest)
            x = sglang_layer.input_of_attention(layer, streams, pre) if x is None else x
            heads = sglang_layer.attended_heads(layer.self_attn, x, positions, forward_batch, self._running.view)
        finally:
            self._entered = None
        behind, pre, x = self._close(heads, positions, streams)
        if self._moe is not None and "moe" in self._running.taken:
            behind, pre = self._moe.close(x, behind, forward_batch, input_ids, input_ids_global)
            return sglang_layer.enter_with(behind, pre, forward_batch)
        hidden_states = sglang_layer.enter_with(behind, pre, forward_batch, x)
        call = sglang_layer.layer_call(input_ids, input_ids_global, allow_cross_layer_fusion)
        return sglang_layer.run_moe(layer, hidden_states, forward_batch, call)

    def _queries_and_keys(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As MQALayer._forward_prepare: keys are stored, so none are returned."""
        return self._prepare(*args, **kwargs) if self._entered is None else (self._launch_in(*args, **kwargs), None)

    def _queries(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As MQALayer._forward_prepare_multi_stream."""
        return self._prepare_on_streams(*args, **kwargs) if self._entered is None else self._launch_in(*args, **kwargs)

    def _launch_in(
        self, x: torch.Tensor, positions: torch.Tensor, forward_batch: Any, backend: Any, q_out: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Writes x, the layer's keys and what its compressor and indexer leave; returns queries [rows, heads, 512]."""
        if q_out is not None or any(value is not None for value in kwargs.values()):
            raise RuntimeError(f"layer {self._number}: SGLang asks for queries in a buffer of another form than attention_in writes")
        (streams, pre), attn, run = self._entered, self._layer.self_attn, self._running
        kernel, prepared = self._slices.attention_in
        pages = sglang_layer.key_pages(attn.layer_id, run.view)
        if run.is_checking:
            run.figures += attention_in_figures(self._number, kernel, prepared, self._layer, streams, pre is not None, pages)
        rows = x.shape[0]
        q_lora, q = x.new_empty((rows, kernel.sizes.lora)), x.new_empty((rows, kernel.sizes.heads, HEAD_DIM))
        slots = sglang_layer.key_slots(forward_batch, run.view)
        kernel.launch(prepared, streams, pre, positions, slots, pages, x, q_lora, q, sglang_layer.stream_of(x))
        sglang_layer.write_sources(attn, x, q_lora, positions, forward_batch, run.view)
        return q

    def _close(self, heads: torch.Tensor, positions: torch.Tensor, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From attention's heads to (streams [rows, 4, hidden] behind it, pre [rows, 4], the MoE's input [rows, hidden])."""
        run, (kernel, prepared) = self._running, self._slices.attention_out
        if run.is_checking:
            run.figures += attention_out_figures(self._number, kernel, prepared, self._layer, heads, run.is_verify)
        behind, out = torch.empty_like(streams), streams.new_empty((streams.shape[0], streams.shape[2]))
        coefficients = torch.empty((streams.shape[0], MIXES), dtype=torch.float32, device=streams.device)
        kernel.launch(prepared, heads, positions, streams, behind, out, coefficients, sglang_layer.stream_of(heads))
        return behind, coefficients[:, :STREAMS], out
