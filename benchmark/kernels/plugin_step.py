"""decode_step with and without its LM head on the weights, the KV pool and the batch of a loaded SGLang model runner."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sgl_lowlatency.bench.lm_head import logits_problems
from sgl_lowlatency.build.device_limits import device_limits
from sgl_lowlatency.build.weights import collect_weights, rope_table
from sgl_lowlatency.kernels.decode_step import DecodeStep
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.plan.tiles import grid_for

INPUTS = ("input_ids", "positions", "seq_lens", "req_pool_indices", "out_cache_loc")
DEADLINE_S = 5.0


class PluginStep:
    """Raises ValueError or RuntimeError where decode_step does not take this model or this GPU."""

    def __init__(self, runner: Any, rows: list[int]) -> None:
        model, device = runner.model, runner.model.model.embed_tokens.weight.device
        geometry = Geometry.from_hf_config(runner.model_config.hf_config)
        self.geometry = dataclasses.replace(geometry, max_position=rope_table(model).shape[0])
        limits = device_limits(device)
        grid = grid_for(self.geometry, limits.grid)
        self.plans = {n: make_plan(self.geometry, n, grid, limits.shared_memory_bytes, has_head=True) for n in sorted(set(rows))}
        weights = collect_weights(model, self.geometry, has_head=True)
        self.step = DecodeStep(self.geometry, self.plans, weights, device, deadline_s=DEADLINE_S)
        buffers = [runner.token_to_kv_pool.get_kv_buffer(layer) for layer in range(self.geometry.num_layers)]
        self.step.attach_kv([k for k, _ in buffers], [v for _, v in buffers], runner.req_to_token_pool.req_to_token)
        self._device = device

    def bind(self, batch: Any) -> None:
        """Takes the inputs of SGLang's ForwardBatch."""
        self._inputs = [getattr(batch, name).to(device=self._device, dtype=torch.int64, copy=True) for name in INPUTS]
        shape = (len(self._inputs[0]), self.geometry.hidden)
        self.hidden = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=self._device)

        self.logits = torch.full((shape[0], self.geometry.vocab), float("nan"), dtype=torch.float32, device=self._device)

    def launch(self, logits: torch.Tensor | None = None) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self._device.type == "cuda" else 0
        self.step.launch(self.hidden.shape[0], *self._inputs, self.hidden, stream, logits=logits)

    def launch_with_head(self) -> None:
        self.launch(self.logits)

    def problems(self) -> list[str]:
        """What is wrong with the logits of the last launch with the head."""
        return logits_problems(self.logits, self.hidden, self.step.weights.lm_head[: self.geometry.vocab])
