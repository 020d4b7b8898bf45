"""Tensors that decode_step reads in place, and the checks they must pass."""

from __future__ import annotations

import dataclasses

import torch

from sgl_lowlatency.kernels import abi
from sgl_lowlatency.kernels.geometry import Geometry

MATRICES = ("qkv", "out_proj", "gate_up", "down")  # of a layer, in the order of abi::OpIdx


def spread(blocks: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """blocks [a, b], each element over its part of the matrix."""
    a, b = blocks.shape
    return blocks.repeat_interleave(matrix.shape[0] // a, 0).repeat_interleave(matrix.shape[1] // b, 1)


@dataclasses.dataclass(frozen=True)
class LayerTensors:
    """One decoder layer in SGLang's own tensors, contiguous; bf16, but for matrices in FP8 and their scales.

    input_norm, post_norm [hidden]; qkv [(num_q_heads + 2 num_kv_heads) head_dim, hidden], rows q | k | v; qkv_bias [its rows]
    or None; q_norm, k_norm [head_dim] or None; out_proj [hidden, num_q_heads head_dim]; gate_up [2 intermediate, hidden], rows
    gate | up; down [hidden, intermediate].

    A matrix [N, K] may be float8_e4m3fn; its scale is then float32, of blocks [N / 128, K / 128], or of rows [N].
    All matrices of a model have one format.

    A MoE layer has a router [num_experts, hidden], bf16 always, and the experts' matrices one after the other, SGLang's w13_weight and w2_weight:
    gate_up [num_experts, 2 moe_intermediate, hidden], down [num_experts, hidden, moe_intermediate]; in FP8 their scales are of blocks,
    [num_experts, 2 moe_intermediate / 128, hidden / 128] and [num_experts, hidden / 128, moe_intermediate / 128].
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
    qkv_scale: torch.Tensor | None = None
    out_proj_scale: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    router: torch.Tensor | None = None

    @property
    def format(self) -> str:
        """A name in abi.WEIGHT_FORMATS, as dtype and scale of the first matrix have it."""
        if self.qkv.dtype != torch.float8_e4m3fn:
            return "bf16"
        return "fp8_channel" if self.qkv_scale is not None and self.qkv_scale.dim() == 1 else "fp8_block"

    def fields(self, aux_column: int) -> list[int]:
        """The fields of abi::LayerWeights in its order: addresses, 0 for what the model does not have, and aux_column."""
        order = (self.input_norm, self.qkv_bias, self.q_norm, self.k_norm, self.post_norm)
        return [0 if tensor is None else tensor.data_ptr() for tensor in order] + [aux_column]

    def scale_pointers(self) -> list[int]:
        """Addresses of an FP8 layer's scales, abi::LayerScales."""
        return [getattr(self, f"{name}_scale").data_ptr() for name in MATRICES]

    def matrices(self) -> list[tuple[int, int, int, int, int]]:
        """The fields of abi::WeightMatrix of each weight, in execution order; gate_up is two parts, or two an expert."""
        router, num_experts = ([], 1) if self.router is None else ([(self.router, 1)], self.router.shape[0])
        weights = ((self.qkv, 1), (self.out_proj, 1), *router, (self.gate_up.flatten(0, -2), 2 * num_experts), (self.down.flatten(0, -2), 1))
        return [(weight.data_ptr(), *weight.shape, num_parts, weight.element_size()) for weight, num_parts in weights]

    def dequantized_expert(self, name: str, number: int, dtype: torch.dtype) -> torch.Tensor:
        """One expert's gate_up or down as it is meant, in `dtype`."""
        matrix, scale = getattr(self, name)[number].to(dtype), getattr(self, f"{name}_scale")
        return matrix if scale is None else matrix * spread(scale[number].to(dtype), matrix)

    def dequantized(self, name: str, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
        """The matrix, or some of its rows, as it is meant, in `dtype`: elements times their scales, if it is FP8."""
        matrix, scale = getattr(self, name), getattr(self, f"{name}_scale")
        weight = matrix[rows].to(dtype)
        if scale is None:
            return weight
        if scale.dim() == 1:
            return weight * scale[rows].to(dtype)[:, None]
        blocks = torch.arange(matrix.shape[0], device=scale.device)[rows] // abi.SCALE_BLOCK
        return weight * scale[blocks].to(dtype).repeat_interleave(abi.SCALE_BLOCK, 1)


@dataclasses.dataclass(frozen=True)
class DecodeStepWeights:
    """embedding [vocab, hidden] bf16, final_norm [hidden] bf16, cos_sin [max_position, head_dim] fp32 (cos half | sin half).

    lm_head: bf16 [rows, hidden], or None: the step ends at the final norm. Its first vocab rows count; it has at least a whole number
    of tiles of abi.TILE_ROWS rows, padding that is read and dropped included.
    """

    embedding: torch.Tensor
    final_norm: torch.Tensor
    cos_sin: torch.Tensor
    layers: list[LayerTensors]
    lm_head: torch.Tensor | None = None

    def matrices(self) -> list[tuple[int, int, int, int, int]]:
        """The fields of abi::WeightMatrix of every layer's weights, then of the LM head."""
        head = [] if self.lm_head is None else [(self.lm_head.data_ptr(), *self.lm_head.shape, 1, self.lm_head.element_size())]
        return [matrix for layer in self.layers for matrix in layer.matrices()] + head

    @property
    def format(self) -> str:
        """Of the layers' matrices, a name in abi.WEIGHT_FORMATS."""
        return self.layers[0].format

    @property
    def element_bytes(self) -> int:
        """Of a weight of a layer's matrix: 2 bf16, 1 FP8."""
        return self.layers[0].qkv.element_size()


@dataclasses.dataclass(frozen=True)
class RoutingRecord:
    """What the MoE layers of a step routed, for whoever checks or counts it. ids: int32 [layers, rows, top_k], each row's experts by rank, -1 of rows
    that pad the step. logits: bf16 [layers, rows, num_experts], what was ranked. streams: bf16 [rows, layers, hidden], the residual stream that
    entered each layer, or None: not asked for."""

    ids: torch.Tensor
    logits: torch.Tensor
    streams: torch.Tensor | None = None

    @classmethod
    def empty(cls, geometry: Geometry, rows: int, device: torch.device, with_streams: bool = False) -> RoutingRecord:
        """Memory for a step's record, with nothing in it that a row of a request leaves: ids of -1, logits and streams of NaN."""
        g = geometry

        def nans(*shape: int) -> torch.Tensor:
            return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)

        ids = torch.full((g.num_layers, rows, g.top_k), -1, dtype=torch.int32, device=device)
        return cls(ids, nans(g.num_layers, rows, g.num_experts), nans(rows, g.num_layers, g.hidden) if with_streams else None)


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
    if dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn) and tensor.data_ptr() % 16:
        problems.append(f"address {tensor.data_ptr():#x} is not 16-byte aligned")
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))


def require_weights(geometry: Geometry, weights: DecodeStepWeights, device: torch.device) -> None:
    """Raises ValueError naming the first tensor that does not have the geometry's shape, dtype and device.

    The dtype is bf16; of cos_sin and scales fp32; of matrices bf16 or float8_e4m3fn, all as the first layer's qkv.
    """
    g, bf16 = geometry, torch.bfloat16
    q_size, kv_size = g.num_q_heads * g.head_dim, g.num_kv_heads * g.head_dim
    experts = (g.num_experts,) if g.is_moe else ()
    require_tensor("embedding", weights.embedding, (g.vocab, g.hidden), bf16, device)
    require_tensor("final_norm", weights.final_norm, (g.hidden,), bf16, device)
    require_tensor("cos_sin", weights.cos_sin, (g.max_position, g.head_dim), torch.float32, device)
    if (head := weights.lm_head) is not None:
        rows = head.shape[0]
        if rows < g.vocab or rows % abi.TILE_ROWS:
            raise ValueError(f"lm_head: {rows} rows do not hold a vocabulary of {g.vocab} in tiles of {abi.TILE_ROWS} rows")
        require_tensor("lm_head", head, (rows, g.hidden), bf16, device)
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
        "gate_up": (*experts, 2 * g.mlp_channels, g.hidden),
        "down": (*experts, g.hidden, g.mlp_channels),
    }
    weight_format = weights.format
    if g.is_moe and weight_format == "fp8_channel":
        raise ValueError("layers[0].qkv_scale: MoE layers have scales of blocks, not of rows")
    for index, layer in enumerate(weights.layers):
        for name, shape in shapes.items():
            tensor = getattr(layer, name)
            is_fp8 = name in MATRICES and weight_format != "bf16"
            if tensor is not None or name not in _OPTIONAL:
                require_tensor(f"layers[{index}].{name}", tensor, shape, torch.float8_e4m3fn if is_fp8 else bf16, device)
            if name in MATRICES:
                _require_scale(f"layers[{index}].{name}_scale", getattr(layer, f"{name}_scale"), shape, weight_format, device)
        if g.is_moe and layer.router is not None:
            require_tensor(f"layers[{index}].router", layer.router, (g.num_experts, g.hidden), bf16, device)
        elif g.is_moe or layer.router is not None:
            raise ValueError(f"layers[{index}].router: {'missing, the layers are MoE layers' if g.is_moe else 'a dense layer has none'}")


def _require_scale(name: str, scale: torch.Tensor | None, matrix: tuple[int, ...], weight_format: str, device: torch.device) -> None:
    if weight_format == "bf16":
        if scale is not None:
            raise ValueError(f"{name}: a bf16 matrix has none")
        return
    if scale is None:
        raise ValueError(f"{name}: missing, the matrix is float8_e4m3fn")
    blocks = (*matrix[:-2], *(size // abi.SCALE_BLOCK for size in matrix[-2:]))  # no remainder: Geometry.reasons
    require_tensor(name, scale, blocks if weight_format == "fp8_block" else matrix[:1], torch.float32, device)
