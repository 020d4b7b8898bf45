"""Whole-model float32 forward of a random-weight Qwen3, Qwen3-MoE or Llama directory, in plain torch, one layer's weights at a time.

It answers one question for the serving checks: by how much does float32 arithmetic prefer one next token over another? Of FP8 weights it
takes the values that codes and scales mean, and rounds no activation.
"""

from __future__ import annotations

from pathlib import Path

from benchmark.random_weights import DrawnWeights


class Oracle:
    """Float32 logits of token sequences under the weights of `directory`.

    Weights are drawn exactly as the served model's (same device kind needed), upcast to float32, used and dropped.
    """

    def __init__(self, directory: str | Path, device) -> None:
        self._weights, self._device = DrawnWeights(directory, device), device
        self.config = self._weights.config

    def logits(self, sequences: list[list[int]], first: list[int]) -> list:
        """float32 logits [len(sequence) - first, vocab] of every position from `first[i]` on, one tensor a sequence."""
        import torch

        tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            with torch.no_grad():
                return self._logits(sequences, first)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = tf32

    def _logits(self, sequences, first):
        import torch

        cfg, eps = self.config, self.config["rms_norm_eps"]
        embedding = self._weights.exact("model.embed_tokens.weight")
        states = [embedding[torch.tensor(ids, device=self._device)].float() for ids in sequences]
        cos, sin = rope_table(max(map(len, sequences)), cfg["head_dim"], cfg["rope_theta"], self._device)
        for layer in range(cfg["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            names = [n for n in self._weights.names if n.startswith(at) and ".experts." not in n]
            weight = {n[len(at) :]: self._weights.exact(n).float() for n in names}
            states = [_attention(x, weight, cfg, cos, sin, eps) for x in states]
            if "num_experts" in cfg:
                states = self._experts(at + "mlp.", states, weight, eps)
            else:
                states = [_mlp(x, weight, eps) for x in states]
        final = self._weights.exact("model.norm.weight").float()
        head = embedding if cfg["tie_word_embeddings"] else self._weights.exact("lm_head.weight")
        states = [rms_norm(x[begin:], final, eps) for x, begin in zip(states, first, strict=True)]
        return [torch.cat([x @ part.float().T for part in head.split(32768)], dim=1) for x in states]


    def _experts(self, at: str, states: list, weight: dict, eps: float) -> list:
        """states through a layer's router and experts, each expert's weights drawn once."""
        import torch

        cfg, sizes = self.config, [len(x) for x in states]
        x = torch.cat(states)
        y = rms_norm(x, weight["post_attention_layernorm.weight"], eps)
        probabilities, ids = (y @ weight["mlp.gate.weight"].T).softmax(dim=-1).topk(cfg["num_experts_per_tok"], dim=-1)
        if cfg["norm_topk_prob"]:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        for expert in range(cfg["num_experts"]):
            rows, ranks = (ids == expert).nonzero(as_tuple=True)
            if len(rows):
                gate, up, down = (self._weights.exact(f"{at}experts.{expert}.{name}_proj.weight").float() for name in ("gate", "up", "down"))
                x = x.index_add(0, rows, probabilities[rows, ranks, None] * _gated(y[rows], gate, up, down))
        return list(x.split(sizes))


class Remembered:
    """An oracle's logits of sequences that are known beforehand, all from one pass: drawing a model's weights takes longer than using
    them. `logits` raises KeyError for any other sequence."""

    def __init__(self, oracle, sequences: list[list[int]], first: list[int]) -> None:
        keys = [(tuple(sequence), begin) for sequence, begin in zip(sequences, first, strict=True)]
        asked = list(dict.fromkeys(keys))
        found = oracle.logits([list(sequence) for sequence, _ in asked], [begin for _, begin in asked]) if asked else []
        self._logits = dict(zip(asked, found, strict=True))

    def logits(self, sequences: list[list[int]], first: list[int]) -> list:
        """As Oracle.logits."""
        return [self._logits[tuple(sequence), begin] for sequence, begin in zip(sequences, first, strict=True)]


def rms_norm(x, weight, eps: float):
    """x [..., n] float32 -> x / rms(x) * weight."""
    import torch

    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_table(length: int, dim: int, theta: float, device):
    """(cos, sin) float32 [length, dim / 2] of every position and pair of channels."""
    import torch

    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * inverse
    return angle.cos().float(), angle.sin().float()


def _rope(x, cos, sin):
    """x [tokens, heads, dim], half-split pairs (neox)."""
    import torch

    low, high = x.chunk(2, dim=-1)
    c, s = cos[: x.shape[0], None], sin[: x.shape[0], None]
    return torch.cat((low * c - high * s, high * c + low * s), dim=-1)


def _attention(x, w, cfg, cos, sin, eps):
    import torch.nn.functional as F

    tokens, dim = x.shape[0], cfg["head_dim"]
    group = cfg["num_attention_heads"] // cfg["num_key_value_heads"]
    y = rms_norm(x, w["input_layernorm.weight"], eps)
    q, k, v = ((y @ w[f"self_attn.{n}_proj.weight"].T).view(tokens, -1, dim) for n in "qkv")
    if "self_attn.q_norm.weight" in w:  # Llama has none
        q, k = (rms_norm(t, w[f"self_attn.{n}_norm.weight"], eps) for n, t in (("q", q), ("k", k)))
    q, k = _rope(q, cos, sin), _rope(k, cos, sin)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    mixed = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True)
    return x + mixed[0].transpose(0, 1).reshape(tokens, -1) @ w["self_attn.o_proj.weight"].T


def _mlp(x, w, eps):
    y = rms_norm(x, w["post_attention_layernorm.weight"], eps)
    return x + _gated(y, *(w[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))


def _gated(y, gate, up, down):
    import torch.nn.functional as F

    return (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
