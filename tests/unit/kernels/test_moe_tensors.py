"""Tensors of MoE layers: SGLang's own shapes are taken, others are refused by name."""

import dataclasses

import pytest
import torch

from sgl_lowlatency.kernels.decode_step_tensors import require_weights
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference.inputs import random_weights

MOE = Geometry(1, 128, 2, 1, 64, 64, 512, 64, 1e-6, False, num_experts=16, top_k=2, moe_intermediate=192, norm_topk_prob=True)
DENSE = Geometry(1, 128, 2, 1, 64, 64, 512, 64, 1e-6, False)
CPU = torch.device("cpu")


def with_layer(weights, **changes):
    return dataclasses.replace(weights, layers=[dataclasses.replace(weights.layers[0], **changes)])


def test_matrices_are_maps_in_execution_order():
    layer = random_weights(MOE, 1).layers[0]
    assert [matrix[1:] for matrix in layer.matrices()] == [
        (256, 128, 1, 2), (128, 128, 1, 2), (16, 128, 1, 2),
        (16 * 2 * 192, 128, 32, 2),  # gate and up of every expert, a part each
        (16 * 128, 192, 1, 2),
    ]
    assert [matrix[0] for matrix in layer.matrices()[2:]] == [layer.router.data_ptr(), layer.gate_up.data_ptr(), layer.down.data_ptr()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router": None}, r"layers\[0\].router: missing, the layers are MoE layers"),
        ({"router": torch.zeros(8, 128, dtype=torch.bfloat16)}, r"layers\[0\].router: shape \(8, 128\) is not \(16, 128\)"),
        ({"router": torch.zeros(16, 128)}, r"layers\[0\].router: dtype torch.float32 is not torch.bfloat16"),
        ({"gate_up": torch.zeros(384, 128, dtype=torch.bfloat16)}, r"layers\[0\].gate_up: shape \(384, 128\) is not \(16, 384, 128\)"),
        ({"down": torch.zeros(16, 192, 128, dtype=torch.bfloat16)}, r"layers\[0\].down: shape \(16, 192, 128\) is not \(16, 128, 192\)"),
        ({"down": torch.zeros(16, 192, 128, dtype=torch.bfloat16).transpose(1, 2)}, r"layers\[0\].down: strides .* are not contiguous"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(changes, message):
    weights = random_weights(MOE, 1)
    require_weights(MOE, weights, CPU)
    with pytest.raises(ValueError, match=message):
        require_weights(MOE, with_layer(weights, **changes), CPU)


def test_a_dense_layer_has_no_router():
    weights = random_weights(DENSE, 1)
    require_weights(DENSE, weights, CPU)
    with pytest.raises(ValueError, match=r"layers\[0\].router: a dense layer has none"):
        require_weights(DENSE, with_layer(weights, router=torch.zeros(16, 128, dtype=torch.bfloat16)), CPU)
