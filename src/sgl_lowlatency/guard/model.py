"""Refusals after the weights load: the loaded model must be the one the kernel computes, tensor by tensor.

Duck-typed on purpose: nothing here imports torch or SGLang, so the checks run on any stand-in with the same attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sgl_lowlatency.guard.config import geometry_reasons
from sgl_lowlatency.guard.family import Family
from sgl_lowlatency.guard.linear import linear_reasons, tensor_reasons, weight_format
from sgl_lowlatency.guard.moe import moe_reasons
from sgl_lowlatency.guard.parallel import vocabulary_reasons
from sgl_lowlatency.kernels.geometry import Geometry

# Classes whose rotation is the plain neox one over a cos/sin table; guard.config.ROPE_TYPES names their rope types.
ROPE_CLASSES = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "DynamicNTKAlphaRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
)


def _norm_reasons(name: str, norm: Any, channels: int, rms_eps: float) -> Iterator[str]:
    yield from tensor_reasons(f"{name}.weight", getattr(norm, "weight", None), (channels,))
    if type(norm).__name__ != "RMSNorm":
        yield f"{name} is a {type(norm).__name__}, not an RMSNorm"
    if getattr(norm, "variance_epsilon", None) != rms_eps:
        yield f"{name}.variance_epsilon {getattr(norm, 'variance_epsilon', None)} is not config.rms_norm_eps {rms_eps}"
    if getattr(norm, "variance_size_override", None) is not None:
        yield f"{name} normalises over a part of its channels"


def _rope_reasons(rope: Any, head_dim: int) -> Iterator[str]:
    if type(rope).__name__ not in ROPE_CLASSES:
        yield f"rotary_emb is a {type(rope).__name__}, not one of {', '.join(ROPE_CLASSES)}"
        return
    if not rope.is_neox_style:
        yield "rotary_emb interleaves even and odd channels; the kernel rotates halves (neox)"
    if rope.rotary_dim != head_dim or tuple(rope.cos_sin_cache.shape)[1:] != (head_dim,):
        yield f"rotary_emb rotates {rope.rotary_dim} of {head_dim} channels"


def _attention_reasons(attention: Any, geometry: Geometry) -> Iterator[str]:
    heads = (attention.tp_q_head_num, attention.tp_k_head_num, attention.tp_v_head_num, attention.v_head_dim)
    if heads != (geometry.num_q_heads, geometry.num_kv_heads, geometry.num_kv_heads, geometry.head_dim):
        yield f"attention heads (q, k, v, value channels) {heads} are not the config's: a tensor-parallel part of them?"
    if attention.logit_cap:
        yield f"attention caps its logits at {attention.logit_cap}"
    if attention.sliding_window_size != -1:
        yield f"attention has a sliding window of {attention.sliding_window_size} tokens"
    if any(getattr(attention, f"{kv}_scale") is not None and getattr(attention, f"{kv}_scale_float", None) != 1.0 for kv in "kv"):
        yield "attention scales its K or V"


def _head_norm_reasons(attention: Any, geometry: Geometry, family: Family) -> Iterator[str]:
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name, None)
        if family.has_qk_norm:
            yield from _norm_reasons(name, norm, geometry.head_dim, geometry.rms_eps)
        elif norm is not None:
            yield f"{name} is a norm that {family.name} models do not have"


def _layer_reasons(layer: Any, geometry: Geometry, family: Family, expected: str, num_ranks: int) -> Iterator[str]:
    g, attention = geometry, layer.self_attn
    qkv_rows = (g.num_q_heads + 2 * g.num_kv_heads) * g.head_dim
    yield from _norm_reasons("input_layernorm", layer.input_layernorm, g.hidden, g.rms_eps)
    yield from linear_reasons("qkv_proj", attention.qkv_proj, (qkv_rows, g.hidden), expected, has_bias=family.has_qkv_bias)
    yield from _head_norm_reasons(attention, g, family)
    yield from _rope_reasons(attention.rotary_emb, g.head_dim)
    yield from _attention_reasons(attention.attn, g)
    yield from linear_reasons("o_proj", attention.o_proj, (g.hidden, g.num_q_heads * g.head_dim), expected)
    yield from _norm_reasons("post_attention_layernorm", layer.post_attention_layernorm, g.hidden, g.rms_eps)
    if family.is_moe:
        yield from moe_reasons(layer.mlp, g, expected, num_ranks)
        return
    yield from linear_reasons("gate_up_proj", layer.mlp.gate_up_proj, (2 * g.intermediate, g.hidden), expected)
    yield from linear_reasons("down_proj", layer.mlp.down_proj, (g.hidden, g.intermediate), expected)


def layers_reasons(layers: list[Any], geometry: Geometry, family: Family, expected: str, num_ranks: int = 1) -> list[str]:
    """The layers' reasons, the same one named once with the layers it holds for.

    geometry: a rank's of num_ranks. expected: weight format of every matrix.
    """
    where: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        for reason in _layer_reasons(layer, geometry, family, expected, num_ranks):
            where.setdefault(reason, []).append(index)
    reasons = [
        f"layer {at[0]}: {reason}" + (f" (and {len(at) - 1} more layers)" if len(at) > 1 else "")
        for reason, at in where.items()
    ]
    ropes = {id(layer.self_attn.rotary_emb) for layer in layers}
    if len(ropes) > 1:
        reasons.append(f"the layers have {len(ropes)} rotary embeddings; the kernel reads one cos/sin table")
    return reasons


def hook_reasons(decoder: Any) -> list[str]:
    """Hooks that someone registered on the decoder's modules."""
    hooked = sorted(
        name or "model" for name, module in decoder.named_modules() if module._forward_hooks or module._forward_pre_hooks
    )
    if not hooked:
        return []
    return [f"forward hooks are registered on {len(hooked)} modules ({hooked[0]}, ...): the kernel does not run them"]


def model_disable_reasons(model: Any, hf_config: Any, family: Family, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """Every reason the loaded model is not one of `family` as decode_step computes it; [] when it is.

    model: SGLang's model after process_weights_after_loading, of rank `rank`. hf_config: the whole model's HF config.
    """
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    if name != family.model_class:
        return [f"the loaded model is {name}, not {family.model_class}"]
    decoder = model.model
    layers = list(decoder.layers)
    expected = weight_format(layers[0].self_attn.qkv_proj) if layers else "bf16"
    if reasons := geometry_reasons(hf_config, 2 if expected == "bf16" else 1):
        return reasons
    try:
        geometry = Geometry.from_hf_config(hf_config).shard(num_ranks)
    except ValueError as error:
        return str(error).split("; ")
    table = (geometry.vocab, geometry.hidden)
    checks: tuple[Callable[[], Any], ...] = (
        lambda: tensor_reasons("embed_tokens.weight", decoder.embed_tokens.weight, table, min_rows=True),
        lambda: vocabulary_reasons("embed_tokens", decoder.embed_tokens, geometry, rank) if num_ranks > 1 else [],
        lambda: layers_reasons(layers, geometry, family, expected, num_ranks),
        lambda: _norm_reasons("norm", decoder.norm, geometry.hidden, geometry.rms_eps),
        lambda: hook_reasons(decoder),
    )
    reasons = [reason for check in checks for reason in check()]
    if len(layers) != geometry.num_layers:
        reasons.insert(0, f"{len(layers)} layers are loaded, config.num_hidden_layers is {geometry.num_layers}")
    return reasons
