"""Figures of layers that are compared one by one, by hand; what a check without them refuses. Of models: test_self_check_moe.py, test_amd_step.py."""

from __future__ import annotations

import pytest
import torch
from sgl_lowlatency.kernels.decode_step_tensors import RoutingRecord
from sgl_lowlatency.runtime.self_check import SelfCheck
from sgl_lowlatency.runtime.self_check_moe import MOE_FIGURES
from sgl_lowlatency.runtime.self_check_streams import ADDED_L2, ROUNDING_STEP, STREAM_FIGURES, STREAM_L2, stream_errors


def test_figures_of_streams_by_hand():
    ours = torch.tensor([[[1.0, 2.0], [4.0, 2.0]]]).bfloat16()  # [rows, layers, hidden]
    came = [torch.tensor([[1.0, 2.0]]).bfloat16(), torch.tensor([[4.0, 1.0]]).bfloat16()]
    errors = stream_errors(RoutingRecord(torch.zeros(0), torch.zeros(0), ours), came)
    assert errors[STREAM_L2].tolist() == [[0.0], [pytest.approx(1 / 17**0.5)]]
    assert errors[ADDED_L2].tolist() == [[0.0], [pytest.approx((1 - ROUNDING_STEP) / (3**2 + 1) ** 0.5)]]
    near = torch.nextafter(came[1].float(), torch.tensor(9.0)).bfloat16() + torch.tensor([[2**-5, 2**-7]]).bfloat16()  # the next bf16 of each
    ours[0, 1] = near[0]
    errors = stream_errors(RoutingRecord(torch.zeros(0), torch.zeros(0), ours), came)
    assert errors[STREAM_L2][1, 0] > 0.004 and errors[ADDED_L2][1, 0] == 0.0


@pytest.mark.parametrize(("by_layer", "names"), [(False, (*STREAM_FIGURES, *MOE_FIGURES)), (True, MOE_FIGURES)], ids=["whole", "by layer"])
def test_a_bound_on_a_figure_that_a_dense_models_check_has_not_is_refused(serving, by_layer, names):
    for name in names:
        with pytest.raises(ValueError, match=rf"^the self-check has no figure '{name}', only "):
            SelfCheck(serving.model, serving.geometry, serving.weights, {name: 0.1}, by_layer)
