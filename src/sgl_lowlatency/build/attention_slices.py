"""The tensors of SGLang's DeepseekV4DecoderLayer as attention_in and attention_out read them: views, no copies."""

from __future__ import annotations

from typing import Any

from sgl_lowlatency.build.hyper_connection import collect_hyper_connection
from sgl_lowlatency.kernels.attention_in import AttentionInSizes, AttentionInWeights
from sgl_lowlatency.kernels.attention_out import AttentionOutSizes, AttentionOutWeights


def attention_in_sizes(layer: Any) -> AttentionInSizes:
    """Of a layer that guard.attention_slices.layer_reasons has nothing against, as all of these functions."""
    attn = layer.self_attn
    return AttentionInSizes(layer.hc_cfg.hidden, attn.q_lora_rank, attn.n_heads)


def attention_out_sizes(layer: Any) -> AttentionOutSizes:
    attn = layer.self_attn
    return AttentionOutSizes(layer.hc_cfg.hidden, attn.n_heads, attn.head_dim, attn.qk_rope_head_dim, attn.n_groups, attn.o_lora_rank)


def collect_attention_in(layer: Any) -> AttentionInWeights:
    """layer: after process_weights_after_loading on sm_90."""
    attn, norm = layer.self_attn, layer.input_layernorm
    return AttentionInWeights(
        norm=norm.weight.data, wqkv_a=attn.wqkv_a.weight.data, wqkv_a_scale=attn.wqkv_a.weight_scale_inv.data, q_norm=attn.q_norm.weight.data,
        kv_norm=attn.kv_norm.weight.data, wq_b=attn.wq_b.weight.data, wq_b_scale=attn.wq_b.weight_scale_inv.data, freqs_cis=attn.freqs_cis,
        norm_eps=norm.variance_epsilon, q_norm_eps=attn.q_norm.variance_epsilon, kv_norm_eps=attn.eps,
    )  # fmt: skip


def collect_attention_out(layer: Any) -> AttentionOutWeights:
    """layer: as collect_attention_in's. The norm is the MoE's: what attention_out leaves is its input."""
    attn, norm = layer.self_attn, layer.post_attention_layernorm
    return AttentionOutWeights(
        wo_a=attn.wo_a.weight.data, wo_b=attn.wo_b.weight.data, wo_b_scale=attn.wo_b.weight_scale_inv.data, freqs_cis=attn.freqs_cis,
        hyper=collect_hyper_connection(layer, "attn"), norm=norm.weight.data, norm_eps=norm.variance_epsilon,
    )  # fmt: skip
