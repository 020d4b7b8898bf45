"""Refusals before load, as pure functions of stand-ins. What SGLang prints of them: tests/contract/test_refusals.py."""

from types import SimpleNamespace

import pytest

from sgl_lowlatency.guard import config as guard


def hf_config(**fields):
    defaults = {
        "hidden_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    return SimpleNamespace(**{**defaults, **fields})


def server(**fields):
    served = {name: values[0] for name, values, _ in guard._SERVER_ARGUMENTS}
    backends = {"attention_backend": "fa3", "prefill_attention_backend": None, "decode_attention_backend": None}
    return SimpleNamespace(**{**served, **backends, "device": "cuda", **fields})


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
        ({"quantization_config": {"quant_method": "fp8"}}, "the checkpoint is quantized"),
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


def test_reasons_add_up():
    found = reasons(server(quantization="fp8", device="cpu"), hf_config(head_dim=96, attention_bias=True))
    assert len(found) == 4
