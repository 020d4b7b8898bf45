"""A DeepSeek-V4.1 layer's attention with SGLang's attributes, as it is after load on sm_90: what the tests of guard and build take for it."""

from types import SimpleNamespace

import attention_in_cases
import attention_out_cases
import torch
from hyper_connection_cases import seeded_hyper

from sgl_lowlatency.kernels.attention_in import AttentionInSizes
from sgl_lowlatency.kernels.attention_out import AttentionOutSizes

IN = AttentionInSizes(hidden=256, lora=128, heads=2)
OUT = AttentionOutSizes(hidden=256, heads=2, head_dim=512, rope_dim=64, groups=2, lora=64)


def linear(weight, scale=None):
    method = SimpleNamespace(weight_block_size=[32, 32]) if scale is not None else SimpleNamespace()
    return SimpleNamespace(weight=weight, weight_scale_inv=scale, quant_method=method, bias=None)


def norm(weight, eps):
    return SimpleNamespace(weight=weight, variance_epsilon=eps, cast_x_before_out_mul=False, variance_size_override=None)


class MQALayer(torch.nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.attn_tp_size, self.use_mega_attention, self.fuse_wqa_wkv, self.q_head_norm, self.wo_a_fp8 = 1, False, True, False, False
        self.is_dsv41, self.compress_ratio = True, 0
        self.head_dim, self.qk_rope_head_dim, self.n_heads, self.n_groups = 512, 64, 2, 2
        self.q_lora_rank, self.o_lora_rank, self.eps = 128, 64, first.kv_norm_eps
        self.wqkv_a, self.wq_b = linear(first.wqkv_a, first.wqkv_a_scale), linear(first.wq_b, first.wq_b_scale)
        self.wo_a, self.wo_b = linear(last.wo_a), linear(last.wo_b, last.wo_b_scale)
        self.q_norm, self.kv_norm = norm(first.q_norm, first.q_norm_eps), norm(first.kv_norm, first.kv_norm_eps)
        self.freqs_cis = first.freqs_cis


class DeepseekV4CudaDecoderLayer(SimpleNamespace):
    pass


def decoder_layer():
    first, last, ffn = attention_in_cases.random_weights(IN), attention_out_cases.random_weights(OUT), seeded_hyper(256, 3)
    hc = SimpleNamespace(mult=4, sinkhorn_iters=20, eps=1e-6, rms_eps=1e-20, hidden=256)
    return DeepseekV4CudaDecoderLayer(
        self_attn=MQALayer(first, last), hc_cfg=hc, boundary_pre_from_prev=True, hc_attn_fn=last.hyper.mix, hc_attn_scale=last.hyper.mix_scale,
        hc_attn_base=last.hyper.mix_base, hc_ffn_fn=ffn.mix, hc_ffn_scale=ffn.mix_scale, hc_ffn_base=ffn.mix_base,
        input_layernorm=norm(first.norm, first.norm_eps), post_attention_layernorm=norm(last.norm, last.norm_eps),
    )  # fmt: skip
