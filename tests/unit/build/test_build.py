"""The build reads SGLang's tensors in place, knows its device, and reports slow work only."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from tiny_geometries import FAMILIES

from sgl_lowlatency import config
from sgl_lowlatency.build import device_limits, progress
from sgl_lowlatency.build.weights import collect_weights
from sgl_lowlatency.kernels.decode_step_tensors import LayerTensors
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.reference.inputs import random_weights

GEOMETRY = Geometry(
    num_layers=2, hidden=128, num_q_heads=4, num_kv_heads=2, head_dim=64, intermediate=192, vocab=96, max_position=64,
    rms_eps=1e-6, tied_head=True,
)


def weight(tensor):
    return SimpleNamespace(weight=torch.nn.Parameter(tensor, requires_grad=False))


def sglang_model(weights, padded_vocab):
    """A stand-in with the attributes of SGLang's Qwen3ForCausalLM, its embedding padded as SGLang pads it."""
    embedding = torch.cat([weights.embedding, torch.zeros(padded_vocab - GEOMETRY.vocab, GEOMETRY.hidden).bfloat16()])
    layers = [
        SimpleNamespace(
            input_layernorm=weight(layer.input_norm),
            post_attention_layernorm=weight(layer.post_norm),
            self_attn=SimpleNamespace(
                qkv_proj=SimpleNamespace(**vars(weight(layer.qkv)), bias=layer.qkv_bias), o_proj=weight(layer.out_proj),
                rotary_emb=SimpleNamespace(cos_sin_cache=weights.cos_sin),
                **{name: weight(norm) for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)) if norm is not None},
            ),
            mlp=SimpleNamespace(gate_up_proj=weight(layer.gate_up), down_proj=weight(layer.down)),
        )
        for layer in weights.layers
    ]
    return SimpleNamespace(model=SimpleNamespace(layers=layers, embed_tokens=weight(embedding), norm=weight(weights.final_norm)))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_views_of_sglangs_tensors_under_the_right_names(family):
    weights = random_weights(GEOMETRY, seed=0, **FAMILIES[family])
    model = sglang_model(weights, padded_vocab=128)
    collected = collect_weights(model, GEOMETRY)
    assert collected.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert collected.embedding.shape == (GEOMETRY.vocab, GEOMETRY.hidden) and collected.embedding.is_contiguous()
    assert collected.final_norm.data_ptr() == weights.final_norm.data_ptr()
    assert collected.cos_sin is weights.cos_sin
    for ours, theirs in zip(collected.layers, weights.layers, strict=True):
        for name in LayerTensors.__dataclass_fields__:
            collected_tensor, tensor = getattr(ours, name), getattr(theirs, name)
            if tensor is None:
                assert collected_tensor is None, name
                continue
            assert collected_tensor.data_ptr() == tensor.data_ptr(), name
            assert not collected_tensor.requires_grad


@pytest.mark.parametrize("tied", [True, False])
def test_the_lm_head_is_a_view_with_its_padding(tied):
    model = sglang_model(random_weights(GEOMETRY, seed=0), padded_vocab=128)
    model.lm_head = model.model.embed_tokens if tied else weight(torch.zeros(128, GEOMETRY.hidden).bfloat16())
    collected = collect_weights(model, GEOMETRY, has_head=True)
    assert collected.lm_head.data_ptr() == model.lm_head.weight.data_ptr() and collected.lm_head.shape == (128, GEOMETRY.hidden)
    assert (collected.lm_head.data_ptr() == collected.embedding.data_ptr()) == tied and not collected.lm_head.requires_grad
    assert collect_weights(model, GEOMETRY).lm_head is None


def test_the_cpu_is_a_device_in_emulation_only(monkeypatch):
    monkeypatch.setattr(config, "get", lambda: config.Config(emulate=False))
    with pytest.raises(ValueError, match="the model is on 'cpu': .*SGL_LOWLATENCY_EMULATE=1"):
        device_limits.device_limits(torch.device("cpu"))
    monkeypatch.setattr(config, "get", lambda: config.Config(emulate=True))
    limits = device_limits.device_limits(torch.device("cpu"))
    assert limits.grid >= 2, "one block would cross no edge"
    assert limits.name == "host emulation"


def test_a_gpu_offers_its_sms_and_its_opt_in_shared_memory(monkeypatch):
    properties = SimpleNamespace(name="GPU", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_limits.device_limits(torch.device("cuda", 0)) == device_limits.DeviceLimits(132, 232448, "GPU, sm_90")


def test_progress_is_silent_for_fast_work_and_sparse_for_slow_work(monkeypatch, caplog):
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    caplog.set_level(logging.INFO)
    told = progress.Progress("building decode_step", logging.getLogger("test"))
    for at_s in (100.5, 101.9, 102.1, 103.0, 104.2):
        now_s[0] = at_s
        told.step("plan 3 of 16")
    assert [record.message for record in caplog.records] == [
        "building decode_step: plan 3 of 16 (2.1 s so far)",
        "building decode_step: plan 3 of 16 (4.2 s so far)",
    ]
