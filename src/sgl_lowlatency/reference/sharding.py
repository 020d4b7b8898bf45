"""What SGLang leaves a rank of a tensor-parallel group, made from whole weights and inputs."""

from __future__ import annotations

import dataclasses

import torch

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference.step import StepInputs, StepOutputs

def shard_weights(geometry: Geometry, weights: DecodeStepWeights, rank: int, num_ranks: int) -> DecodeStepWeights:
    """Rank `rank`'s weights; what all ranks have is shared, the rest copied; of one rank, the weights. geometry: the whole
    model's."""
    if num_ranks == 1:
        return weights
    rows = geometry.shard(num_ranks).vocab

    def of_vocab(matrix: torch.Tensor | None) -> torch.Tensor | None:
        if matrix is None:
            return None
        shard = matrix.new_zeros(rows, geometry.hidden)
        own = matrix[: geometry.vocab][rank * rows : (rank + 1) * rows]
        shard[: own.shape[0]] = own
        return shard

    layers = [_shard_layer(geometry, layer, rank, num_ranks) for layer in weights.layers]
    return dataclasses.replace(weights, embedding=of_vocab(weights.embedding), lm_head=of_vocab(weights.lm_head), layers=layers)


def _shard_layer(g: Geometry, layer: LayerTensors, rank: int, num_ranks: int) -> LayerTensors:
    heads = [g.num_q_heads * g.head_dim, g.num_kv_heads * g.head_dim, g.num_kv_heads * g.head_dim]
    channels = [g.mlp_channels, g.mlp_channels]

    def rows(tensor: torch.Tensor | None, parts: list[int], dim: int, unit: int = 1) -> torch.Tensor | None:
        """Of every part its share, one after the other. unit: rows that share an entry of a block scale."""
        if tensor is None:
            return None
        own = [part.chunk(num_ranks, dim)[rank] for part in tensor.split([part // unit for part in parts], dim)]
        return torch.cat(own, dim).contiguous()

    def columns(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.chunk(num_ranks, -1)[rank].contiguous()

    fields = {
        "qkv": rows(layer.qkv, heads, 0), "qkv_bias": rows(layer.qkv_bias, heads, 0), "out_proj": columns(layer.out_proj),
        "gate_up": rows(layer.gate_up, channels, -2), "down": columns(layer.down),
    }
    if layer.format != "bf16":
        unit = abi.SCALE_BLOCK if layer.format == "fp8_block" else 1
        fields |= {"qkv_scale": rows(layer.qkv_scale, heads, 0, unit), "gate_up_scale": rows(layer.gate_up_scale, channels, 0, unit)}
        if unit > 1:  # of a scale a row, every rank has all rows
            fields |= {"out_proj_scale": columns(layer.out_proj_scale), "down_scale": columns(layer.down_scale)}
    return dataclasses.replace(layer, **fields)


def shard_inputs(inputs: StepInputs, rank: int, num_ranks: int) -> StepInputs:
    """The same step over rank `rank`'s KV heads, pools of its own."""
    pools = {
        name: [buffer.chunk(num_ranks, 1)[rank].contiguous() for buffer in getattr(inputs, name)] for name in ("k_buffers", "v_buffers")
    }
    return dataclasses.replace(inputs.clone(), **pools)


def join_outputs(geometry: Geometry, ranks: list[StepOutputs]) -> StepOutputs:
    """A whole step's outputs from its ranks': KV rows and logits side by side, the rest rank 0's."""
    logits = None if ranks[0].logits is None else torch.cat([one.logits for one in ranks], 1)[:, : geometry.vocab]
    k_rows, v_rows = (torch.cat([getattr(one, name) for one in ranks], 2) for name in ("k_rows", "v_rows"))
    return StepOutputs(ranks[0].hidden, k_rows, v_rows, logits, ranks[0].aux)
