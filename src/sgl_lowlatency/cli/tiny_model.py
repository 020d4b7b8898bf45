"""A tiny checkpoint of a family made on the spot: real-scale random weights, a byte-level tokenizer, nothing downloaded.

Weights are drawn so that every part of a step matters to its logits: projections keep unit variance, norm weights differ
from 1 and from each other, and attention scores spread over several units. (`--load-format dummy` draws weights so small
that any computation compares equal.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_lowlatency.guard.family import QWEN3, Family
from sgl_lowlatency.reference.quantized import quantize

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENIZER_TEXT = """\
the of and to in is that it was for on are with as his they at be this from have or by one had not but what all were when
we there can an your which their said if do will each about how up out them then she many some so these would other into
has more her two like him see time could no make than first been its who now people my made over did down only way find
use may water long little very after words called just where most know get through back much before go good new write our
used me man too any day same right look think also around another came come work three word must because does part even
place well such here take why things help put years different away again off went old number system user assistant
"""


@dataclass(frozen=True)
class TinyModel:
    """Sizes of the checkpoint; the field names are those of the Hugging Face config."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 512
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0


@dataclass(frozen=True)
class TinyMoeModel(TinyModel):
    """Sizes of a MoE family's checkpoint; intermediate_size is no layer's."""

    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 128
    norm_topk_prob: bool = True


# The quantization_config of FP8 checkpoints: Qwen3-8B-FP8's, with scales of blocks, and of checkpoints with a scale a matrix.
FP8_CONFIGS = {
    "fp8_block": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "fp8_tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}


def make_tiny_model(
    directory: Path, sizes: TinyModel | None = None, seed: int = 0, family: Family = QWEN3, weights: str = "bf16"
) -> None:
    """Writes config.json, model.safetensors and the tokenizer files into `directory`, which is created.

    sizes: the family's default ones without any; of a MoE family, a TinyMoeModel. weights: of the projections, "bf16" or a name in FP8_CONFIGS; everything else is bf16.
    """
    from safetensors.torch import save_file

    sizes = sizes or (TinyMoeModel() if family.is_moe else TinyModel())
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, sizes)
    config = {
        "architectures": [family.architecture],
        "model_type": family.architecture.removesuffix("ForCausalLM").lower().replace("moe", "_moe"),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        **sizes.__dict__,
    }
    if weights != "bf16":
        config["quantization_config"] = FP8_CONFIGS[weights]
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "do_sample": False}))
    save_file(dict(_quantized(_tensors(sizes, seed, family), weights)), directory / "model.safetensors", metadata={"format": "pt"})


def _quantized(tensors: Iterator[tuple[str, torch.Tensor]], weights: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, those of projections in FP8 and followed by their scales."""
    for name, tensor in tensors:
        if weights == "bf16" or not name.endswith("_proj.weight"):
            yield name, tensor
        elif weights == "fp8_block":
            yield from zip((name, f"{name}_scale_inv"), quantize(tensor.float(), (tensor.shape[0] // 128, tensor.shape[1] // 128)))
        else:
            codes, scale = quantize(tensor.float(), (1, 1))
            yield from ((name, codes), (f"{name}_scale", scale[0, 0]))


def _tensors(sizes: TinyModel, seed: int, family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))).to(torch.bfloat16)

    def norm(size: int, mean: float) -> torch.Tensor:
        return (mean * (1.0 + 0.2 * torch.randn(size, generator=generator))).to(torch.bfloat16)

    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    q_rows, kv_rows = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    yield "model.embed_tokens.weight", torch.randn(sizes.vocab_size, hidden, generator=generator).to(torch.bfloat16)
    for layer in range(sizes.num_hidden_layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", norm(hidden, 1.0)
        yield at + "self_attn.q_proj.weight", matrix(q_rows, hidden)
        yield at + "self_attn.k_proj.weight", matrix(kv_rows, hidden)
        yield at + "self_attn.v_proj.weight", matrix(kv_rows, hidden, gain=2.0)
        if family.has_qk_norm:
            yield at + "self_attn.q_norm.weight", norm(sizes.head_dim, 1.5)
            yield at + "self_attn.k_norm.weight", norm(sizes.head_dim, 1.5)
        if family.has_qkv_bias:
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                yield at + f"self_attn.{name}_proj.bias", (0.5 * torch.randn(rows, generator=generator)).to(torch.bfloat16)
        yield at + "self_attn.o_proj.weight", matrix(hidden, q_rows)
        yield at + "post_attention_layernorm.weight", norm(hidden, 1.0)
        mlps = ["mlp"]
        if isinstance(sizes, TinyMoeModel):
            yield at + "mlp.gate.weight", matrix(sizes.num_experts, hidden, gain=2.0)
            mlps, inner = [f"mlp.experts.{expert}" for expert in range(sizes.num_experts)], sizes.moe_intermediate_size
        for mlp in mlps:
            yield at + f"{mlp}.gate_proj.weight", matrix(inner, hidden)
            yield at + f"{mlp}.up_proj.weight", matrix(inner, hidden)
            yield at + f"{mlp}.down_proj.weight", matrix(hidden, inner, gain=2.0)
    yield "model.norm.weight", norm(hidden, 1.0)
    if not sizes.tie_word_embeddings:
        yield "lm_head.weight", matrix(sizes.vocab_size, hidden, gain=3.0)


def write_tokenizer(directory: Path, sizes: TinyModel) -> None:
    """Writes tokenizer.json and tokenizer_config.json, of sizes' vocab_size, into `directory`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=sizes.vocab_size,
        min_frequency=1,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TOKENIZER_TEXT], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "chat_template": CHAT_TEMPLATE,
                "model_max_length": sizes.max_position_embeddings,
                "clean_up_tokenization_spaces": False,
            },
            indent=2,
        )
    )
