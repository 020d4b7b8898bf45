"""SGLang's forward on the FP8 weights as they are meant: every linear layer and expert with its dequantised weight and unrounded activations.

SGLang's own FP8 layers round their input to FP8 too: after 36 layers that moves logits by a third, which would hide a wrong page or mask.
So the self-check compares the kernel to this forward, all of which but the matrix products is SGLang's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors

CHUNK_ROWS = 2048  # of a matrix, dequantised at a time: the server's memory is taken when the check runs


class ExactLinear:
    """Stands for the quant_method of one of SGLang's linear layers (sglang 0.5.23: `quant_method.apply(layer, x, bias)`)."""

    def __init__(self, tensors: LayerTensors, name: str):
        self._tensors, self._name = tensors, name

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., N] in x's dtype, of x [..., K]: float32 sums. Raises RuntimeError for an input that is quantised already."""
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.element_size() < 2:
            raise RuntimeError(f"{self._name} got an input that is quantised before it: the self-check cannot run it unrounded")
        num_rows, out = getattr(self._tensors, self._name).shape[0], []
        for begin in range(0, num_rows, CHUNK_ROWS):
            rows = slice(begin, min(begin + CHUNK_ROWS, num_rows))
            out.append(x.float() @ self._tensors.dequantized(self._name, torch.float32, rows).T)
        y = torch.cat(out, dim=-1)
        return (y if bias is None else y + bias.float()).to(x.dtype)


class ExactExperts:
    """Stands for the forward of SGLang's experts of a layer (sglang 0.5.23: `experts(hidden_states, topk_output)`): rounded to bf16 where its
    unquantised experts are, each expert's gate and up, its activation, its weighted output, their sum."""

    def __init__(self, tensors: LayerTensors):
        self._tensors = tensors

    def __call__(self, hidden_states: torch.Tensor, topk_output: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """bf16 [rows, hidden] of bf16 [rows, hidden]. topk_output: ids and weights [rows, top_k]; an id of -1 adds nothing."""
        ids, weights = topk_output.topk_ids.long(), topk_output.topk_weights.float()
        outputs = torch.zeros(*ids.shape, hidden_states.shape[-1], dtype=hidden_states.dtype, device=hidden_states.device)
        for expert in ids[ids >= 0].unique().tolist():
            rows, ranks = (ids == expert).nonzero(as_tuple=True)
            gate, up = self._product(hidden_states[rows], "gate_up", expert).to(hidden_states.dtype).float().chunk(2, dim=-1)
            activation = (torch.nn.functional.silu(gate) * up).to(hidden_states.dtype)
            outputs[rows, ranks] = (self._product(activation, "down", expert) * weights[rows, ranks, None]).to(hidden_states.dtype)
        return outputs.float().sum(1).to(hidden_states.dtype)

    def _product(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        return x.float() @ self._tensors.dequantized_expert(name, expert, torch.float32).T


@contextmanager
def exact_linears(model: torch.nn.Module, weights: DecodeStepWeights) -> Iterator[None]:
    """Puts an ExactLinear into every FP8 linear layer of the model's decoder and ExactExperts before its experts, and SGLang's own back."""
    kept, experts = [], []
    for module, tensors in zip(model.model.layers, weights.layers, strict=True):
        attention, mlp = module.self_attn, module.mlp
        linears = [("qkv", attention.qkv_proj), ("out_proj", attention.o_proj)]
        if tensors.router is None:
            linears += [("gate_up", mlp.gate_up_proj), ("down", mlp.down_proj)]
        else:
            experts.append((mlp.experts, vars(mlp.experts).get("forward"), ExactExperts(tensors)))
        kept += [(linear, linear.quant_method, ExactLinear(tensors, name)) for name, linear in linears]
    try:
        for linear, _, exact in kept:
            linear.quant_method = exact
        for of_layer, _, exact in experts:
            of_layer.forward = exact
        yield
    finally:
        for linear, method, _ in kept:
            linear.quant_method = method
        for of_layer, own, _ in experts:
            vars(of_layer).pop("forward", None)
            if own is not None:
                of_layer.forward = own
