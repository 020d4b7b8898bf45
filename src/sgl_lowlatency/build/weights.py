"""The kernel's weights as views of SGLang's own tensors. Nothing is copied; DecodeStep checks every shape, dtype and stride."""

from __future__ import annotations

import torch

from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors
from sgl_lowlatency.kernels.geometry import Geometry


def collect_weights(model: torch.nn.Module, geometry: Geometry, has_head: bool = False) -> DecodeStepWeights:
    """Views of a loaded model's parameters, in the layouts DecodeStep reads. guard/model.py has checked its family's.

    has_head: with the LM head, which guard/lm_head.py has checked, padded rows included; of tied embeddings that is the embedding.
    The rope table is layer 0's: SGLang's layers share one (guard/model.py refuses a model whose layers do not).
    """
    inner = model.model
    layers = [
        LayerTensors(
            input_norm=layer.input_layernorm.weight.detach(),
            **matrix("qkv", layer.self_attn.qkv_proj),
            qkv_bias=optional(layer.self_attn.qkv_proj, "bias"),
            q_norm=optional(getattr(layer.self_attn, "q_norm", None), "weight"),
            k_norm=optional(getattr(layer.self_attn, "k_norm", None), "weight"),
            **matrix("out_proj", layer.self_attn.o_proj),
            post_norm=layer.post_attention_layernorm.weight.detach(),
            **mlp_tensors(layer.mlp, geometry),
        )
        for layer in inner.layers
    ]
    return DecodeStepWeights(
        # SGLang may pad the vocabulary's rows; token ids stay below the config's vocabulary
        embedding=inner.embed_tokens.weight.detach()[: geometry.vocab],
        final_norm=inner.norm.weight.detach(),
        cos_sin=rope_table(model),
        layers=layers,
        lm_head=model.lm_head.weight.detach() if has_head else None,
    )


def mlp_tensors(mlp: torch.nn.Module, geometry: Geometry) -> dict[str, torch.Tensor]:
    """LayerTensors' fields of a layer's MLP: its two matrices, or the router and SGLang's fused matrices of all experts; FP8 ones with their scales."""
    if not geometry.is_moe:
        return {**matrix("gate_up", mlp.gate_up_proj), **matrix("down", mlp.down_proj)}
    experts = mlp.experts
    return {
        "router": mlp.gate.weight.detach(),
        "gate_up": experts.w13_weight.detach(),
        "down": experts.w2_weight.detach(),
        "gate_up_scale": optional(experts, "w13_weight_scale_inv"),
        "down_scale": optional(experts, "w2_weight_scale_inv"),
    }


def matrix(name: str, linear: torch.nn.Module) -> dict[str, torch.Tensor]:
    """LayerTensors' fields of a linear layer: its weight [N, K] and, in FP8, its scale, `name` and `name`_scale.

    SGLang holds the weight of scales a row as a transposed view [K, N], and the scales as [N, 1] or [1, N].
    """
    weight = linear.weight.detach()
    if weight.dtype != torch.float8_e4m3fn:
        return {name: weight}
    if (block_scale := optional(linear, "weight_scale_inv")) is not None:
        return {name: weight, f"{name}_scale": block_scale}
    return {name: weight.t(), f"{name}_scale": linear.weight_scale.detach().flatten()}


def optional(module: torch.nn.Module | None, name: str) -> torch.Tensor | None:
    """A view of the module's parameter, None without the one or the other."""
    parameter = getattr(module, name, None)
    return None if parameter is None else parameter.detach()


def rope_table(model: torch.nn.Module) -> torch.Tensor:
    """The model's cos/sin table [positions, head_dim], fp32 where SGLang keeps it so."""
    return model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
