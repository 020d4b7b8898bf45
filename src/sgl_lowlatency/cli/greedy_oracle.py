"""Which greedy tokens the model's own arithmetic decides: a float64 forward, and how far bf16 rounding moves it.

Two correct bf16 forwards may pick different tokens where the best two logits are closer than their rounding. A token is right
when its float64 logit is within `ERROR_MULTIPLE` times the standard path's own error of the best one, at that position.

Of a MoE model rounding also decides between experts whose router logits nearly tie. What that may move counts into the error: the standard path runs
once more with the next expert in the place of the last one wherever the two nearly tie, at this position or one before.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference import dense_decode, moe_step, routing, standard_path
from sgl_lowlatency.reference.inputs import cos_sin_table
from sgl_lowlatency.reference.step import StepInputs

NEAR_TIE = 0.1  # of router logits, in units of the row's root mean square: a few times what bf16 moves them by in a tiny model
ERROR_MULTIPLE = 3.0  # the standard path's error once for itself, twice for ours: the numerics gate's factor


@dataclass(frozen=True)
class Choice:
    """One chosen token. gap: how far its float64 logit is below the best. bound: what rounding can explain."""

    index: int
    token: int
    best: int
    gap: float
    bound: float

    @property
    def is_right(self) -> bool:
        return self.gap <= self.bound


class GreedyOracle:
    """Judges continuations of one tiny checkpoint (cli/tiny_model.py)."""

    def __init__(self, model: Path):
        self._geometry, self._weights, self._lm_head = _load(model)

    def judge(self, prompt_ids: list[int], output_ids: list[int]) -> list[Choice]:
        """One Choice a token of `output_ids`, each judged after the tokens before it as they are."""
        exact, bounds = self.logits(prompt_ids, output_ids)
        best_logit, best = exact.max(dim=-1)
        return [
            Choice(index, token, int(best[index]), float(best_logit[index] - exact[index, token]), float(bounds[index]))
            for index, token in enumerate(output_ids)
        ]

    @torch.no_grad()
    def logits(self, prompt_ids: list[int], output_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The float64 logits [output tokens, vocab] that each output token was chosen from, and how far rounding may move
        any of a row [output tokens]."""
        tokens = prompt_ids + output_ids[:-1]
        with _one_thread():
            exact = self._logits(tokens, torch.float64)[len(prompt_ids) - 1 :]
            error = (exact - self._logits(tokens, torch.bfloat16)[len(prompt_ids) - 1 :].double()).abs().amax(dim=-1)
            if self._geometry.is_moe:
                other = self._logits(tokens, torch.bfloat16, self._choose_next)[len(prompt_ids) - 1 :].double()
                error = torch.maximum(error, (exact - other).abs().amax(dim=-1))
        return exact, ERROR_MULTIPLE * error

    def _choose_next(self, logits: torch.Tensor) -> routing.Choices:
        """The router's choices, with the next expert instead of the last where the two nearly tie."""
        g, values = self._geometry, logits.double()
        choices = routing.choose(logits, g.top_k, g.norm_topk_prob)
        following = routing.choose(logits, g.top_k + 1, False)
        gap = values.gather(1, following.ids[:, -2:-1]) - values.gather(1, following.ids[:, -1:])
        is_tie = (gap < NEAR_TIE * values.square().mean(dim=-1, keepdim=True).sqrt())[:, 0]
        ids = choices.ids.clone()
        ids[is_tie, -1] = following.ids[is_tie, -1]
        weights = values.softmax(dim=-1).gather(1, ids)
        return routing.Choices(ids, weights / weights.sum(dim=-1, keepdim=True) if g.norm_topk_prob else weights)

    def _logits(self, tokens: list[int], dtype: torch.dtype, choose: moe_step.Choose | None = None) -> torch.Tensor:
        """[tokens, vocab] by one decode step a token; dtype bf16 runs SGLang's rounding. choose: of MoE layers, another rule than the router's."""
        g = self._geometry
        shape = (len(tokens), g.num_kv_heads, g.head_dim)
        k, v = ([torch.zeros(shape, dtype=dtype) for _ in range(g.num_layers)] for _ in range(2))
        table = torch.arange(len(tokens), dtype=torch.int32)[None]
        rows = []
        for position, token in enumerate(tokens):
            at = torch.tensor([position])
            inputs = StepInputs(torch.tensor([token]), at, at + 1, torch.tensor([0]), at, table, k, v)
            if g.is_moe and dtype == torch.bfloat16:
                outputs = moe_step.standard_step(g, self._weights, inputs, self._lm_head, choose=choose).outputs
            elif g.is_moe:
                outputs = moe_step.decode_step(g, self._weights, inputs, dtype, self._lm_head).outputs
            elif dtype == torch.bfloat16:
                outputs = standard_path.decode_step(g, self._weights, inputs, self._lm_head, rounds_activations=False)
            else:
                outputs = dense_decode.decode_step(g, self._weights, inputs, dtype, self._lm_head)
            for layer in range(g.num_layers):
                k[layer][position], v[layer][position] = outputs.k_rows[layer][0], outputs.v_rows[layer][0]
            rows.append(outputs.logits[0])
        return torch.stack(rows)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Operations this small run ten times slower when threads share them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _load(model: Path) -> tuple[Geometry, DecodeStepWeights, torch.Tensor]:
    from safetensors.torch import load_file

    config = SimpleNamespace(**json.loads((model / "config.json").read_text()))
    geometry = Geometry.from_hf_config(config)
    tensors = load_file(model / "model.safetensors")

    has_bias = "model.layers.0.self_attn.q_proj.bias" in tensors

    def matrix(name: str, *parts: str) -> dict[str, torch.Tensor]:
        """LayerTensors' fields of a matrix whose rows are these projections', with its FP8 scales if it has any."""
        weights = [tensors[f"{part}.weight"] for part in parts]
        if weights[0].dtype != torch.float8_e4m3fn:
            return {name: torch.cat(weights)}
        whole = torch.cat([weight.view(torch.uint8) for weight in weights]).view(torch.float8_e4m3fn)
        if f"{parts[0]}.weight_scale_inv" in tensors:
            return {name: whole, f"{name}_scale": torch.cat([tensors[f"{part}.weight_scale_inv"] for part in parts])}
        of_rows = [tensors[f"{part}.weight_scale"].expand(len(weight)) for part, weight in zip(parts, weights)]
        return {name: whole, f"{name}_scale": torch.cat(of_rows)}

    def mlp_fields(mlp: str) -> dict[str, torch.Tensor]:
        if not geometry.is_moe:
            return {**matrix("gate_up", mlp + "gate_proj", mlp + "up_proj"), **matrix("down", mlp + "down_proj")}
        experts = [f"{mlp}experts.{expert}." for expert in range(geometry.num_experts)]
        gate_up = [torch.cat([tensors[expert + "gate_proj.weight"], tensors[expert + "up_proj.weight"]]) for expert in experts]
        down = [tensors[expert + "down_proj.weight"] for expert in experts]
        return {"router": tensors[mlp + "gate.weight"], "gate_up": torch.stack(gate_up), "down": torch.stack(down)}

    def layer(index: int) -> LayerTensors:
        at = f"model.layers.{index}."
        attention = at + "self_attn."
        return LayerTensors(
            input_norm=tensors[at + "input_layernorm.weight"],
            **matrix("qkv", *[f"{attention}{name}_proj" for name in "qkv"]),
            qkv_bias=torch.cat([tensors[f"{attention}{name}_proj.bias"] for name in "qkv"]) if has_bias else None,
            q_norm=tensors.get(attention + "q_norm.weight"),
            k_norm=tensors.get(attention + "k_norm.weight"),
            **matrix("out_proj", attention + "o_proj"),
            post_norm=tensors[at + "post_attention_layernorm.weight"],
            **mlp_fields(at + "mlp."),
        )

    weights = DecodeStepWeights(
        embedding=tensors["model.embed_tokens.weight"],
        final_norm=tensors["model.norm.weight"],
        cos_sin=cos_sin_table(geometry.max_position, geometry.head_dim),
        layers=[layer(index) for index in range(geometry.num_layers)],
    )
    lm_head = weights.embedding if geometry.tied_head else tensors["lm_head.weight"]
    return geometry, weights, lm_head
