"""Model directories of named Qwen3 dense geometries, for benchmarks and GPU checks.

    python3 -m benchmark.models OUT_DIR --name qwen3-8b [--layers N] [--seed 0]

A directory holds `config.json` and the marker file `random_weights.json`. The weights themselves are never written: the
loader hook in `random_weights.py` draws them where they are needed (16 GB would take half a minute to write and to read).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

MARKER = "random_weights.json"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The fields of a dense model that decide its bytes."""

    num_layers: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    tied_head: bool
    vocab: int = 151936
    max_position: int = 40960
    has_qk_norm: bool = True  # false: a Llama shape, for kernel benchmarks; the served ones load Qwen3 models

    @property
    def layer_weight_elements(self) -> int:
        """Elements of one layer's matrices and norms."""
        q, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        matrices = self.hidden * (2 * q + 2 * kv) + 3 * self.hidden * self.intermediate
        return matrices + 2 * self.hidden + (2 * self.head_dim if self.has_qk_norm else 0)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of bf16 K and V of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2


SHAPES = {
    "qwen3-tiny": Shape(4, 256, 4, 2, 64, 512, True, vocab=2048, max_position=2048),
    "qwen3-0.6b": Shape(28, 1024, 16, 8, 128, 3072, True),
    "qwen3-1.7b": Shape(28, 2048, 16, 8, 128, 6144, True),
    "qwen3-4b": Shape(36, 2560, 32, 8, 128, 9728, True),
    "qwen3-8b": Shape(36, 4096, 32, 8, 128, 12288, False),
    "qwen3-14b": Shape(40, 5120, 40, 8, 128, 17408, False),
    "qwen3-32b": Shape(64, 5120, 64, 8, 128, 25600, False),
    "llama-3.2-1b": Shape(16, 2048, 32, 8, 64, 8192, True, vocab=128256, has_qk_norm=False),
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 128, 14336, False, vocab=128256, has_qk_norm=False),
}


def hf_config(shape: Shape, architecture: str = "Qwen3ForCausalLM") -> dict:
    """`config.json` of a model of this shape, bf16."""
    return {
        "architectures": [architecture],
        "model_type": "mistral" if architecture == "MistralForCausalLM" else "qwen3",
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
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": shape.tied_head,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


def write_model(directory: Path, shape: Shape, seed: int = 0, architecture: str = "Qwen3ForCausalLM") -> Path:
    """Write `config.json` and the marker of `shape` into `directory`; returns it. Only Qwen3ForCausalLM can be loaded:
    other architectures are for commands that are refused before the weights load."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(shape, architecture), indent=1) + "\n")
    (directory / MARKER).write_text(json.dumps({"seed": seed}) + "\n")
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
