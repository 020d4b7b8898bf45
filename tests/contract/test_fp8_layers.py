"""FP8 linear layers by SGLang's own Fp8LinearMethod, as it leaves them after loading on Hopper: the guard takes them, and the build's
views dequantise to what the checkpoint meant. SGLang does not run FP8 on a CPU without AMX, so its platform's flags are replaced, and of
its GPU kernels the one that quantises a bf16 checkpoint.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

fp8 = pytest.importorskip("sglang.srt.layers.quantization.fp8")

from sgl_lowlatency.build.weights import matrix, mlp_tensors  # noqa: E402
from sgl_lowlatency.guard.linear import linear_reasons, weight_format  # noqa: E402
from sgl_lowlatency.kernels.decode_step_tensors import LayerTensors  # noqa: E402

PARTS, K = [256, 128, 128], 384  # rows of q, k and v
N = sum(PARTS)


def quantise_rows(weight, group):
    """What per_token_group_quant_fp8 returns for a group of all columns."""
    assert group == weight.shape[-1]
    scale = weight.float().abs().amax(-1, keepdim=True) / 448
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


def load(config, fill):
    """A layer that SGLang's method made, `fill` wrote as the loader would, and the method finished."""
    with (
        mock.patch.object(fp8, "_is_cpu", False),
        mock.patch.object(fp8, "cutlass_fp8_supported", lambda: True),
        mock.patch.object(fp8, "get_device_capability", lambda *_: (9, 0)),
        mock.patch.object(fp8, "dispatch_w8a8_block_fp8_linear", lambda **_: None),
        mock.patch.object(fp8, "per_token_group_quant_fp8", quantise_rows),
    ):
        layer = torch.nn.Module()
        layer.tp_group, layer.deepgemm_mxfp8_input, layer.bias = None, False, None
        layer.quant_method = fp8.Fp8LinearMethod(config)
        layer.quant_method.create_weights(layer, K, PARTS, K, N, torch.bfloat16, weight_loader=lambda *_: None)
        fill(layer)
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def codes():
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)).mul(60).to(torch.float8_e4m3fn)


def load_block():
    scale = torch.rand(N // 128, K // 128, generator=torch.Generator().manual_seed(1)) + 0.1

    def fill(layer):
        layer.weight.data.copy_(codes())
        layer.weight_scale_inv.data.copy_(scale)

    meant = codes().double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return load(fp8.Fp8Config(True, "dynamic", weight_block_size=[128, 128]), fill), meant


def load_per_tensor():
    scale = torch.tensor([0.5, 1.25, 3.0])  # of q, k and v

    def fill(layer):
        layer.weight.data.copy_(codes())
        layer.weight_scale.data.copy_(scale)

    return load(fp8.Fp8Config(True, "dynamic"), fill), codes().double() * scale.double().repeat_interleave(torch.tensor(PARTS))[:, None]


def load_online():
    weight = (torch.randn(N, K, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.1, 3, N)[:, None]).bfloat16()
    quantised, scale = quantise_rows(weight, K)
    return load(fp8.Fp8Config(False, "dynamic"), lambda layer: layer.weight.data.copy_(weight)), quantised.double() * scale.double()


LOADS = {"fp8_block": load_block, "fp8_channel": load_per_tensor, "fp8_channel, online": load_online}


@pytest.mark.parametrize("case", LOADS)
def test_views_dequantise_to_what_the_checkpoint_meant(case):
    layer, meant = LOADS[case]()
    expected = case.split(",")[0]
    assert weight_format(layer) == expected
    assert list(linear_reasons("qkv_proj", layer, (N, K), expected)) == []
    views = matrix("qkv", layer)
    assert views["qkv"].data_ptr() == layer.weight.data_ptr() and views["qkv"].is_contiguous()
    scale = layer.weight_scale_inv if expected == "fp8_block" else layer.weight_scale
    assert views["qkv_scale"].data_ptr() == scale.data_ptr() and views["qkv_scale"].is_contiguous()
    tensors = LayerTensors(*[None] * 8)
    for name, tensor in views.items():
        object.__setattr__(tensors, name, tensor)
    assert tensors.format == expected
    assert torch.equal(tensors.dequantized("qkv", torch.float64), meant)


EXPERTS, HIDDEN, CHANNELS = 4, 256, 128


def load_experts(weight_block_size):
    """(experts, w13 and w2 as the checkpoint meant them): made by SGLang's method for experts, filled as the loader would."""
    generator = torch.Generator().manual_seed(3)
    experts = torch.nn.Module()
    experts.moe_tp_size, experts.moe_ep_size, experts.moe_runner_config = 1, 1, SimpleNamespace(is_gated=True)
    config = fp8.Fp8Config(True, "dynamic", weight_block_size=weight_block_size)
    with mock.patch.object(fp8, "_is_cpu", False), mock.patch.object(fp8, "cutlass_fp8_supported", lambda: True):
        method = fp8.Fp8MoEMethod(config)
        method.create_weights(experts, EXPERTS, HIDDEN, CHANNELS, torch.bfloat16, weight_loader=lambda *_: None)
        meant = {}
        for name, shape in (("w13", (EXPERTS, 2 * CHANNELS, HIDDEN)), ("w2", (EXPERTS, HIDDEN, CHANNELS))):
            values = torch.randn(shape, generator=generator).mul(60).to(torch.float8_e4m3fn)
            getattr(experts, f"{name}_weight").data.copy_(values)
            if weight_block_size is not None:
                scale = getattr(experts, f"{name}_weight_scale_inv")
                scale.data.copy_(torch.rand(scale.shape, generator=generator) + 0.1)
                meant[name] = values.double() * scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        method.runner = SimpleNamespace(runner_backend=SimpleNamespace(value="triton", is_aiter=lambda: False))
        method.process_weights_after_loading(experts)
    experts.quant_method = method
    return experts, meant


def test_experts_views_dequantise_to_what_the_checkpoint_meant():
    experts, meant = load_experts([128, 128])
    geometry = SimpleNamespace(is_moe=True)
    router = torch.nn.Module()
    router.weight = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN), requires_grad=False)
    fields = mlp_tensors(SimpleNamespace(gate=router, experts=experts), geometry)
    tensors = LayerTensors(*[None] * 8)
    for name, tensor in fields.items():
        object.__setattr__(tensors, name, tensor)
    for ours, theirs in (("gate_up", "w13"), ("down", "w2")):
        assert fields[ours].data_ptr() == getattr(experts, f"{theirs}_weight").data_ptr() and fields[ours].is_contiguous()
        assert fields[f"{ours}_scale"].data_ptr() == getattr(experts, f"{theirs}_weight_scale_inv").data_ptr()
        for expert in range(EXPERTS):
            assert torch.equal(tensors.dequantized_expert(ours, expert, torch.float64), meant[theirs][expert])


def reasons_of(layer, expected="fp8_block"):
    return list(linear_reasons("qkv_proj", layer, (N, K), expected))


def test_a_static_scale_of_activations_is_named():
    def fill(layer):
        layer.weight.data.copy_(codes())
        layer.weight_scale.data.fill_(1.0)
        layer.input_scale.data.fill_(0.5)

    (reason,) = reasons_of(load(fp8.Fp8Config(True, "static"), fill), "fp8_channel")
    assert reason == "qkv_proj.input_scale is a static scale of activations: SGLang would clip them, the kernel does not"


def set_method(name, value):
    def change(layer):
        setattr(layer.quant_method, name, value)

    return change


def set_ue8m0(layer):
    layer.weight_scale_inv.format_ue8m0 = True


def set_packed_scale(layer):
    layer.weight_scale_inv.data = layer.weight_scale_inv.data.view(torch.int32)


def set_shuffled(layer):
    layer.weight.data = layer.weight.data.T


def set_unquantised(layer):
    layer.quant_method = type("UnquantizedLinearMethod", (), {})()
    layer.weight.data = torch.zeros(N, K, dtype=torch.bfloat16)


DEFECTS = {
    "marlin": (set_method("use_marlin", True), ["qkv_proj runs FP8 Marlin kernels, whose weights are repacked"]),
    "mxfp8": (set_method("use_mxfp8", True), ["qkv_proj holds MXFP8 weights"]),
    "as mxfp8": (set_method("block_fp8_as_mxfp8", True), ["qkv_proj holds MXFP8 weights"]),
    "block": (set_method("weight_block_size", [64, 128]), ["qkv_proj has a scale a block of [64, 128], not [128, 128]"]),
    "ue8m0": (set_ue8m0, ["qkv_proj.weight_scale_inv was rounded to powers of two for DeepGEMM, which has not been tested"]),
    "packed scale": (set_packed_scale, ["qkv_proj.weight_scale_inv is int32, not float32"]),
    "transposed": (set_shuffled, [f"qkv_proj.weight has shape [{K}, {N}], not [{N}, {K}]", "qkv_proj.weight is not contiguous"]),
    "bf16 among fp8": (
        set_unquantised,
        ["qkv_proj runs UnquantizedLinearMethod, not Fp8LinearMethod", "qkv_proj.weight is bfloat16, not float8_e4m3fn"],
    ),
    "other scales": (
        set_method("block_quant", False), ["qkv_proj has scales of format fp8_channel, not fp8_block"],
    ),
}


@pytest.mark.parametrize("case", DEFECTS)
def test_one_defect_is_named(case):
    change, expected = DEFECTS[case]
    layer, _ = load_block()
    change(layer)
    assert reasons_of(layer) == expected


def test_scales_of_another_shape_are_named():
    layer, _ = load_per_tensor()
    layer.weight_scale.data = layer.weight_scale.data[:3]
    assert reasons_of(layer, "fp8_channel") == [f"qkv_proj.weight_scale has shape [3, 1], not one scale for each of {N} rows"]
