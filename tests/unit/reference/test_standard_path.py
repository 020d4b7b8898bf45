"""The bf16 arm rounds where SGLang rounds: its parts are SGLang's bit for bit, its error is that of a bf16 forward."""

import dataclasses

import pytest
import torch

from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference import dense_decode, standard_path
from sgl_lowlatency.reference.gate import compare
from sgl_lowlatency.reference.inputs import cos_sin_table, random_step, random_weights


def random_bf16(*shape, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


@pytest.fixture(scope="module")
def sglang_norm():
    pytest.importorskip("sglang")
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
    norm = RMSNorm(256, eps=1e-6).bfloat16()
    norm.weight.data.copy_(random_bf16(256, seed=1) + 1)
    return norm


@pytest.mark.parametrize("with_residual", [False, True])
def test_norm_is_sglang_bit_for_bit(sglang_norm, with_residual):
    x, residual = random_bf16(5, 256, seed=2, scale=3.0), random_bf16(5, 256, seed=3, scale=3.0)
    if with_residual:
        expected, carried = sglang_norm.forward_native(x.clone(), residual.clone())
    else:
        expected, carried = sglang_norm.forward_native(x.clone()), x
    ours, ours_carried = standard_path.add_rms_norm(x, residual if with_residual else None, sglang_norm.weight.data, 1e-6)
    assert torch.equal(ours, expected)
    assert torch.equal(ours_carried, carried)


def test_rope_is_sglang_bit_for_bit(sglang_norm, monkeypatch):
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.base._is_cpu", True)  # the CUDA branch imports what a CPU has not
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    rotary = RotaryEmbedding(64, 64, 512, 1_000_000, True, torch.float32)
    table = cos_sin_table(512, 64)
    assert torch.allclose(rotary.cos_sin_cache.float(), table, atol=1e-6)
    positions = torch.tensor([0, 1, 63, 400])
    q, k = random_bf16(4, 4 * 64, seed=5), random_bf16(4, 2 * 64, seed=6)
    expected_q, expected_k = rotary.forward_native(positions, q.clone().float(), k.clone().float())
    for x, expected in ((q, expected_q), (k, expected_k)):
        ours = dense_decode.rope(x.view(4, -1, 64).float(), rotary.cos_sin_cache[positions].float())
        assert torch.equal(ours.flatten(1).bfloat16(), expected.bfloat16())


def test_its_error_is_that_of_a_bf16_forward():
    """Against the oracle it is about as far off as Hugging Face's bf16 forward, which rounds more: cos and sin, for one."""
    pytest.importorskip("transformers")
    import transformers_models

    geometry, weights, model = transformers_models.make_model((8, 2, 64, 512, 768, False), torch.bfloat16)
    inputs, other = transformers_models.decode_step(geometry, model, [1, 2, 17, 65, 90, 33], seed=8)
    captured = (1, 2)  # what enters layer 0 is rounded by nobody
    other = dataclasses.replace(other, aux=other.aux[1:])
    oracle = dense_decode.decode_step(geometry, weights, inputs, torch.float64, captured=captured)
    report = compare(other, standard_path.decode_step(geometry, weights, inputs, captured=captured), oracle)
    for figure in report.figures:
        most = 1.5 if figure.output == "v_rows[0]" else 6.0  # no rope on the way to layer 0's v
        assert 0.8 < figure.ours_rel_l2 / figure.standard_rel_l2 < most, str(figure)
        assert 1e-3 < figure.standard_rel_l2 < 2e-2, str(figure)


def test_outputs_are_bf16_and_logits_come_from_a_bf16_gemm():
    geometry = Geometry(2, 128, 2, 1, 64, 128, 512, 8192, 1e-6, False)
    weights, inputs = random_weights(geometry, 9), random_step(geometry, [1, 30], 9)
    head = random_bf16(50, 128, seed=9)
    outputs = standard_path.decode_step(geometry, weights, inputs, head)
    assert outputs.hidden.dtype == outputs.k_rows.dtype == outputs.v_rows.dtype == torch.bfloat16
    assert outputs.logits.dtype == torch.float32
    assert torch.equal(outputs.logits, outputs.logits.bfloat16().float())
