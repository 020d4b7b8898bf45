"""The model families that decode_step computes: Llama's decoder, with what a family adds to it, or has in the place of its MLP."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Family:
    """name: as people call it. architecture: in an HF config. model_class: SGLang's class, module and name.

    has_qk_norm: q and k heads are normalised before rope. has_qkv_bias: q, k and v get a bias. Nothing else has one.
    is_moe: every layer's MLP is a router and experts.
    """

    name: str
    architecture: str
    model_class: str
    has_qk_norm: bool
    has_qkv_bias: bool
    is_moe: bool = False


QWEN3 = Family("Qwen3 dense", "Qwen3ForCausalLM", "sglang.srt.models.qwen3.Qwen3ForCausalLM", True, False)
LLAMA = Family("Llama", "LlamaForCausalLM", "sglang.srt.models.llama.LlamaForCausalLM", False, False)
QWEN2 = Family("Qwen2 dense", "Qwen2ForCausalLM", "sglang.srt.models.qwen2.Qwen2ForCausalLM", False, True)
QWEN3_MOE = Family("Qwen3-MoE", "Qwen3MoeForCausalLM", "sglang.srt.models.qwen3_moe.Qwen3MoeForCausalLM", True, False, is_moe=True)
