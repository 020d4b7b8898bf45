"""The one module that calls parts of SGLang's DeepSeek-V4.1 layer, so that a change upstream breaks one file.

Used of SGLang 0.5.23 (tests/contract/test_deepseek_v4_layers.py runs them): of models/deepseek_v4_boundary.py `materialize` and `LayerCall`; of
models/deepseek_v4_mhc.py `HcState`, `HcNormed`, `combine`, `mix_stats` and `post`; of models/deepseek_v4.py `DeepseekV4CudaDecoderLayer` with its two
boundaries, `MQALayer`'s `_forward_prepare`, `_forward_prepare_multi_stream`, `_compute_q_a`, `_compute_q_b`, `_local_attn_sink`, `_kernel_num_heads`
and `_project_wo_b`, `fused_rope_inplace` and `_apply_wo_a_bf16_matmul`; `fused_k_norm_rope_flashmla`; of the running forward's view what the
contract names: `attention`, `low_ratio_sources`, `swa_out_cache_loc`, `kv_pool`.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_lowlatency.kernels.attention_in import KvPages
from sgl_lowlatency.kernels.hyper_connection import STREAMS


def stream_of(tensor: torch.Tensor) -> int:
    """The cudaStream_t that the forward issues work on a tensor to; 0 in emulation."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def entering(hidden_states: Any, forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(streams [rows, 4, hidden] bf16, pre [rows, 4] fp32) that a layer is called with: the MoE in front is posted, if that is outstanding. pre: of
    the MoE's hyper-connection, its rows apart by whole vectors, as attention_in and SGLang's combine take them; None in the first layer."""
    from sglang.srt.models import deepseek_v4_boundary as boundary

    state = boundary.materialize(hidden_states, forward_batch)
    pre = state.pre
    if pre is not None and (pre.stride(1) != 1 or pre.stride(0) % STREAMS):
        pre = pre.contiguous()
    return state.residual.contiguous(), pre


def enter_with(streams: torch.Tensor, pre: torch.Tensor | None, forward_batch: Any, normed: torch.Tensor | None = None) -> Any:
    """What the next boundary prepares from, as a layer's hidden_states. normed: the sublayer's input [rows, hidden], combined and normed already or
    by the time that somebody reads it; None: SGLang makes it."""
    from sglang.srt.layers.layer_boundary.residual import batch
    from sglang.srt.models import deepseek_v4_mhc as mhc

    return batch.set_written(mhc.HcState(streams, pre, None if normed is None else mhc.HcNormed(normed)), forward_batch)


def layer_call(input_ids: Any, input_ids_global: Any, allow_cross_layer_fusion: bool) -> Any:
    """What the boundaries of one call of a layer read beside its tensors."""
    from sglang.srt.models import deepseek_v4_boundary as boundary

    return boundary.LayerCall(input_ids, input_ids_global, allow_cross_layer_fusion)


def run_moe(layer: Any, hidden_states: Any, forward_batch: Any, call: Any) -> Any:
    """The second half of DeepseekV4CudaDecoderLayer.forward: from what ffn_boundary prepares to an output whose post is outstanding."""
    x = layer.ffn_boundary.prepare(hidden_states, forward_batch, read_context=call)
    transport = layer.ffn_boundary.transport_context(forward_batch)
    with layer.ffn_boundary.exit(forward_batch) as output:
        out = layer.mlp(
            x, forward_batch, input_ids=transport.input_ids, input_ids_global=transport.input_ids_global,
            skip_shared_experts=transport.do_shared_local, return_moe_output=transport.return_moe_output, leave_output_sum=True,
        )  # fmt: skip
        return output.finish(out)


def input_of_attention(layer: Any, streams: torch.Tensor, pre: torch.Tensor | None) -> torch.Tensor:
    """x [rows, hidden] bf16 of attention: combined and normed."""
    from sglang.srt.models import deepseek_v4_mhc as mhc

    return mhc.combine(layer.attn_hc, mhc.HcState(streams, pre))


def attended_heads(attn: Any, x: torch.Tensor, positions: torch.Tensor, forward_batch: Any, view: Any) -> torch.Tensor:
    """Attention's output [rows, heads, 512] bf16, rotated still: MQALayer.forward at one GPU on sm_90, up to its inverse rope. While a graph is
    captured SGLang stores the keys of layers without compressed ones on a second stream; so does this."""
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    rows, backend = x.shape[0], get_attn_backend()
    has_streams = envs.SGLANG_OPT_USE_MULTI_STREAM_OVERLAP.get() and attn.alt_streams is not None and get_is_capture_mode()
    if has_streams and rows <= attn._multi_stream_bs_limit and attn.compress_ratio not in (1, 2):
        q = attn._forward_prepare_multi_stream(x, positions, forward_batch, backend, None, x_quant=None)
    else:
        q, _ = attn._forward_prepare(x, positions, forward_batch, backend, None, x_quant=None)
    return view.attention(
        q=q, k=q, v=q, layer=attn.attn_mqa, forward_batch=forward_batch, compress_ratio=attn.compress_ratio,
        attn_sink=attn._local_attn_sink(attn._kernel_num_heads(rows)), save_kv_cache=False,
    )  # fmt: skip


def write_sources(attn: Any, x: torch.Tensor, q_lora: torch.Tensor, positions: torch.Tensor, forward_batch: Any, view: Any) -> None:
    """What a source or re-index layer does behind its projections, compressed keys and choice of blocks; nothing of other layers. Capture variants
    and commits that are put off are the backend's, which this asks as _forward_prepare does."""
    if attn.compress_ratio in (1, 2) and (attn.compressor is not None or attn.indexer is not None):
        view.low_ratio_sources(layer=attn, x=x, q_lora=q_lora, positions=positions, forward_batch=forward_batch)


def key_slots(forward_batch: Any, view: Any) -> torch.Tensor:
    """int32 [rows], of the pages of window keys. Asked in each layer before keys are stored: SGLang joins commits there that it has put off."""
    return view.swa_out_cache_loc(forward_batch)


def key_pages(layer_id: int, view: Any) -> KvPages:
    """A layer's window keys."""
    pool = view.kv_pool
    return KvPages(pool.get_swa_key_buffer_radix(layer_id).view(torch.uint8), pool.get_swa_key_page_size())


def project_in(attn: Any, x: torch.Tensor, positions: torch.Tensor, scratch: KvPages, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(q_lora [rows, lora], q [rows, heads, 512]) of x, and its keys in `slots` of scratch: SGLang's launches, beside any forward."""
    from sglang.kernels.ops.attention.dsv4 import fused_k_norm_rope_flashmla

    qkv_a, _ = attn.wqkv_a(x)
    q_lora, for_wq_b = attn._compute_q_a(x, qkv_a=qkv_a)
    fused_k_norm_rope_flashmla(
        kv=qkv_a[..., attn.q_lora_rank :], kv_weight=attn.kv_norm.weight.data, eps=attn.eps, freqs_cis=attn.freqs_cis, positions=positions,
        out_loc=slots, kvcache=scratch.pages, page_size=scratch.page_size, layout="v4",
    )  # fmt: skip
    return q_lora, attn._compute_q_b(for_wq_b, positions)


def project_out(attn: Any, heads: torch.Tensor, positions: torch.Tensor, is_verify: bool) -> torch.Tensor:
    """attention's output [rows, hidden] bf16 of heads [rows, heads, 512], which are rotated back in place: the end of MQALayer.forward at one GPU on
    sm_90."""
    from sglang.srt.models import deepseek_v4 as model

    model.fused_rope_inplace(heads[..., -attn.qk_rope_head_dim :], None, attn.freqs_cis, positions=positions, inverse=True)
    wo_a = attn.wo_a.weight.view(attn.n_local_groups, attn.o_lora_rank, -1)
    grouped = heads.view(heads.shape[0], attn.n_local_groups, -1)
    latent = model._apply_wo_a_bf16_matmul(grouped, wo_a, is_decode=not is_verify, is_target_verify=is_verify, fast_path=attn.is_dsv41)
    return attn._project_wo_b(latent, True)


def close_attention(layer: Any, y: torch.Tensor, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(coefficients [rows, 24] fp32, streams behind attention [rows, 4, hidden], input of the MoE [rows, hidden]) of its output y: mix, post, combine
    and norm."""
    from sglang.srt.models import deepseek_v4_mhc as mhc

    coefficients, behind = close_sublayer(layer, "attn", y, streams)
    return coefficients, behind, mhc.combine(layer.ffn_hc, mhc.HcState(behind, coefficients[:, :STREAMS].contiguous()))


def close_sublayer(layer: Any, sublayer: str, y: torch.Tensor, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(coefficients [rows, 24] fp32, streams [rows, 4, hidden]) behind an output y [rows, hidden] of "attn" or "ffn": mix and post."""
    from sglang.srt.models import deepseek_v4_mhc as mhc

    pre, post, comb = mhc.mix_stats(getattr(layer, f"{sublayer}_hc"), streams)
    return torch.cat((pre, post, comb.flatten(1)), 1), mhc.post(layer.hc_cfg, y, streams, post, comb)
