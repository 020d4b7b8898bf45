"""Refusals of a DeepSeek-V4.1 layer's attention, and what is collected of one that is served. Oracle: the texts; the tensors themselves."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from attention_stand_ins import IN, OUT, decoder_layer  # noqa: E402

from sgl_lowlatency.build import attention_slices as build  # noqa: E402
from sgl_lowlatency.guard import attention_slices as guard  # noqa: E402
from sgl_lowlatency.kernels import attention_in, attention_out  # noqa: E402
from sgl_lowlatency.kernels import slice as slices  # noqa: E402


def test_what_is_served_has_no_reason_and_is_what_the_kernels_take():
    layer = decoder_layer()
    assert list(guard.layer_reasons(layer)) == []
    assert (build.attention_in_sizes(layer), build.attention_out_sizes(layer)) == (IN, OUT)
    attention_in.AttentionIn(IN, 1, torch.device("cpu"), 2, 1.0).prepare(first := build.collect_attention_in(layer))
    attention_out.AttentionOut(OUT, 1, torch.device("cpu"), 2, 1.0).prepare(last := build.collect_attention_out(layer))
    attn = layer.self_attn
    views = ((first.wqkv_a, attn.wqkv_a.weight), (first.wq_b_scale, attn.wq_b.weight_scale_inv), (first.norm, layer.input_layernorm.weight),
             (last.wo_a, attn.wo_a.weight), (last.hyper.mix, layer.hc_attn_fn), (last.norm, layer.post_attention_layernorm.weight))  # fmt: skip
    assert all(own.data_ptr() == theirs.data_ptr() for own, theirs in views)
    assert (first.norm_eps, first.q_norm_eps, first.kv_norm_eps) == (1e-6, 2e-6, 3e-6)
    assert (last.hyper.sinkhorn_iterations, last.hyper.mix_eps, last.hyper.mix_rms_eps, last.norm_eps) == (20, 1e-6, 1e-20, 1e-6)


def scales(rows, columns, odd):
    """Ones, but for the last."""
    tensor = torch.ones(rows, columns)
    tensor[-1, -1] = odd
    return tensor


@pytest.mark.parametrize(("path", "value", "reason"), [
    ("boundary_pre_from_prev", False, "the combine does not take the pre of the sublayer in front: a layer of DeepSeek-V4, or of V4.1's MTP"),
    ("hc_cfg.mult", 2, "mHC has 2 streams, not 4"),
    ("hc_cfg.sinkhorn_iters", 0, "mHC has 0 Sinkhorn iterations"),
    ("hc_attn_base", None, "hc_attn_base is missing"),
    ("hc_attn_fn", torch.zeros(24, 1024).bfloat16(), "hc_attn_fn is bfloat16, not float32"),
    ("post_attention_layernorm.cast_x_before_out_mul", True,
     "post_attention_layernorm rounds before it multiplies by its weight, or takes the variance of a part"),
    ("input_layernorm.weight", torch.ones(256), "input_layernorm.weight is float32, not bfloat16"),
    ("self_attn.attn_tp_size", 2, "self_attn is spread over 2 GPUs: the kernels have all heads on one"),
    ("self_attn.use_mega_attention", True, "self_attn keeps its weights for the flashmla_mega backend"),
    ("self_attn.fuse_wqa_wkv", False, "self_attn.wq_a and wkv are two matrices (SGLANG_OPT_FUSE_WQA_WKV)"),
    ("self_attn.q_head_norm", True, "self_attn normalises its query heads: DeepSeek-V4, not V4.1"),
    ("self_attn.is_dsv41", False, "self_attn normalises its query heads: DeepSeek-V4, not V4.1"),
    ("self_attn.compress_ratio", 4, "self_attn compresses 4 keys into one, which is not one of 0, 1, 2"),
    ("self_attn.wo_a_fp8", True, "self_attn.wo_a is kept in FP8"),
    ("self_attn.head_dim", 128, "self_attn has heads of 128, 64 of them rotated, not 512 and 64"),
    ("self_attn.wo_b.quant_method.weight_block_size", [128, 128], "self_attn.wo_b has no scale a block of [32, 32]"),
    ("self_attn.wq_b.bias", torch.zeros(1024), "self_attn.wq_b has a bias"),
    ("self_attn.wo_b.weight_scale_inv", scales(8, 4, 3.0), "self_attn.wo_b.weight_scale_inv has 3.0, no power of two from 2^-100 to 2^7"),
    ("self_attn.wqkv_a.weight_scale_inv", scales(20, 8, 0.0), "self_attn.wqkv_a.weight_scale_inv has 0.0, no power of two from 2^-100 to 2^7"),
    ("self_attn.wq_b.weight_scale_inv", scales(32, 4, 256.0), "self_attn.wq_b.weight_scale_inv has 256.0, no power of two from 2^-100 to 2^7"),
    ("self_attn.freqs_cis", None, "self_attn.freqs_cis is missing"),
    ("self_attn.wo_a.weight", None, "self_attn.wo_a.weight is missing"),
    ("self_attn.kv_norm.variance_size_override", 256,
     "self_attn.kv_norm rounds before it multiplies by its weight, or takes the variance of a part"),
])  # fmt: skip
def test_layers(path, value, reason):
    layer = owner = decoder_layer()
    *names, last = path.split(".")
    for name in names:
        owner = getattr(owner, name)
    setattr(owner, last, value)
    assert list(guard.layer_reasons(layer)) == [reason]


@pytest.mark.parametrize(("fields", "reasons"), [
    ({}, []), ({"uniform_fp8": True}, ["the KV pool is uniform FP8"]),
    ({"kv_layout": SimpleNamespace(value="v41")}, ["the KV pool has the layout v41, not v4"]),
])  # fmt: skip
def test_pools(fields, reasons):
    assert list(guard.pool_reasons(SimpleNamespace(**{"uniform_fp8": False, "kv_layout": SimpleNamespace(value="v4"), **fields}))) == reasons


def test_another_module():
    layer = decoder_layer()
    layer.self_attn = torch.nn.Linear(2, 2)
    assert list(guard.layer_reasons(layer)) == ["self_attn is a Linear, not an MQALayer"]
    assert list(guard.layer_reasons(SimpleNamespace(**vars(layer)))) == ["the layer is a SimpleNamespace, not a DeepseekV4CudaDecoderLayer"]


CONFIG = {
    "hidden_size": 5120, "head_dim": 512, "qk_rope_head_dim": 64, "hc_mult": 4, "hc_pre_from_prev_sublayer": True, "q_head_norm": False,
    "num_attention_heads": 64, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1280, "compress_ratios": [0, 0, 2, 1],
}  # fmt: skip


@pytest.mark.parametrize(("fields", "reasons"), [
    ({}, []), ({"hc_mult": 2}, ["config.hc_mult 2 is not 4"]),
    ({"hc_pre_from_prev_sublayer": False, "q_head_norm": True},
     ["config.hc_pre_from_prev_sublayer False is not True", "config.q_head_norm True is not False"]),
    ({"hidden_size": 5000}, ["config.hidden_size 5000 is not a multiple of 128"]),
    ({"q_lora_rank": 1536}, ["config.q_lora_rank 1536 is not a multiple of 128 up to 1408"]),
    ({"o_groups": 4}, ["a group of config.o_groups' heads 8192 is not a multiple of 64 up to 4096"]),
    ({"o_groups": 5}, ["a group of config.o_groups' heads 0 is not a multiple of 64 up to 4096"]),
    ({"o_lora_rank": 2048}, ["config.o_groups times o_lora_rank 16384 is not a multiple of 128 up to 8192"]),
    ({"compress_ratios": [0, 4, 128]}, ["config.compress_ratios has 4, 128: SGLang then orders compressor and queries otherwise"]),
    ({"head_dim": None}, ["config.head_dim None is not 512"]),
])  # fmt: skip
def test_configs(fields, reasons):
    assert guard.config_reasons(SimpleNamespace(**{**CONFIG, **fields})) == reasons


def test_the_limits_are_the_kernels():
    assert (guard.HEAD_DIM, guard.ROPE) == (attention_in.HEAD_DIM, attention_in.HEAD_ROPE)
    assert (guard.MAX_GROUP, guard.MAX_LATENT, guard.MAX_LORA) == (attention_out.MAX_PANEL, attention_out.MAX_LATENT, attention_in.MAX_LORA)
    assert (guard.MIN_SCALE, guard.MAX_SCALE, guard.BLOCK) == (slices.MIN_SCALE, slices.MAX_SCALE, [slices.SCALE_BLOCK] * 2)
