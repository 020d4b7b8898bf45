"""Refusals of a DeepSeek-V4.1 layer's attention, before and after the weights load: what attention_in and attention_out compute, and how SGLang must
keep it.

What is served (read from sglang 0.5.23): all heads on this GPU, wo_a in bf16 and the other linears in FP8 with scales of 32 x 32 blocks, mHC of four
streams whose combine takes the pre of the sublayer in front, the V4 layout of the KV pool. DESIGN.md of kernels/nvidia/attention_in and attention_out
have the tensors. Duck-typed as guard/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_lowlatency.guard import hyper_connection
from sgl_lowlatency.guard.linear import tensor_reasons

HEAD_DIM, ROPE = 512, 64  # abi/attention_in.hpp
MAX_GROUP, MAX_LATENT, MAX_LORA = 4096, 8192, 1408
BLOCK = [32, 32]
MIN_SCALE, MAX_SCALE = 2.0**-100, 2.0**7  # kernels/slice.py
KV_LAYOUT = "v4"
LAYER = "DeepseekV4CudaDecoderLayer"
RATIOS = (0, 1, 2)  # of layers' compressed keys: those of V4.1
# SGLang's switches: keys of another rounding, two matrices in the place of wqkv_a.
ENVIRONMENT = {"SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE": False, "SGLANG_OPT_FUSE_WQA_WKV": True}

_OFF = (None, False)
# (server argument, values that are served, why the others are not), as in guard/config.py.
SERVER_ARGUMENTS: tuple[tuple[str, tuple, str], ...] = (
    ("dsv4_attn_backend", ("flashmla", "auto"), "its keys and queries are of another form than the kernels write"),
    ("enable_encoder_swa_bounded_replay", _OFF, "window keys of requests' own have not been tested"),
)


def config_reasons(hf_config: Any) -> list[str]:
    """Why attention_in and attention_out cannot run the layers that this config describes."""
    reasons = []
    for name, served in (("head_dim", HEAD_DIM), ("qk_rope_head_dim", ROPE), ("hc_mult", hyper_connection.STREAMS),
                         ("hc_pre_from_prev_sublayer", True), ("q_head_norm", False)):  # fmt: skip
        if (value := getattr(hf_config, name, None)) != served:
            reasons.append(f"config.{name} {value!r} is not {served!r}")
    heads, groups, lora = (getattr(hf_config, name, None) or 0 for name in ("num_attention_heads", "o_groups", "o_lora_rank"))
    sizes = (
        ("config.hidden_size", getattr(hf_config, "hidden_size", 0), 128, None),
        ("config.q_lora_rank", getattr(hf_config, "q_lora_rank", 0), 128, MAX_LORA),
        ("a group of config.o_groups' heads", heads // groups * HEAD_DIM if groups and not heads % groups else 0, 64, MAX_GROUP),
        ("config.o_lora_rank", lora, 16, None), ("config.o_groups times o_lora_rank", groups * lora, 128, MAX_LATENT),
    )  # fmt: skip
    for name, value, multiple, most in sizes:
        if not isinstance(value, int) or value <= 0 or value % multiple or (most is not None and value > most):
            reasons.append(f"{name} {value} is not a multiple of {multiple}{'' if most is None else f' up to {most}'}")
    if others := sorted(set(getattr(hf_config, "compress_ratios", None) or ()) - set(RATIOS)):
        reasons.append(f"config.compress_ratios has {', '.join(map(str, others))}: SGLang then orders compressor and queries otherwise")
    return reasons


def layer_reasons(layer: Any) -> Iterator[str]:
    """Checks SGLang's DeepseekV4DecoderLayer after process_weights_after_loading."""
    for what, module, served in (("the layer", layer, LAYER), ("self_attn", layer.self_attn, "MQALayer")):
        if (name := type(module).__name__) != served:
            yield f"{what} is a {name}, not a{'n' if served[0] == 'M' else ''} {served}"
            return
    hidden = layer.hc_cfg.hidden
    yield from hyper_connection.layer_reasons(layer)
    yield from hyper_connection.sublayer_reasons(layer, "attn")
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from _norm_reasons(name, getattr(layer, name), hidden)
    yield from _attention_reasons(layer.self_attn, hidden)


def pool_reasons(pool: Any) -> Iterator[str]:
    """Checks SGLang's DeepSeekV4TokenToKVPool."""
    if getattr(pool, "uniform_fp8", False):
        yield "the KV pool is uniform FP8"
    if (layout := str(getattr(pool.kv_layout, "value", pool.kv_layout))) != KV_LAYOUT:
        yield f"the KV pool has the layout {layout}, not {KV_LAYOUT}"


def _norm_reasons(name: str, norm: Any, width: int) -> Iterator[str]:
    if norm.cast_x_before_out_mul or norm.variance_size_override is not None:
        yield f"{name} rounds before it multiplies by its weight, or takes the variance of a part"
    yield from tensor_reasons(f"{name}.weight", norm.weight, (width,))


def _attention_reasons(attn: Any, hidden: int) -> Iterator[str]:
    if attn.attn_tp_size != 1:
        yield f"self_attn is spread over {attn.attn_tp_size} GPUs: the kernels have all heads on one"
        return
    if attn.use_mega_attention:
        yield "self_attn keeps its weights for the flashmla_mega backend"
    if not attn.fuse_wqa_wkv:
        yield "self_attn.wq_a and wkv are two matrices (SGLANG_OPT_FUSE_WQA_WKV)"
        return
    if attn.compress_ratio not in RATIOS:
        yield f"self_attn compresses {attn.compress_ratio} keys into one, which is not one of {', '.join(map(str, RATIOS))}"
    if not attn.is_dsv41 or attn.q_head_norm:
        yield "self_attn normalises its query heads: DeepSeek-V4, not V4.1"
    if attn.wo_a_fp8:
        yield "self_attn.wo_a is kept in FP8"
        return
    if (attn.head_dim, attn.qk_rope_head_dim) != (HEAD_DIM, ROPE):
        yield f"self_attn has heads of {attn.head_dim}, {attn.qk_rope_head_dim} of them rotated, not {HEAD_DIM} and {ROPE}"
        return
    width, latent = attn.n_heads // attn.n_groups * HEAD_DIM, attn.n_groups * attn.o_lora_rank
    for name, value, multiple, most in (("a group of heads", width, 64, MAX_GROUP), ("wo_b's input", latent, 128, MAX_LATENT),
                                        ("q_lora_rank", attn.q_lora_rank, 128, MAX_LORA)):  # fmt: skip
        if value % multiple or not 0 < value <= most:
            yield f"self_attn: {name} of {value} is not a multiple of {multiple} up to {most}"
    if attn.o_lora_rank % 16:
        yield f"self_attn: o_lora_rank {attn.o_lora_rank} is not a multiple of 16"
    yield from tensor_reasons("self_attn.wo_a.weight", getattr(attn.wo_a, "weight", None), (latent, width))
    lora = attn.q_lora_rank
    for name, shape in (("wqkv_a", (lora + HEAD_DIM, hidden)), ("wq_b", (attn.n_heads * HEAD_DIM, lora)), ("wo_b", (hidden, latent))):
        yield from _block_reasons(f"self_attn.{name}", getattr(attn, name), shape)
    yield from _norm_reasons("self_attn.q_norm", attn.q_norm, lora)
    yield from _norm_reasons("self_attn.kv_norm", attn.kv_norm, HEAD_DIM)
    yield from tensor_reasons("self_attn.freqs_cis", attn.freqs_cis, (1, ROPE // 2), "complex64", min_rows=True)


def _block_reasons(name: str, linear: Any, shape: tuple[int, int]) -> Iterator[str]:
    if getattr(linear, "bias", None) is not None:
        yield f"{name} has a bias"
    if list(getattr(linear.quant_method, "weight_block_size", None) or []) != BLOCK:
        yield f"{name} has no scale a block of {BLOCK}"
        return
    yield from tensor_reasons(f"{name}.weight", linear.weight, shape, "float8_e4m3fn")
    scale, blocks = linear.weight_scale_inv, (shape[0] // BLOCK[0], shape[1] // BLOCK[1])
    reasons = list(tensor_reasons(f"{name}.weight_scale_inv", scale, blocks, "float32"))
    yield from reasons or _scale_reasons(f"{name}.weight_scale_inv", scale)


def _scale_reasons(name: str, scale: Any) -> Iterator[str]:
    """The kernels multiply by a scale where they decode a weight: exact for powers of two, as SGLang's checkpoints have them."""
    is_fit = (scale.frexp().mantissa == 0.5) & (scale >= MIN_SCALE) & (scale <= MAX_SCALE)
    if not bool(is_fit.all()):
        yield f"{name} has {scale[~is_fit][0].item()}, no power of two from 2^-100 to 2^7"
