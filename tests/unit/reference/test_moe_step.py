"""Whole MoE steps: the oracle in float32 is Hugging Face's Qwen3-MoE model, and SGLang's bf16 arm is as far from the oracle as bf16 is."""

import pytest
import torch

pytest.importorskip("transformers")
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

from sgl_lowlatency.kernels.geometry import Geometry  # noqa: E402
from sgl_lowlatency.reference import moe_step  # noqa: E402
from sgl_lowlatency.reference.inputs import ROPE_THETA, random_step, random_weights  # noqa: E402

GEOMETRY = Geometry(3, 256, 4, 2, 64, 384, 512, 8192, 1e-6, False, num_experts=16, top_k=4, moe_intermediate=64, norm_topk_prob=True)


def transformers_model(geometry, weights):
    """float32, with our weights."""
    g = geometry
    config = Qwen3MoeConfig(
        vocab_size=g.vocab, hidden_size=g.hidden, num_hidden_layers=g.num_layers, num_attention_heads=g.num_q_heads, num_key_value_heads=g.num_kv_heads,
        head_dim=g.head_dim, intermediate_size=g.intermediate, moe_intermediate_size=g.moe_intermediate, num_experts=g.num_experts,
        num_experts_per_tok=g.top_k, norm_topk_prob=g.norm_topk_prob, decoder_sparse_step=1, mlp_only_layers=[], rms_norm_eps=g.rms_eps,
        rope_theta=ROPE_THETA, rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA}, tie_word_embeddings=False, hidden_act="silu",
        max_position_embeddings=g.max_position,
    )
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = Qwen3MoeForCausalLM(config).float().eval()
    q, kv = g.num_q_heads * g.head_dim, g.num_kv_heads * g.head_dim
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(weights.embedding)
        model.model.norm.weight.copy_(weights.final_norm)
        for theirs, ours in zip(model.model.layers, weights.layers, strict=True):
            theirs.input_layernorm.weight.copy_(ours.input_norm)
            theirs.post_attention_layernorm.weight.copy_(ours.post_norm)
            for projection, part in zip(("q_proj", "k_proj", "v_proj"), ours.qkv.split([q, kv, kv]), strict=True):
                getattr(theirs.self_attn, projection).weight.copy_(part)
            theirs.self_attn.q_norm.weight.copy_(ours.q_norm)
            theirs.self_attn.k_norm.weight.copy_(ours.k_norm)
            theirs.self_attn.o_proj.weight.copy_(ours.out_proj)
            theirs.mlp.gate.weight.copy_(ours.router)
            theirs.mlp.experts.gate_up_proj.copy_(ours.gate_up)
            theirs.mlp.experts.down_proj.copy_(ours.down)
    return model


def distance(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("change", [None, "gate and up", "next expert"])
def test_a_step_of_one_token_is_transformers(change):
    """Rows of length 1 are prompts of one token. float32 router logits hardly tie, and both sides rank their own. A changed model is another one."""
    weights = random_weights(GEOMETRY, 3)
    inputs = random_step(GEOMETRY, [1, 1, 1, 1], 4)
    with torch.no_grad():
        theirs = transformers_model(GEOMETRY, weights).model(input_ids=inputs.input_ids[:, None]).last_hidden_state[:, 0]
    if change == "gate and up":
        for layer in weights.layers:
            layer.gate_up.copy_(torch.cat(layer.gate_up.chunk(2, 1)[::-1], 1))
    elif change == "next expert":
        for layer in weights.layers:
            layer.down.copy_(layer.down.roll(1, 0))
    ours = moe_step.decode_step(GEOMETRY, weights, inputs, torch.float32, rounds_logits=False).outputs.hidden
    assert distance(ours, theirs) < 1e-5 if change is None else distance(ours, theirs) > 0.05


def test_the_standard_path_is_as_far_as_bf16_rounding():
    weights = random_weights(GEOMETRY, 5)
    inputs = random_step(GEOMETRY, [65, 1, 300], 6)
    oracle = moe_step.decode_step(GEOMETRY, weights, inputs)
    standard = moe_step.standard_step(GEOMETRY, weights, inputs, choices=oracle.choices)
    assert 2.0**-9 < distance(standard.outputs.hidden, oracle.outputs.hidden) < 2.0**-5
    assert 2.0**-9 < distance(standard.router_logits, oracle.router_logits) < 2.0**-5
