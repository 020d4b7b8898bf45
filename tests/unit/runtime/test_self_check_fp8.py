"""The self-check of FP8 weights: ours against SGLang's forward with exact products, SGLang's own rounding beside it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sgl_lowlatency.build.weights import collect_weights
from sgl_lowlatency.kernels.decode_step_tensors import MATRICES
from sgl_lowlatency.runtime import exact_linears
from sgl_lowlatency.runtime.exact_linears import ExactLinear
from sgl_lowlatency.runtime.self_check import FIGURES, SGLANG_FP8_FIGURE, SelfCheck
from tiny_serving import TOLERANCES

FORMATS = ("fp8_block", "fp8_channel")
PLANTED = {
    "off-by-one page": 4, "wrong kv head": 5, "skipped norm": 6, "wrong rope": 7, "mask off by one": 8, "wrong scale block": 13,
    "gate's scale for up": 14,
}


def run(serving, ours, rows, weights=None):
    """weights: what the check takes the model's to be; else what the build collects from SGLang's layers."""
    weights = weights or collect_weights(serving.model, serving.geometry)
    return SelfCheck(serving.model, serving.geometry, weights, TOLERANCES).run(serving.standard, ours, serving.batch(rows), serving.kv)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_kernel_passes(make_serving, weight_format, rows):
    serving = make_serving(num_slots=8192, weight_format=weight_format)
    report = run(serving, serving.kernel(rows=rows), rows)
    assert report.misses == [], str(report)
    assert set(report.figures) == {*FIGURES, SGLANG_FP8_FIGURE} and set(report.sglang_fp8) == set(FIGURES)
    assert all(0 < 3 * report.figures[name] < report.sglang_fp8[name] for name in FIGURES), str(report)
    assert "SGLang's own FP8 activations: " in str(report)


@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_planted_bug_fails(make_serving, weight_format, bug):
    if (weight_format, bug) == ("fp8_channel", "wrong scale block"):
        pytest.skip("a row has one scale")
    serving = make_serving(weight_format=weight_format)
    report = run(serving, serving.kernel(PLANTED[bug], rows=1), 1)
    assert report.misses, f"{bug} passed: {report}"
    # by twice the bound or more (or a NaN), so that the verdict does not hang on a rounding
    assert any(not report.figures[name] <= 2 * TOLERANCES[name] for name in FIGURES), str(report)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_weights_that_we_misread_alike_in_kernel_and_check_fail(make_serving, weight_format, name):
    """Scales four times SGLang's: ours and the exact forward agree, SGLang's own does not."""
    serving = make_serving(weight_format=weight_format)
    wrong = dataclasses.replace(serving.weights, layers=[
        dataclasses.replace(layer, **{f"{name}_scale": getattr(layer, f"{name}_scale") * 4}) for layer in serving.weights.layers
    ])

    def sglang(input_ids, positions, forward_batch):
        """The exact forward is the misread weights'."""
        is_exact = isinstance(serving.model.model.layers[0].mlp.down_proj.quant_method, ExactLinear)
        right, serving.weights = serving.weights, wrong if is_exact else serving.weights
        try:
            return serving.standard(input_ids, positions, forward_batch)
        finally:
            serving.weights = right

    def ours(input_ids, positions, forward_batch):
        right, serving.weights = serving.weights, wrong
        try:
            return kernel(input_ids, positions, forward_batch)
        finally:
            serving.weights = right

    right, serving.weights = serving.weights, wrong
    kernel = serving.kernel(rows=2)
    serving.weights = right
    report = SelfCheck(serving.model, serving.geometry, wrong, TOLERANCES).run(sglang, ours, serving.batch(2), serving.kv)
    assert [miss.split()[0] for miss in report.misses] == [SGLANG_FP8_FIGURE], str(report)


def test_sglangs_methods_are_put_back(make_serving):
    serving = make_serving(weight_format="fp8_block")
    linear = serving.model.model.layers[1].mlp.down_proj
    seen = []

    def fails(input_ids, positions, forward_batch):
        seen.append(linear.quant_method)
        if isinstance(linear.quant_method, ExactLinear):
            raise RuntimeError("out of memory")
        return serving.standard(input_ids, positions, forward_batch)

    with pytest.raises(RuntimeError, match="out of memory"):
        SelfCheck(serving.model, serving.geometry, serving.weights, TOLERANCES).run(fails, serving.standard, serving.batch(1), serving.kv)
    assert len(seen) == 2 and linear.quant_method == "SGLang's own"


@pytest.mark.parametrize("weight_format", FORMATS)
def test_an_exact_linear_is_the_product_with_the_dequantised_weight(make_serving, weight_format, monkeypatch):
    """Oracle: float64. Chunks of rows that cut blocks of the scales change nothing."""
    tensors = make_serving(weight_format=weight_format).weights.layers[0]
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(3, 128, generator=generator).bfloat16(), torch.randn(256, generator=generator).bfloat16()
    expected = x.double() @ tensors.dequantized("gate_up", torch.float64).T + bias.double()
    for chunk_rows in (2048, 100):
        monkeypatch.setattr(exact_linears, "CHUNK_ROWS", chunk_rows)
        y = ExactLinear(tensors, "gate_up").apply(None, x, bias)
        assert y.dtype == torch.bfloat16 and float((y.double() - expected).norm() / expected.norm()) < 2**-8
    with pytest.raises(RuntimeError, match="gate_up got an input that is quantised"):
        ExactLinear(tensors, "gate_up").apply(None, (x, bias))
