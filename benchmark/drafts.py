"""Draft models of speculative decoding, built so that the drafts of a target with forced texts (forced_text.py) are accepted.

    python3 -m benchmark.drafts OUT_DIR --algorithm eagle3 [--target qwen3-8b] [--drafts 4] [--period 64] [--files]

A directory holds `config.json` and the marker of random_weights.py, whose load hook draws the weights on the server's device; --files writes
`model.safetensors` in the marker's place, a checkpoint like any other. One layer, weights of real scale; why the target accepts:

eagle3, `LlamaForCausalLMEagle3`, embedding and LM head the target's. Queries and keys are one projection of the token's embedding, so that a
    position attends to itself; what it finds there, the embedding, is what the target's head turns into the successor. The states between
    layers that it is handed (fc) stay small beside that. `norm_output`: so does what a draft step hands to the next.
dflash, `DFlashDraftModel`, embedding and LM head the target's. A query is a constant and so is a key but for the rotation, which makes both
    meet one period and one token before the drafted one: there the context has what precedes it, in the states that the target handed over
    at that position. States of another position are a draft refused. Prompts have to be forced texts themselves.
dspark, `Qwen3DSparkModel`, embedding and LM head the target's. The Markov head knows the successors by heart: a row of W2 is the row of W1 of
    the token before. The layer's own logits are noise beside it, and its MLP loud enough that the mask token's successor is, too.
standalone, a small Qwen3 or Llama with an LM head of the same successors (models.write_model with a period).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

from benchmark import forced_text, models
from benchmark.random_weights import BRANCH_STD, MARKER, QK_GAIN, draw
from sgl_lowlatency.bench.shapes import Shape

ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}  # with layers of their own
ALGORITHMS = (*ARCHITECTURES, "standalone")
FAMILIES = ("qwen3", "llama")  # of standalone drafts
COPY_GAIN = 16.0  # of what attention copies, over the states beside it
SELF_GAIN = math.sqrt(3.0)  # eagle3: a position's score with itself is 34 in 128 channels, with another 3 times a unit normal
LOOK_BACK_GAIN, LOOK_BACK_PAIRS = 4.0, 8  # dflash: the score falls by 29 from one position to the next (theta 1e6, 128 channels)
AUX_STD = 0.1  # of what fc makes of the states that a draft does not live on, over theirs
MARKOV_RANK, MARKOV_LOGIT = 256, 200.0  # dspark: the successor's logit; of any other token 12 times a unit normal
LOUD_BRANCH_STD = 4.0  # dspark: of what the MLP adds
SMALL = {"num_layers": 1, "hidden": 1024, "num_q_heads": 16, "num_kv_heads": 8, "head_dim": 128, "intermediate": 3072}  # standalone


def captured_layers(num_layers: int) -> list[int]:
    """The layers whose outputs a draft reads, as its config numbers them: those of EAGLE3's default in SGLang, an early, a middle and a late one.
    Raises ValueError for a target too shallow to have three."""
    found = [1, num_layers // 2 - 1, num_layers - 4]
    if not found[0] < found[1] < found[2]:
        raise ValueError(f"a target of {num_layers} layers has no three layers for a draft: 7 is the least")
    return found


def config_of(algorithm: str, target: Shape, *, drafts: int) -> dict:
    """`config.json` of a draft with a layer of its own. drafts: tokens of a verify step a request."""
    shape = dataclasses.replace(target, num_layers=1, tied_head=False)
    layers = captured_layers(target.num_layers)
    config = models.hf_config(shape, ARCHITECTURES[algorithm])
    if algorithm == "eagle3":
        aux = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers}
        return config | {"model_type": "llama", "draft_vocab_size": None, "eagle_config": aux, "norm_output": True}
    block = {"dflash_config": {"mask_token_id": target.vocab - 1, "target_layer_ids": layers}, "num_target_layers": target.num_layers}
    if algorithm == "dflash":
        return config | block | {"model_type": "qwen3", "block_size": drafts, "attention_bias": True}
    markov = {"markov_rank": MARKOV_RANK, "markov_head_type": "vanilla", "enable_confidence_head": False}
    return config | block | markov | {"model_type": "qwen3", "block_size": drafts - 1}


def write_draft(directory: Path, algorithm: str, target: Shape, *, drafts: int, period: int, seed: int = 1, family: str = "qwen3") -> Path:
    """Write a draft of `target` into `directory`, for the load hook to draw; returns it. family: one of FAMILIES, of a standalone draft.
    Raises ValueError for a target that is too shallow."""
    if algorithm == "standalone":
        small = dataclasses.replace(target, **SMALL, tied_head=False, has_qk_norm=family == "qwen3", has_qkv_bias=False)
        return models.write_model(directory, small, seed=seed, period=period)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(algorithm, target, drafts=drafts), indent=1) + "\n")
    (directory / MARKER).write_text(json.dumps({"seed": seed, "period": period, "draft": algorithm}) + "\n")
    return directory


class DraftTensors:
    """The tensors of a draft with a layer of its own, bf16, each drawn on `device`. config: of config_of. The names are those of published
    checkpoints."""

    def __init__(self, algorithm: str, config: dict, *, period: int, seed: int, device) -> None:
        self._algorithm, self._config, self._period, self._seed, self._device = algorithm, config, period, seed, device
        self._hidden, self._dim = config["hidden_size"], config["head_dim"]
        self._q_heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def __iter__(self) -> Iterator[tuple[str, object]]:
        make = {"eagle3": self._eagle3, "dflash": self._dflash, "dspark": self._dspark}
        yield from make[self._algorithm]()

    def _draw(self, name: str, *shape: int, mean: float = 0.0, std: float):
        return draw(f"{self._algorithm} {name}", shape, mean, std, seed=self._seed, device=self._device)

    def _norm(self, name: str, dim: int | None = None):
        return name, self._draw(name, dim or self._hidden, mean=1.0, std=0.1)

    def _mlp(self, at: str, branch: float = BRANCH_STD) -> Iterator[tuple[str, object]]:
        hidden, inter = self._hidden, self._config["intermediate_size"]
        for name in ("gate", "up"):
            yield at + f"mlp.{name}_proj.weight", self._draw(at + name, inter, hidden, std=1 / math.sqrt(hidden))
        yield at + "mlp.down_proj.weight", self._draw(at + "down", hidden, inter, std=branch / 0.6 / math.sqrt(inter))

    def _copied(self):
        """(V [kv * dim, hidden], O [hidden, q * dim]) of heads that hand on what they attend to, COPY_GAIN times as loud in all."""
        value = self._draw("value", self._kv_heads * self._dim, self._hidden, std=1 / math.sqrt(self._hidden))
        shared = self._q_heads // self._kv_heads
        back = value.T.view(self._hidden, self._kv_heads, 1, self._dim).expand(-1, -1, shared, -1)
        return value, (back * (COPY_GAIN / shared)).reshape(self._hidden, self._q_heads * self._dim)

    def _eagle3(self) -> Iterator[tuple[str, object]]:
        import torch

        hidden, at = self._hidden, "midlayer."
        own = self._draw("own", self._kv_heads, self._dim, hidden, std=SELF_GAIN / math.sqrt(hidden))
        queries = own.repeat_interleave(self._q_heads // self._kv_heads, dim=0)
        value, out = self._copied()
        for name, of_embedding in (("q", queries.flatten(0, 1)), ("k", own.flatten(0, 1)), ("v", value)):
            of_states = self._draw(name, *of_embedding.shape, std=AUX_STD / math.sqrt(hidden))
            yield at + f"self_attn.{name}_proj.weight", torch.cat((of_embedding, of_states), dim=1)
        yield at + "self_attn.o_proj.weight", out
        yield from map(self._norm, (at + "input_layernorm.weight", at + "hidden_norm.weight", at + "post_attention_layernorm.weight"))
        yield from self._mlp(at)
        num_aux = len(self._config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        yield "fc.weight", self._draw("fc", hidden, num_aux * hidden, std=4 * AUX_STD / math.sqrt(num_aux * hidden))
        yield self._norm("norm.weight")

    def _block_layer(self, *, gain: float, branch: float) -> Iterator[tuple[str, object]]:
        """What a DFLASH and a DSPARK draft have alike. gain: of the q and k norms. branch: standard deviation of what the MLP adds."""
        at, dim = "layers.0.", self._dim
        yield from map(self._norm, (at + "input_layernorm.weight", at + "post_attention_layernorm.weight", "norm.weight", "hidden_norm.weight"))
        for name in ("q", "k"):
            yield at + f"self_attn.{name}_norm.weight", self._draw(name, dim, mean=gain, std=0.02 * gain)
        yield from self._mlp(at, branch)

    def _dflash(self) -> Iterator[tuple[str, object]]:
        import torch

        hidden, dim, at = self._hidden, self._dim, "layers.0.self_attn."
        yield from self._block_layer(gain=LOOK_BACK_GAIN, branch=BRANCH_STD)
        value, out = self._copied()
        query, key = look_back(dim, self._config["rope_theta"], self._period + 1)
        for name, heads, bias in (("q", self._q_heads, query), ("k", self._kv_heads, key)):
            yield at + f"{name}_proj.weight", self._draw(name + " weight", heads * dim, hidden, std=AUX_STD / math.sqrt(hidden))
            yield at + f"{name}_proj.bias", torch.tensor(bias * heads, dtype=torch.bfloat16, device=self._device)
        yield at + "v_proj.weight", value
        yield at + "o_proj.weight", out
        for name, rows in (("v", self._kv_heads * dim), ("o", hidden)):
            yield at + f"{name}_proj.bias", self._draw(name + " bias", rows, std=0.02)
        num_aux = len(self._config["dflash_config"]["target_layer_ids"])
        fc = self._draw("fc", hidden, num_aux * hidden, std=AUX_STD / math.sqrt(hidden))
        fc[:, :hidden] += torch.eye(hidden, dtype=fc.dtype, device=fc.device)
        yield "fc.weight", fc

    def _dspark(self) -> Iterator[tuple[str, object]]:
        hidden, dim, at, vocab = self._hidden, self._dim, "layers.0.self_attn.", self._config["vocab_size"]
        yield from self._block_layer(gain=QK_GAIN, branch=LOUD_BRANCH_STD)
        for name, heads in (("q", self._q_heads), ("k", self._kv_heads), ("v", self._kv_heads)):
            yield at + f"{name}_proj.weight", self._draw(name + " weight", heads * dim, hidden, std=1 / math.sqrt(hidden))
        yield at + "o_proj.weight", self._draw("out", hidden, self._q_heads * dim, std=2 * BRANCH_STD / math.sqrt(self._q_heads * dim))
        num_aux = len(self._config["dflash_config"]["target_layer_ids"])
        yield "fc.weight", self._draw("fc", hidden, num_aux * hidden, std=1 / math.sqrt(num_aux * hidden))
        rank = self._config["markov_rank"]
        w1 = self._draw("markov", vocab, rank, std=1.0)
        yield "markov_head.markov_w1.weight", w1
        yield "markov_head.markov_w2.weight", forced_text.head(w1, self._period, MARKOV_LOGIT / math.sqrt(rank))


def look_back(dim: int, theta: float, distance: int) -> tuple[list[float], list[float]]:
    """(query, key) of `dim` channels, halves rotated against each other, whose product under rope is greatest where the query stands `distance`
    positions behind the key; of unit mean square. Their pairs of channels are the LOOK_BACK_PAIRS fastest."""
    half, loud = dim // 2, math.sqrt(dim / LOOK_BACK_PAIRS)
    query, key = [0.0] * dim, [0.0] * dim
    for pair in range(LOOK_BACK_PAIRS):
        angle = -distance * theta ** (-pair / half)
        query[pair], query[pair + half], key[pair] = loud * math.cos(angle), loud * math.sin(angle), loud
    return query, key


def all_weights(directory: Path, device) -> Iterator[tuple[str, object]]:
    """Yield (name, tensor on `device`) of a directory of write_draft with a layer of its own."""
    config, marker = (json.loads((Path(directory) / name).read_text()) for name in ("config.json", MARKER))
    yield from DraftTensors(marker["draft"], config, period=marker["period"], seed=marker["seed"], device=device)


def write_files(directory: Path, device: str = "cpu") -> Path:
    """Replaces the marker of a directory of write_draft by `model.safetensors`; returns the file."""
    from safetensors.torch import save_file

    from benchmark import random_weights

    tensors = {name: tensor.contiguous().cpu() for name, tensor in random_weights.all_weights(directory, device)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / MARKER).unlink()
    return directory / "model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--algorithm", choices=ALGORITHMS, required=True)
    parser.add_argument("--target", default="qwen3-8b", choices=sorted(models.SHAPES))
    parser.add_argument("--drafts", type=int, default=4, help="tokens of a verify step a request")
    parser.add_argument("--period", type=int, default=64, help="tokens after which the target's text repeats")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3", help="of a standalone draft")
    parser.add_argument("--files", action="store_true", help="write the weights to files")
    args = parser.parse_args()
    target = models.named_shape(args.target)
    print(write_draft(args.out, args.algorithm, target, drafts=args.drafts, period=args.period, family=args.family))
    if args.files:
        print(write_files(args.out))


if __name__ == "__main__":
    main()
