"""Refusals of a DeepSeek-V4.1 layer's hyper-connections, by the slices that are to be ours, and what is collected of them. Oracle: the texts; the
tensors themselves."""

import pytest

torch = pytest.importorskip("torch")

from attention_stand_ins import decoder_layer  # noqa: E402
from moe_stand_ins import DeepseekV2MoE  # noqa: E402

from sgl_lowlatency.build.hyper_connection import collect_hyper_connection  # noqa: E402
from sgl_lowlatency.guard import hyper_connection as guard  # noqa: E402
from sgl_lowlatency.guard.deepseek_v4 import layer_reasons  # noqa: E402
from sgl_lowlatency.kernels import hyper_connection as kernel  # noqa: E402


def layer_with(**fields):
    layer = decoder_layer()
    layer.mlp = DeepseekV2MoE(hidden=256)
    for name, value in fields.items():
        setattr(layer.hc_cfg if hasattr(layer.hc_cfg, name) else layer, name, value)
    return layer


def test_what_is_served_has_no_reason_and_is_what_the_kernels_take():
    layer = layer_with()
    assert list(guard.layer_reasons(layer)) == []
    for sublayer in ("attn", "ffn"):
        assert list(guard.sublayer_reasons(layer, sublayer)) == []
        found = collect_hyper_connection(layer, sublayer)
        found.require(256, torch.device("cpu"))
        for own, part in ((found.mix, "fn"), (found.mix_scale, "scale"), (found.mix_base, "base")):
            assert own.data_ptr() == getattr(layer, f"hc_{sublayer}_{part}").data_ptr()
        assert (found.sinkhorn_iterations, found.mix_eps, found.mix_rms_eps) == (20, 1e-6, 1e-20)
    assert list(layer_reasons(layer, ("attention_in", "attention_out", "moe"))) == []


@pytest.mark.parametrize(("fields", "reason"), [
    ({"mult": 2}, "mHC has 2 streams, not 4"), ({"sinkhorn_iters": 0}, "mHC has 0 Sinkhorn iterations"),
    ({"eps": -1e-6}, "mHC has eps -1e-06, which is negative or no number"),
    ({"rms_eps": float("nan")}, "mHC has rms_eps nan, which is negative or no number"),
    ({"boundary_pre_from_prev": False}, "the combine does not take the pre of the sublayer in front: a layer of DeepSeek-V4, or of V4.1's MTP"),
])  # fmt: skip
def test_what_they_have_alike(fields, reason):
    assert list(guard.layer_reasons(layer_with(**fields))) == [reason]


@pytest.mark.parametrize(("fields", "reason"), [
    ({"hc_ffn_fn": torch.zeros(24, 512)}, "hc_ffn_fn has shape [24, 512], not [24, 1024]"),
    ({"hc_ffn_fn": torch.zeros(24, 1024).bfloat16()}, "hc_ffn_fn is bfloat16, not float32"),
    ({"hc_ffn_scale": torch.zeros(1)}, "hc_ffn_scale has shape [1], not [3]"), ({"hc_ffn_base": None}, "hc_ffn_base is missing"),
])  # fmt: skip
def test_the_moes_are_asked_for_where_its_post_is_ours(fields, reason):
    layer = layer_with(**fields)
    assert list(guard.sublayer_reasons(layer, "ffn")) == [reason] and list(guard.sublayer_reasons(layer, "attn")) == []
    for slices in (("attention_in", "attention_out", "moe"), ("attention_out", "moe")):
        assert list(layer_reasons(layer, slices)) == [reason]
    for slices in (("attention_in", "attention_out"), ("attention_in", "moe"), ("moe",)):
        assert list(layer_reasons(layer, slices)) == []


def test_the_limits_are_the_kernels():
    assert (guard.STREAMS, guard.MIXES) == (kernel.STREAMS, kernel.MIXES)
