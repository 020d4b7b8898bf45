"""Seeded real-scale random weights of a model (Qwen3, Llama, Qwen2, Qwen3-MoE), and the SGLang load hook that serves them.

`register()` is an entry point of the group `sglang.srt.plugins` (see `install_hook`). It makes SGLang's default loader draw
the weights of a directory that holds `random_weights.json` on the model's device and pass them through the model's own
`load_weights`; any other directory loads as usual.

Scales are those of a trained model, not of an initialised one, so that a wrong page, head, norm or rope changes the text:
norm gains spread around 1, q and k gains near 1.4 (attention scores of standard deviation about 2, so that a few tokens of a
long context carry the weight), residual branches of order 0.5 a layer, logits of standard deviation about 3 (1.5 when tied).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from benchmark import forced_text
from benchmark.common import sglang_hook

MARKER = "random_weights.json"
FP8_BLOCK = 128  # rows and columns that share a scale
QK_GAIN = 1.4
QKV_BIAS_STD = 0.5
ROUTER_STD = 2.0  # of router logits: of 128 experts, top 8, the eighth weight is then about a twentieth
EXPERTS_STD = 0.45  # of a row's sum over experts, where each gives 1: the root of the weights' squares, summed
BRANCH_STD = 0.5  # what one attention or MLP branch adds to the residual stream
LOGIT_STD = 3.0
TIED_LOGIT_STD = 1.5  # a tied head repeats the last token when the embedding weighs more in the residual stream
EMBEDDING_STD = 1.0


def tensor_plan(config: dict) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Yield (name, shape, mean, standard deviation) of every checkpoint tensor, in layer order."""
    hidden, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    tied, architecture = config["tie_word_embeddings"], config["architectures"][0]
    head_std = (TIED_LOGIT_STD if tied else LOGIT_STD) / math.sqrt(hidden)
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), 0.0, head_std if tied else EMBEDDING_STD
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,), 1.0, 0.1
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield at + f"self_attn.{name}_proj.weight", (rows, hidden), 0.0, 1 / math.sqrt(hidden)
            if architecture == "Qwen2ForCausalLM":
                yield at + f"self_attn.{name}_proj.bias", (rows,), 0.0, QKV_BIAS_STD
        if architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
            yield at + "self_attn.q_norm.weight", (dim,), QK_GAIN, 0.15
            yield at + "self_attn.k_norm.weight", (dim,), QK_GAIN, 0.15
        yield at + "self_attn.o_proj.weight", (hidden, q), 0.0, 2 * BRANCH_STD / math.sqrt(q)
        yield at + "post_attention_layernorm.weight", (hidden,), 1.0, 0.1
        mlps, branch = [at + "mlp."], BRANCH_STD
        if num_experts := config.get("num_experts"):
            yield at + "mlp.gate.weight", (num_experts, hidden), 0.0, ROUTER_STD / math.sqrt(hidden)
            mlps, branch = [at + f"mlp.experts.{expert}." for expert in range(num_experts)], BRANCH_STD / EXPERTS_STD
            inter = config["moe_intermediate_size"]
        for mlp in mlps:
            for name in ("gate", "up"):
                yield mlp + f"{name}_proj.weight", (inter, hidden), 0.0, 1 / math.sqrt(hidden)
            # silu(g) * u of two unit normals has a standard deviation near 0.6
            yield mlp + "down_proj.weight", (hidden, inter), 0.0, branch / 0.6 / math.sqrt(inter)
    yield "model.norm.weight", (hidden,), 1.0, 0.1
    if not tied:
        yield "lm_head.weight", (config["vocab_size"], hidden), 0.0, head_std


def draw(name: str, shape: tuple[int, ...], mean: float, std: float, *, seed: int, device):
    """One bf16 tensor. The same name, shape, seed and kind of device always give the same values."""
    import torch

    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # the CPU generator keeps 32 bits of a seed
    drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    return drawn.mul_(std).add_(mean)


def quantize_blocks(weight):
    """(e4m3 [n, k], float32 scales [ceil(n / 128), ceil(k / 128)]) whose product, block by block, is near `weight` [n, k]."""
    import torch
    import torch.nn.functional as F

    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    quantized = (blocks / scale).to(torch.float8_e4m3fn).view(padded.shape)[:rows, :columns]
    return quantized.contiguous(), scale[:, 0, :, 0].contiguous()


def dequantize_blocks(quantized, scale):
    """The float32 [n, k] that `quantize_blocks` stored: every element times its block's scale."""
    rows, columns = quantized.shape
    return quantized.float() * scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]


class DrawnWeights:
    """The tensors of a directory made by `models.write_model`, each drawn on `device` when it is asked for.

    names: of the checkpoint's tensors, scales apart. The matrices of layers are FP8 where the config says so. A directory with a
    period has the LM head of forced_text.py.
    """

    def __init__(self, directory: str | Path, device) -> None:
        self.config = json.loads((Path(directory) / "config.json").read_text())
        marker = json.loads((Path(directory) / MARKER).read_text())
        self._seed, self._period, self._device = marker["seed"], marker.get("period"), device
        self._plan = {name: (shape, mean, std) for name, shape, mean, std in tensor_plan(self.config)}
        self.names = tuple(self._plan)

    def _draw(self, name: str):
        shape, mean, std = self._plan[name]
        return draw(name, shape, mean, std, seed=self._seed, device=self._device)

    def stored(self, name: str) -> dict:
        """What the checkpoint has under this name: {name: tensor}, with the scales of an FP8 matrix beside it."""
        if self._period and name == "lm_head.weight":
            return {name: forced_text.head(self._draw("model.embed_tokens.weight"), self._period, LOGIT_STD / EMBEDDING_STD)}
        weight = self._draw(name)
        if "quantization_config" in self.config and name.endswith("_proj.weight"):
            quantized, scale = quantize_blocks(weight)
            return {f"{name}_scale_inv": scale, name: quantized}
        return {name: weight}

    def exact(self, name: str):
        """The values that are meant: bf16 as stored, or float32 of an FP8 matrix and its scales."""
        found = self.stored(name)
        scale = found.get(f"{name}_scale_inv")
        return found[name] if scale is None else dequantize_blocks(found[name], scale)


def all_weights(directory: str | Path, device) -> Iterator[tuple[str, object]]:
    """Yield (name, tensor on `device`) of everything in the checkpoint of `directory`, one at a time."""
    if "draft" in json.loads((Path(directory) / MARKER).read_text()):
        from benchmark import drafts  # which draws as this module does

        yield from drafts.all_weights(directory, device)
        return
    weights = DrawnWeights(directory, device)
    for name in weights.names:
        yield from weights.stored(name).items()


def register() -> None:
    """Patch SGLang's default loader once in this process."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if getattr(DefaultModelLoader, "_draws_random_weights", False):
        return
    read_files = DefaultModelLoader._get_all_weights

    def get_all_weights(self, model_config, model):
        if os.path.exists(os.path.join(model_config.model_path, MARKER)):
            return all_weights(model_config.model_path, next(model.parameters()).device)
        return read_files(self, model_config, model)

    DefaultModelLoader._get_all_weights = get_all_weights
    DefaultModelLoader._draws_random_weights = True


def install_hook(folder: Path) -> str:
    """Installs `register` in `folder`; returns the PYTHONPATH of a server that then serves directories made by `models.write_model`."""
    return sglang_hook.install(folder, "benchmark_random_weights", "benchmark.random_weights:register")
