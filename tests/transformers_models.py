"""Hugging Face's dense models with our random weights, and one decode step of one as our oracles take it."""

from __future__ import annotations

import torch
import transformers
from tiny_geometries import FAMILIES

from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference.inputs import random_weights
from sgl_lowlatency.reference.step import StepInputs, StepOutputs

VOCAB = 97


MODELS = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
}


def make_model(shape, dtype: torch.dtype, family: str = "qwen3") -> tuple[Geometry, DecodeStepWeights, torch.nn.Module]:
    """shape: (q heads, kv heads, head_dim, hidden, intermediate, tied head). The model computes in `dtype`."""
    q_heads, kv_heads, head_dim, hidden, intermediate, tied = shape
    config_class, model_class = MODELS[family]
    config = config_class(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=3, num_attention_heads=q_heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=128, rms_norm_eps=1e-6,
        tie_word_embeddings=tied, rope_theta=1_000_000.0, attn_implementation="eager",
    )
    geometry = Geometry.from_hf_config(config)
    weights = random_weights(geometry, seed=sum(shape), **FAMILIES[family])
    model = model_class(config).to(dtype).eval()
    sizes = [q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(weights.embedding)
        model.model.norm.weight.copy_(weights.final_norm)
        if not tied:
            generator = torch.Generator().manual_seed(1)
            model.lm_head.weight.copy_(torch.randn(model.lm_head.weight.shape, generator=generator) * hidden**-0.5)
        for layer, ours in zip(model.model.layers, weights.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            q, k, v = ours.qkv.split(sizes)
            gate, up = ours.gate_up.chunk(2)
            for module, tensor in (
                (layer.input_layernorm, ours.input_norm), (layer.post_attention_layernorm, ours.post_norm),
                (attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v), (attention.o_proj, ours.out_proj),
                (mlp.gate_proj, gate), (mlp.up_proj, up), (mlp.down_proj, ours.down),
            ):
                module.weight.copy_(tensor)
            if ours.q_norm is not None:
                attention.q_norm.weight.copy_(ours.q_norm)
                attention.k_norm.weight.copy_(ours.k_norm)
            if ours.qkv_bias is not None:
                for module, bias in zip((attention.q_proj, attention.k_proj, attention.v_proj), ours.qkv_bias.split(sizes)):
                    module.bias.copy_(bias)
    return geometry, weights, model


@torch.no_grad()
def decode_step(geometry: Geometry, model: torch.nn.Module, lengths: list[int], seed: int) -> tuple[StepInputs, StepOutputs]:
    """A prefill of length - 1 tokens and a decode step a row: the step as our oracles' inputs, and the model's outputs, aux of all layers.

    KV of the prefill lies in scattered slots of a pool whose other slots are NaN, in the model's dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = model.dtype
    slots = 1 + torch.randperm(sum(lengths), generator=generator)
    req_to_token = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    pool = (1 + sum(lengths), geometry.num_kv_heads, geometry.head_dim)
    k_buffers, v_buffers = ([torch.full(pool, float("nan"), dtype=dtype) for _ in range(geometry.num_layers)] for _ in range(2))
    tokens, hidden, logits, new_slots, entered = [], [], [], [], []
    k_rows = torch.empty(geometry.num_layers, len(lengths), *pool[1:], dtype=dtype)
    v_rows = torch.empty_like(k_rows)
    for row, length in enumerate(lengths):
        ids = torch.randint(0, VOCAB, (1, length), generator=generator)
        own = slots[sum(lengths[:row]) : sum(lengths[: row + 1])]
        req_to_token[row, :length] = own.int()
        past = model(ids[:, :-1], use_cache=True).past_key_values if length > 1 else None
        for idx in range(geometry.num_layers if past else 0):
            k_buffers[idx][own[:-1]] = past.layers[idx].keys[0].transpose(0, 1)
            v_buffers[idx][own[:-1]] = past.layers[idx].values[0].transpose(0, 1)
        step = model(ids[:, -1:], past_key_values=past, use_cache=True, output_hidden_states=True)
        for idx, layer in enumerate(step.past_key_values.layers):
            k_rows[idx, row], v_rows[idx, row] = layer.keys[0, :, -1], layer.values[0, :, -1]
        tokens.append(int(ids[0, -1]))
        new_slots.append(int(own[-1]))
        hidden.append(step.hidden_states[-1][0, -1])
        entered.append(torch.stack([states[0, -1] for states in step.hidden_states[:-1]]))  # entry i enters layer i
        logits.append(step.logits[0, -1])
    inputs = StepInputs(
        input_ids=torch.tensor(tokens), positions=torch.tensor(lengths) - 1, seq_lens=torch.tensor(lengths),
        req_pool_indices=torch.arange(len(lengths)), out_cache_loc=torch.tensor(new_slots), req_to_token=req_to_token,
        k_buffers=k_buffers, v_buffers=v_buffers,
    )
    return inputs, StepOutputs(torch.stack(hidden), k_rows, v_rows, torch.stack(logits), torch.stack(entered, dim=1))
