"""A served model's config and a served server's arguments, as stand-ins: what the tests of the guard plant defects in."""

from types import SimpleNamespace

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
    return SimpleNamespace(**{**served, **backends, "device": "cuda", "tp_size": 1, **fields})
