"""Model directories of named geometries, for benchmarks and GPU checks.

    python3 -m benchmark.models OUT_DIR --name qwen3-8b [--layers N] [--seed 0]

A directory holds `config.json` and the marker file `random_weights.json`. The weights themselves are never written: the
loader hook in `random_weights.py` draws them where they are needed (16 GB would take half a minute to write and to read).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from benchmark.random_weights import FP8_BLOCK
from sgl_lowlatency.bench.shapes import FAMILIES, PRESETS, Shape

MARKER = "random_weights.json"


SHAPES = {
    "qwen3-tiny": Shape(
        num_layers=4, hidden=256, num_q_heads=4, num_kv_heads=2, head_dim=64, intermediate=512,
        vocab=2048, max_position=2048, rms_eps=1e-6, tied_head=True,
    ),
    "qwen3-moe-tiny": Shape(
        num_layers=4, hidden=256, num_q_heads=4, num_kv_heads=2, head_dim=128, intermediate=0, vocab=2048, max_position=2048, rms_eps=1e-6,
        tied_head=False, num_experts=32, top_k=4, moe_intermediate=128, norm_topk_prob=True,
    ),
    **PRESETS,
}


def architecture_of(shape: Shape) -> str:
    """The HF architecture whose layers have this shape's norms, bias and experts."""
    wanted = shape.has_qk_norm, shape.has_qkv_bias, shape.is_moe
    return next(name for name, f in FAMILIES.items() if (f.has_qk_norm, f.has_qkv_bias, f.is_moe) == wanted)


def moe_config(shape: Shape) -> dict:
    """What the config of a MoE model has beside a dense one's; {} for dense layers."""
    if not shape.is_moe:
        return {}
    return {
        "decoder_sparse_step": 1,
        "intermediate_size": 3 * shape.hidden,  # no layer's
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.moe_intermediate,
        "norm_topk_prob": shape.norm_topk_prob,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def hf_config(shape: Shape, architecture: str | None = None, fp8: bool = False) -> dict:
    """`config.json` of a model of this shape, bf16; `architecture` replaces the shape's own. fp8: the layers' matrices are e4m3 with
    a float32 scale for every block of 128 x 128, as in Qwen3-8B-FP8."""
    architecture = architecture or architecture_of(shape)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK] * 2}
    return ({"quantization_config": quantization} if fp8 else {}) | {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower().replace("moe", "_moe"),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_position,
        "max_window_layers": shape.num_layers,
        "num_attention_heads": shape.num_q_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_eps,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": shape.tied_head,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    } | moe_config(shape)


def write_model(
    directory: Path, shape: Shape, seed: int = 0, architecture: str | None = None, fp8: bool = False, period: int | None = None
) -> Path:
    """Write `config.json` and the marker of `shape` into `directory`; returns it. With another architecture than the
    shape's own it cannot be loaded: that is for commands that are refused before the weights load.

    period: every token has one successor, and texts repeat after so many tokens (forced_text.py). Raises ValueError for that with a
    tied head.
    """
    if period and shape.tied_head:
        raise ValueError("a head tied to the embedding cannot give every token a successor of its own")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(shape, architecture, fp8), indent=1) + "\n")
    (directory / MARKER).write_text(json.dumps({"seed": seed} | ({"period": period} if period else {})) + "\n")
    return directory


def named_shape(name: str, layers: int | None = None) -> Shape:
    """The shape called `name`, cut to `layers` layers if given. Raises KeyError with the known names."""
    if name not in SHAPES:
        raise KeyError(f"no geometry {name!r}: one of {', '.join(SHAPES)}")
    shape = SHAPES[name]
    return dataclasses.replace(shape, num_layers=layers) if layers else shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--name", default="qwen3-8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=None, help="cut the model to this many layers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write_model(args.out, named_shape(args.name, args.layers), args.seed))


if __name__ == "__main__":
    main()
