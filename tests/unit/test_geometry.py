"""Geometry from HF configs. Oracle: the published sizes of the Qwen3 dense models."""

from types import SimpleNamespace

import pytest

from sgl_lowlatency.kernels.geometry import Geometry

# (hidden, layers, query heads, KV heads, intermediate, tied), from the models' config.json
QWEN3 = {
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "1.7B": (2048, 28, 16, 8, 6144, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
    "14B": (5120, 40, 40, 8, 17408, False),
    "32B": (5120, 64, 64, 8, 25600, False),
}


def hf_config(**fields):
    defaults = {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return SimpleNamespace(**{**defaults, **fields})


@pytest.mark.parametrize("name", QWEN3)
def test_every_qwen3_dense_model_is_served(name):
    hidden, layers, q_heads, kv_heads, intermediate, tied = QWEN3[name]
    config = hf_config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
    )
    geometry = Geometry.from_hf_config(config)
    assert geometry.reasons() == []
    assert geometry == Geometry(layers, hidden, q_heads, kv_heads, 128, intermediate, 151936, 40960, 1e-6, tied)


def test_head_dim_defaults_to_hidden_over_heads():
    assert Geometry.from_hf_config(hf_config(head_dim=None, num_attention_heads=64)).head_dim == 64


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"head_dim": 256}, "config.head_dim 256 is not one of 64, 128"),
        ({"hidden_size": 1000}, "config.hidden_size 1000 is not a multiple of 64"),
        ({"intermediate_size": 3080}, "config.intermediate_size 3080 is not a multiple of 64"),
        ({"num_key_value_heads": 5}, "config.num_attention_heads 32 is not a multiple of config.num_key_value_heads 5"),
        (
            {"num_attention_heads": 17, "num_key_value_heads": 1},
            "config.num_attention_heads 17 over config.num_key_value_heads 1 is more than 16 query heads a KV head",
        ),
    ],
)
def test_an_unsupported_field_is_named(fields, reason):
    assert Geometry.from_hf_config(hf_config(**fields)).reasons() == [reason]


def test_fp8_weights_need_every_k_in_blocks_of_128():
    geometry = Geometry.from_hf_config(hf_config(hidden_size=192, intermediate_size=448, num_attention_heads=3, num_key_value_heads=1, head_dim=64))
    assert geometry.reasons() == []
    assert geometry.reasons(element_bytes=1) == [
        "config.hidden_size 192 is not a multiple of 128",
        "config.intermediate_size 448 is not a multiple of 128",
        "config.num_attention_heads 3 of 64 channels are not a multiple of 128",
    ]


def test_all_unsupported_fields_are_named_together():
    reasons = Geometry.from_hf_config(hf_config(head_dim=80, hidden_size=100, num_key_value_heads=3)).reasons()
    assert [reason.split()[0] for reason in reasons] == [
        "config.head_dim",
        "config.hidden_size",
        "config.num_attention_heads",
    ]


@pytest.mark.parametrize("value", [None, 0, -4096, "4096", True, 4096.0])
def test_a_missing_or_senseless_field_raises_and_is_named(value):
    with pytest.raises(ValueError, match="config.hidden_size is .*, not a positive integer"):
        Geometry.from_hf_config(hf_config(hidden_size=value))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (  # Qwen3-30B-A3B
            {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768},
            (48, 2048, 32, 4, 768),
        ),
        (  # Qwen3-235B-A22B
            {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "moe_intermediate_size": 1536},
            (94, 4096, 64, 4, 1536),
        ),
    ],
)
def test_moe_models_are_served(fields, expected):
    config = hf_config(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, **fields)
    geometry = Geometry.from_hf_config(config)
    layers, hidden, q_heads, kv_heads, channels = expected
    assert geometry.reasons() == [] and geometry.is_moe and geometry.mlp_channels == channels
    assert geometry == Geometry(
        layers, hidden, q_heads, kv_heads, 128, 0, 151936, 40960, 1e-6, False,
        num_experts=128, top_k=8, moe_intermediate=channels, norm_topk_prob=True,
    )


@pytest.mark.parametrize(("given", "expected"), [({}, True), ({"norm_topk_prob": False}, False), ({"norm_topk_prob": True}, True)])
def test_norm_topk_prob_defaults_to_true_as_in_sglang(given, expected):
    config = hf_config(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, **given)
    assert Geometry.from_hf_config(config).norm_topk_prob is expected


def test_a_moe_field_that_is_missing_is_named_and_intermediate_size_is_not_read():
    with pytest.raises(ValueError, match="^config.num_experts_per_tok is None, not a positive integer$"):
        Geometry.from_hf_config(hf_config(num_experts=128, moe_intermediate_size=768, intermediate_size=None))
