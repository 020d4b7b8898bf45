"""The real SGLang's argument resolution on a machine of any kind: only its device probes are replaced."""

from __future__ import annotations

import json
from unittest import mock

import pytest

pytest.importorskip("sglang")

from sgl_lowlatency import config, plugin  # noqa: E402

ALL_BACKENDS = {"emulation": ["host"], "cuda": ["sm_90a", "sm_100a", "sm_103a"]}

# Qwen3-8B's config.json, without the fields that decide nothing.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

PLATFORMS = {
    "sm_90": {"is_sm90": True, "is_hopper_with_cuda_12_3": True, "is_sm100": False, "is_blackwell": False},
    "sm_100": {"is_sm90": False, "is_hopper_with_cuda_12_3": False, "is_sm100": True, "is_blackwell": True},
    "sm_103": {"is_sm90": False, "is_hopper_with_cuda_12_3": False, "is_sm100": True, "is_blackwell": True},
    "sm_89": {"is_sm90": False, "is_hopper_with_cuda_12_3": False, "is_sm100": False, "is_blackwell": False},
}


@pytest.fixture(autouse=True)
def default_environment(monkeypatch):
    """No variable of ours and no plugin list, whatever the test run was started with."""
    for name in (*config.NAMES, "SGLANG_PLUGINS", "SGLANG_USE_HND_KVCACHE"):
        monkeypatch.delenv(name, raising=False)
    config.get.cache_clear()
    yield
    config.get.cache_clear()


@pytest.fixture
def model_dir(tmp_path):
    """model_dir(**fields) writes a config.json, Qwen3-8B's with these fields changed, and returns its folder."""

    def write(**fields):
        (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, **fields}))
        return str(tmp_path)

    return write


@pytest.fixture
def resolve():
    """resolve(arguments, isa, backends) runs SGLang's whole argument resolution with the flag on and returns cfg."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.kernel_plugins.nvidia import binding
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import prepare_server_args

    plugin.register_nvidia()

    def run(arguments, isa="sm_90", backends=ALL_BACKENDS):
        facts = {"is_cuda": True, "has_amx": False, "has_flashinfer": True, **PLATFORMS[isa or "sm_90"]}
        with (
            override_platform(**facts),
            mock.patch.object(binding, "device_isa", lambda: isa),
            mock.patch("sgl_lowlatency.guard.device.compiled_backends", lambda: backends),
        ):
            server_args = prepare_server_args(["--device", "cuda", "--enable-nvidia-megakernel", *arguments])
            server_args.resolve_once()
            return resolving_view(server_args)

    return run


@pytest.fixture
def refusals(resolve):
    """refusals(arguments, ...) returns SGLang's lines of reasons; [] when it accepts the configuration."""

    def run(arguments, **kwargs):
        try:
            resolve(arguments, **kwargs)
        except ValueError as error:
            head, *lines = str(error).split("\n  - ")
            assert head == "--enable-nvidia-megakernel cannot run this setup:", str(error)
            return lines
        return []

    return run
