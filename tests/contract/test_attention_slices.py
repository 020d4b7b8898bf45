"""The oracles of attention_in and attention_out compute what SGLang does: its Triton kernels in the interpreter, in a process of its own, its torch
functions here; and how they are called, pinned in SGLang's text."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")
from attention_in_cases import Layer as InLayer  # noqa: E402
from attention_out_cases import REAL, random_weights  # noqa: E402
from sglang_source import source  # noqa: E402

from sgl_lowlatency.kernels.attention_out import AttentionOutSizes  # noqa: E402
from sgl_lowlatency.reference import attention_in as in_oracle  # noqa: E402
from sgl_lowlatency.reference import attention_out as oracle  # noqa: E402

ROWS = 5
SIZES = AttentionOutSizes(hidden=REAL.hidden, heads=4, head_dim=96, rope_dim=64, groups=2, lora=64)  # SGLang's kernels have this width alone


@pytest.fixture(scope="module")
def case():
    weights, generator = random_weights(SIZES), torch.Generator().manual_seed(3)
    return weights, {
        "x": torch.randn(ROWS, SIZES.heads, SIZES.head_dim, generator=generator).bfloat16(), "positions": torch.tensor([0, 3, 96, 50, 3]),
        "streams": torch.randn(ROWS, 4, SIZES.hidden, generator=generator).bfloat16(),
        "y": torch.randn(ROWS, SIZES.hidden, generator=generator).bfloat16(),
        **{name: getattr(weights, name) for name in ("freqs_cis", "norm", "norm_eps")}, **vars(weights.hyper),
    }  # fmt: skip


@pytest.fixture(scope="module")
def stored():
    """attention_in behind a launch, and the slots that it wrote."""
    layer = InLayer()
    inputs = layer.inputs(ROWS)
    layer.run(*inputs)
    return layer, inputs


@pytest.fixture(scope="module")
def sglangs(case, stored, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    cache = stored[0].cache
    torch.save({**case[1], "pages": cache.pages, "slots": stored[1][3], "page_size": cache.page_size}, folder / "case.pt")
    script = Path(__file__).with_name("interpreted_attention_slices.py")
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "found.pt")


def cut(t):
    """float64 of the bf16 that the interpreter stores a value as: it cuts what a GPU rounds."""
    return (t.float().view(torch.int32) & -65536).view(torch.float32).double()


def assert_stored_as(found, wanted, steps=1):
    """Elements are the stored values of what float64 has, but for those that fp32's own rounding puts on the other side of a step, or of `steps`."""
    stored = cut(wanted)
    assert found.shape == wanted.shape and float((found.double() != stored).double().mean()) < 2e-3
    assert bool(((found.double() - stored).abs() <= stored.abs() * 2.0**-7 * steps + 1e-30).all())


def test_heads_are_rotated_back_as_by_sglang(case, sglangs):
    weights, c = case
    assert_stored_as(sglangs["x"], oracle.rotate_back(c["x"], weights.freqs_cis, c["positions"]))


def test_coefficients_are_sglangs(case, sglangs):
    """The interpreter's products are fp32."""
    wanted = oracle.coefficients(case[0].hyper, case[1]["streams"])
    assert float((sglangs["coefficients"].double() - wanted).abs().max()) < 2e-5


def test_post_combine_and_norm_are_sglangs(case, sglangs):
    """From SGLang's own coefficients, and the norm from its own streams: flipped values do not add up."""
    weights, c = case
    mixed = sglangs["coefficients"].double()
    streams, _ = oracle.post_combine_norm(weights, c["y"].double(), c["streams"], mixed, lambda t: t)
    assert_stored_as(sglangs["streams"], streams)
    combined = cut(torch.einsum("tk,tkh->th", mixed[:, :4], sglangs["streams"].double()))
    normed = combined * torch.rsqrt(combined.square().mean(1, keepdim=True) + weights.norm_eps) * weights.norm.double()
    assert_stored_as(sglangs["out"], normed, steps=2)  # the combined value's, and its own


def test_torch_functions_agree(case):
    """The same formulas as SGLang's torch code has them for any platform."""
    from sglang.kernels.ops.layernorm.mhc import _mhc_post_torch, _mhc_pre_torch

    weights, c = case
    post, comb, combined = _mhc_pre_torch(
        c["streams"], c["mix"], c["mix_scale"], c["mix_base"], c["mix_rms_eps"], c["mix_eps"], c["mix_eps"], 2.0, c["sinkhorn_iterations"]
    )
    mixed = oracle.coefficients(weights.hyper, c["streams"])
    assert float((torch.cat((post.flatten(1), comb.flatten(1)), 1).double() - mixed[:, 4:]).abs().max()) < 2e-5
    wanted = torch.einsum("tk,tkh->th", mixed[:, :4], c["streams"].double())
    assert bool(((combined.double() - wanted).abs() <= wanted.abs() * 2.0**-8 * 1.01 + 1e-6).all())
    streams, _ = oracle.post_combine_norm(weights, c["y"].double(), c["streams"], mixed, lambda t: t)
    found = _mhc_post_torch(c["y"].float(), c["streams"].float(), post, comb)
    assert torch.allclose(found.double(), streams, rtol=1e-4, atol=1e-4)


def test_queries_are_rotated_as_by_sglang(case, sglangs):
    weights, c = case
    assert_stored_as(sglangs["q"], in_oracle.rotate(c["x"], weights.freqs_cis, c["positions"]))


def test_sglang_reads_the_kv_rows_that_attention_in_writes(stored, sglangs):
    """As the oracle reads them, and they are the row that was meant, as far as FP8 goes."""
    layer, (streams, pre, positions, slots) = stored
    rows = in_oracle.read_slots(layer.cache, slots.long())
    assert torch.equal(sglangs["kv"].double(), rows)
    wanted = in_oracle.outputs(layer.sizes, layer.weights, streams, pre, positions)[0].kv
    assert 1e-3 < float((rows - wanted).norm() / wanted.norm()) < 0.04


def test_the_norm_is_sglangs():
    """RMSNorm as SGLang's layer has it in torch."""
    from sglang.srt.layers.layernorm import RMSNorm

    own = RMSNorm(1280, eps=1e-6)
    x, weight = (torch.randn(*shape, generator=torch.Generator().manual_seed(4)).bfloat16() for shape in ((5, 1280), (1280,)))
    own.weight.data = weight
    wanted = in_oracle.norm(x.double(), weight, 1e-6)
    assert bool(((own.forward_native(x).double() - wanted).abs() <= wanted.abs() * 2.0**-8 * 1.01).all())


def test_how_sglang_calls_them():
    layer, mhc = source("srt.models.deepseek_v4"), source("srt.models.deepseek_v4_mhc")
    rope = layer[layer.index("elif inv_rope is None and not fuse_rope_wo_a:") :][:500]
    assert "o[..., -self.qk_rope_head_dim :]" in rope and "inverse=True" in rope
    assert 'return torch.einsum("tgd,grd->tgr", o, wo_a)' in layer  # more than a row on sm_90; a row: wo_a_bf16_gemv
    assert "self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)" in layer
    assert "o.flatten(1) if isinstance(o, torch.Tensor) else o" in layer  # wo_b, on latent rows of all groups
    post = mhc[mhc.index("def post(") : mhc.index("# Planning the post")]
    assert "get_platform().is_sm90" in post and "1 <= x.shape[0] <= 64" in post and "return mhc_post_split_h(x, residual, post_mix, comb)" in post
    assert "return HcState(post(cfg, y, residual, post_mix, comb), pre)" in mhc  # the pre of the attention's own mix meets its post's streams
    assert "pre, post_mix, comb = coefficients" in mhc and "coefficients = _compute_triplet(hc, residual, stats_stream, precomputed)" in mhc
    combine = mhc[mhc.index("def _combine(") :]
    assert "x, apply_pre = state.residual, state.pre" in combine and "0 < x.shape[0] <= 96" in combine


def test_how_sglang_calls_those_in_front():
    layer, kernel = source("srt.models.deepseek_v4"), source("kernels.ops.attention.dsv4.norm_rope")
    assert "q_lora = qkv_a[..., : self.q_lora_rank]" in layer and "kv = qkv_a[..., self.q_lora_rank :]" in layer  # rows q | kv of wqkv_a
    assert "q_head_norm = False" in source("srt.configs.deepseek_v41")
    assert "if envs.SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE.get():" in layer  # which DEEPSEEK_V4_SPEC refuses
    assert "if not self.q_head_norm:" in layer and "None,  # eps = None means no norm" in layer
    assert "kv_weight=self.kv_norm.weight.data" in layer and "layout: Union[KVLayout, str] = KVLayout.V4" in kernel
    pool = source("srt.mem_cache.deepseek_v4_memory_pool")
    assert 'if mode == "auto" and not is_sm100:\n        return KVLayout.V4, None' in pool
    assert "if apply_pre is None:\n        return norm(x[:, 0, :])" in source("srt.models.deepseek_v4_mhc")


def test_the_rule_of_a_kv_rows_scales_is_what_sglangs_kernel_has():
    """Text: it runs on a GPU alone."""
    text = source("kernels.jit.csrc.deepseek_v4.main_norm_rope", ".cuh")
    store = text[text.index("// part 2: rope on warp 7 (BF16 store)") :]
    assert "fmaxf(1e-4f, abs_max) / math::FP8_E4M3_MAX" in store and "cast_to_ue8m0(scale_raw)" in store
    assert "value_ptr + 448" in store and "if (out_loc < 0) return;" in text
    norm = text[text.index("// part 1: norm. Each thread owns one 2-elem pack") :]
    assert "data[i] = x * norm_factor * w;" in norm  # fp32 until it is stored
    rounding = source("kernels.jit.include.sgl_kernel.deepseek_v4.fp8_utils", ".cuh")
    assert "return exp + (mant != 0);" in rounding


def test_what_the_guard_reads_of_a_layer_is_there():
    layer, mhc = source("srt.models.deepseek_v4"), source("srt.models.deepseek_v4_mhc")
    for name in ("attn_tp_size", "use_mega_attention", "fuse_wqa_wkv", "q_head_norm", "wo_a_fp8", "head_dim", "qk_rope_head_dim", "n_heads",
                 "n_groups", "q_lora_rank", "o_lora_rank", "eps", "wqkv_a", "wq_b", "wo_a", "wo_b", "q_norm", "kv_norm", "hc_cfg",
                 "boundary_pre_from_prev", "hc_attn_fn", "hc_attn_scale", "hc_attn_base", "input_layernorm", "post_attention_layernorm"):  # fmt: skip
        assert f"self.{name} = " in layer or f"self.{name}: " in layer or f"self.{name},\n" in layer, name
    assert 'self.register_buffer("freqs_cis", freqs_cis' in layer and "class MQALayer(MqaAttentionBase)" in layer
    for name in ("mult", "sinkhorn_iters", "eps", "rms_eps", "hidden"):
        assert f"    {name}: " in mhc[mhc.index("class HcConfig") : mhc.index("class HcSubLayer")], name
    pool = source("srt.mem_cache.deepseek_v4_memory_pool")
    assert "self.kv_layout = KVLayout.parse(kv_layout)" in pool and "self.uniform_fp8 = " in pool


def test_what_the_guard_reads_of_norms_and_linears_is_there():
    from sglang.srt.layers.layernorm import RMSNorm

    plain = RMSNorm(256, eps=3e-6)
    assert (plain.variance_epsilon, plain.cast_x_before_out_mul, plain.variance_size_override) == (3e-6, False, None)
    other = RMSNorm(256, var_hidden_size=128, cast_x_before_out_mul=True)
    assert (other.cast_x_before_out_mul, other.variance_size_override) == (True, 128)
    fp8, linear = source("srt.layers.quantization.fp8"), source("srt.layers.linear")
    method = fp8[fp8.index("class Fp8LinearMethod(") : fp8.index("class Fp8MoEMethod(")]
    assert "self.weight_block_size = self.quant_config.weight_block_size" in method
    assert 'layer.register_parameter("weight_scale_inv", scale)' in method
    assert "self.quant_method = quant_config.get_quant_method(self, prefix=prefix)" in linear
