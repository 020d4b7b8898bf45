"""Refusals before load, as pure functions of stand-ins. What SGLang prints of them: tests/contract/test_refusals.py."""

from types import SimpleNamespace

import pytest
from guard_cases import hf_config, server

from sgl_lowlatency.guard import config as guard

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def reasons(cfg=None, hf=None, emulate=False):
    return guard.config_disable_reasons(cfg or server(), hf or hf_config(), emulate=emulate)


def test_a_served_configuration_has_no_reason():
    assert reasons() == []


@pytest.mark.parametrize("name", [row[0] for row in guard._SERVER_ARGUMENTS])
def test_each_guarded_argument_refuses_an_unserved_value(name):
    (reason,) = reasons(server(**{name: "something-else"}))
    assert reason.startswith(f"--{name.replace('_', '-')} 'something-else' is not served: ")


def test_each_guarded_argument_must_exist():
    cfg = server()
    del cfg.enable_pdmux
    (reason,) = reasons(cfg)
    assert "no server argument 'enable_pdmux'" in reason


@pytest.mark.parametrize(
    ("fields", "is_served"),
    [
        ({"prefill_attention_backend": "flashinfer"}, False),
        ({"decode_attention_backend": "triton"}, False),
        ({"prefill_attention_backend": "triton", "decode_attention_backend": "triton"}, True),
        ({"prefill_attention_backend": "fa3"}, True),
    ],
)
def test_mixed_attention_backends(fields, is_served):
    assert (reasons(server(**fields)) == []) is is_served


def test_device_must_fit_the_emulation_switch():
    assert reasons(server(device="cpu"), emulate=True) == []
    assert reasons(server(device="cuda"), emulate=True)[0].startswith("--device 'cuda' is not 'cpu'")
    assert reasons(server(device="cpu"), emulate=False)[0].startswith("--device 'cpu' is not 'cuda'")


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"hidden_act": "gelu"}, "config.hidden_act 'gelu'"),
        ({"attention_bias": True}, "config.attention_bias"),
        ({"use_sliding_window": True}, "config.use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "config.layer_types sliding_attention"),
        ({"dual_chunk_attention_config": {"chunk_size": 1}}, "config.dual_chunk_attention_config"),
        ({"quantization_config": {"quant_method": "awq"}}, "config.quantization_config has quant_method 'awq'"),
        ({"quantization_config": {**FP8, "activation_scheme": "static"}}, "config.quantization_config has activation_scheme 'static'"),
        ({"quantization_config": {**FP8, "weight_block_size": [32, 32]}}, "config.quantization_config has weight_block_size [32, 32]"),
        ({"quantization_config": {**FP8, "scale_fmt": "ue8m0"}}, "config.quantization_config has scale_fmt 'ue8m0'"),
        ({"quantization_config": {**FP8, "kv_cache_quant_algo": "FP8"}}, "config.quantization_config has kv_cache_quant_algo 'FP8'"),
        ({"quantization_config": FP8, "intermediate_size": 3136}, "config.intermediate_size 3136 is not a multiple of 128"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope type 'mrope'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "config.partial_rotary_factor 0.5"),
        ({"vocab_size": None}, "config.vocab_size is None"),
    ],
)
def test_an_unserved_model_field_is_one_reason(fields, start):
    (reason,) = reasons(hf=hf_config(**fields))
    assert reason.startswith(start)


@pytest.mark.parametrize("block", [{}, {"weight_block_size": None}, {"weight_block_size": [128, 128]}])
def test_fp8_checkpoints_are_served(block):
    assert reasons(hf=hf_config(quantization_config={**FP8, **block})) == []
    assert reasons(server(quantization="fp8"), hf_config(quantization_config={**FP8, **block})) == []


def test_a_config_object_is_read_as_its_fields():
    fields = SimpleNamespace(to_dict=lambda: {**FP8, "activation_scheme": "static"})
    assert reasons(hf=hf_config(quantization_config=fields)) == reasons(hf=hf_config(quantization_config=fields.to_dict())) != []


def test_fp8_made_of_a_bf16_checkpoint_is_served_where_k_is_in_blocks_of_128():
    assert reasons(server(quantization="fp8")) == []
    assert reasons(hf=hf_config(intermediate_size=3136)) == []
    assert reasons(server(quantization="fp8"), hf_config(intermediate_size=3136)) == ["config.intermediate_size 3136 is not a multiple of 128"]


def test_reasons_add_up():
    found = reasons(server(quantization="awq", device="cpu"), hf_config(head_dim=96, attention_bias=True))
    assert len(found) == 4


def test_fp8_weights_need_a_gpu():
    (reason,) = reasons(server(device="cpu"), hf_config(quantization_config=FP8), emulate=True)
    assert reason.startswith("FP8 weights in host emulation: SGLang's CPU backend")
