"""Tensors that decode_step reads in place, and the checks they must pass."""

from __future__ import annotations

import dataclasses

import torch

from sgl_lowlatency.kernels.geometry import Geometry


@dataclasses.dataclass(frozen=True)
class LayerTensors:
    """One decoder layer in SGLang's own tensors, bf16, contiguous.

    input_norm, post_norm [hidden]; qkv [(num_q_heads + 2 num_kv_heads) head_dim, hidden], rows q | k | v; qkv_bias [its rows]
    or None; q_norm, k_norm [head_dim] or None; out_proj [hidden, num_q_heads head_dim]; gate_up [2 intermediate, hidden], rows
    gate | up; down [hidden, intermediate].
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out_proj: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None

    def pointers(self) -> list[int]:
        """Addresses in the order of abi::LayerWeights, 0 for what the model does not have."""
        order = (self.input_norm, self.qkv_bias, self.q_norm, self.k_norm, self.post_norm)
        return [0 if tensor is None else tensor.data_ptr() for tensor in order] + [0]  # the last is reserved

    def matrices(self) -> list[tuple[int, int, int, int]]:
        """The fields of abi::WeightMatrix of each weight, in the order of abi::OpIdx; gate_up is two parts."""
        weights = ((self.qkv, 1), (self.out_proj, 1), (self.gate_up, 2), (self.down, 1))
        return [(weight.data_ptr(), *weight.shape, num_parts) for weight, num_parts in weights]


@dataclasses.dataclass(frozen=True)
class DecodeStepWeights:
    """embedding [vocab, hidden] bf16, final_norm [hidden] bf16, cos_sin [max_position, head_dim] fp32 (cos half | sin half)."""

    embedding: torch.Tensor
    final_norm: torch.Tensor
    cos_sin: torch.Tensor
    layers: list[LayerTensors]


_OPTIONAL = ("qkv_bias", "q_norm", "k_norm")  # of a layer: not every family has them


def require_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError naming the tensor unless it has this shape, dtype and device, is contiguous and 16-byte aligned."""
    problems = []
    if tuple(tensor.shape) != shape:
        problems.append(f"shape {tuple(tensor.shape)} is not {shape}")
    if tensor.dtype != dtype:
        problems.append(f"dtype {tensor.dtype} is not {dtype}")
    if tensor.device.type != device.type:
        problems.append(f"device {tensor.device} is not {device}")
    if not tensor.is_contiguous():
        problems.append(f"strides {tuple(tensor.stride())} are not contiguous")
    if dtype in (torch.bfloat16, torch.float32) and tensor.data_ptr() % 16:
        problems.append(f"address {tensor.data_ptr():#x} is not 16-byte aligned")
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))


def require_weights(geometry: Geometry, weights: DecodeStepWeights, device: torch.device) -> None:
    """Raises ValueError naming the first tensor that does not have the geometry's shape, bf16 (cos_sin fp32) and device."""
    g, bf16 = geometry, torch.bfloat16
    q_size, kv_size = g.num_q_heads * g.head_dim, g.num_kv_heads * g.head_dim
    require_tensor("embedding", weights.embedding, (g.vocab, g.hidden), bf16, device)
    require_tensor("final_norm", weights.final_norm, (g.hidden,), bf16, device)
    require_tensor("cos_sin", weights.cos_sin, (g.max_position, g.head_dim), torch.float32, device)
    if len(weights.layers) != g.num_layers:
        raise ValueError(f"layers: {len(weights.layers)} are not the geometry's {g.num_layers}")
    shapes = {
        "input_norm": (g.hidden,),
        "qkv": (q_size + 2 * kv_size, g.hidden),
        "qkv_bias": (q_size + 2 * kv_size,),
        "q_norm": (g.head_dim,),
        "k_norm": (g.head_dim,),
        "out_proj": (g.hidden, q_size),
        "post_norm": (g.hidden,),
        "gate_up": (2 * g.intermediate, g.hidden),
        "down": (g.hidden, g.intermediate),
    }
    for index, layer in enumerate(weights.layers):
        for name, shape in shapes.items():
            tensor = getattr(layer, name)
            if tensor is not None or name not in _OPTIONAL:
                require_tensor(f"layers[{index}].{name}", tensor, shape, bf16, device)
