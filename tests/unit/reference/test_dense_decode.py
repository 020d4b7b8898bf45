"""The oracle equals Hugging Face's models in float32: hidden, logits, K/V rows and the stream between layers of a decode step."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers_models  # noqa: E402
from tiny_geometries import FAMILIES  # noqa: E402

from sgl_lowlatency.kernels.decode_step_tensors import DecodeStepWeights, LayerTensors  # noqa: E402
from sgl_lowlatency.kernels.geometry import Geometry  # noqa: E402
from sgl_lowlatency.reference import dense_decode  # noqa: E402
from sgl_lowlatency.reference.inputs import random_step, random_weights  # noqa: E402
from sgl_lowlatency.reference.step import StepInputs  # noqa: E402

# (q heads, kv heads, head_dim, hidden, intermediate, tied): hidden is not q heads x head_dim, as in Qwen3-0.6B and 32B
SHAPES = [(4, 2, 64, 192, 320, False), (8, 1, 128, 128, 192, True), (5, 5, 64, 320, 256, False)]


def float32(weights: DecodeStepWeights) -> DecodeStepWeights:
    wide = [{name: tensor if tensor is None else tensor.float() for name, tensor in vars(layer).items()} for layer in weights.layers]
    layers = [LayerTensors(**tensors) for tensors in wide]
    return DecodeStepWeights(weights.embedding.float(), weights.final_norm.float(), weights.cos_sin, layers)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_oracle_is_transformers(shape, family):
    geometry, weights, model = transformers_models.make_model(shape, torch.float32, family)
    inputs, expected = transformers_models.decode_step(geometry, model, [1, 2, 17, 65], seed=7)
    ours = dense_decode.decode_step(geometry, float32(weights), inputs, torch.float32, model.lm_head.weight.detach(), captured=range(3))
    for name in ("hidden", "k_rows", "v_rows", "logits", "aux"):
        actual, wanted = getattr(ours, name), getattr(expected, name)
        assert actual.shape == wanted.shape
        assert float((actual - wanted).abs().max() / wanted.abs().max()) < 1e-5, name


def test_float64_and_float32_oracle_agree():
    geometry = Geometry(3, 256, 4, 2, 64, 384, 512, 8192, 1e-6, False)
    weights = random_weights(geometry, 3)
    inputs = random_step(geometry, [1, 65, 1000], 3)
    high, low = (dense_decode.decode_step(geometry, weights, inputs, dtype) for dtype in (torch.float64, torch.float32))
    for name in ("hidden", "k_rows", "v_rows"):
        a, b = getattr(high, name), getattr(low, name)
        assert a.dtype == torch.float64 and b.dtype == torch.float32
        assert float((a - b).norm() / a.norm()) < 1e-5, name


@pytest.mark.parametrize("rows_per_request", [2, 5])
def test_a_verify_step_is_as_many_decode_steps(rows_per_request):
    """Each new token through a decode step of its own, whose KV row the next one finds in the pool, in float64."""
    geometry = Geometry(2, 128, 4, 2, 64, 128, 512, 8192, 1e-6, False)
    weights = random_weights(geometry, 6)
    verify = random_step(geometry, [0, 1, 65], 6, rows_per_request=rows_per_request, lengths_are_prefix=True)
    outputs = dense_decode.decode_step(geometry, weights, verify)
    k_buffers, v_buffers = ([buffer.double() for buffer in buffers] for buffers in (verify.k_buffers, verify.v_buffers))
    for t in range(rows_per_request):
        rows = slice(t, None, rows_per_request)
        step = StepInputs(
            verify.input_ids[rows], verify.positions[rows], verify.seq_lens + t + 1, verify.req_pool_indices, verify.out_cache_loc[rows],
            verify.req_to_token, k_buffers, v_buffers,
        )
        alone = dense_decode.decode_step(geometry, weights, step)
        for layer in range(geometry.num_layers):
            k_buffers[layer][step.out_cache_loc], v_buffers[layer][step.out_cache_loc] = alone.k_rows[layer], alone.v_rows[layer]
        torch.testing.assert_close(outputs.hidden[rows], alone.hidden, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(outputs.k_rows[:, rows], alone.k_rows, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(outputs.v_rows[:, rows], alone.v_rows, rtol=1e-10, atol=1e-10)


def test_the_pool_is_only_read():
    geometry = Geometry(1, 128, 2, 2, 64, 128, 512, 8192, 1e-6, False)
    inputs = random_step(geometry, [5, 9], 4)
    before = inputs.clone()
    dense_decode.decode_step(geometry, random_weights(geometry, 4), inputs)
    for kind in ("k_buffers", "v_buffers"):
        assert torch.equal(getattr(inputs, kind)[0].view(torch.int16), getattr(before, kind)[0].view(torch.int16))
