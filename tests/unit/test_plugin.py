"""The entry points against a stand-in for SGLang's registry; the real one: tests/contract/test_registration.py."""

import sys
from types import ModuleType

import pytest

from sgl_lowlatency import config, plugin


@pytest.fixture
def registered(monkeypatch):
    """The (architecture, path) pairs that register() received."""
    calls = []
    contract = ModuleType("sglang.kernels.plugin_kernels.nvidia.spec")
    contract.register = lambda *, architecture, path: calls.append((architecture, path))
    parts = contract.__name__.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    monkeypatch.setitem(sys.modules, contract.__name__, contract)
    for name in config.NAMES:
        monkeypatch.delenv(name, raising=False)
    config.get.cache_clear()
    yield calls
    config.get.cache_clear()


@pytest.fixture
def emulated(monkeypatch):
    """Stands in for the emulated device; counts its installations."""
    installs = []
    module = ModuleType("sgl_lowlatency.runtime.emulated_device")
    module.install = lambda: installs.append(1)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("sgl_lowlatency.runtime.emulated_device", module, raising=False)
    return installs


def test_nvidia_registers_paths(registered, emulated):
    plugin.register_nvidia()
    assert registered == [
        ("LlamaForCausalLM", "sgl_lowlatency.specs.nvidia.dense:LLAMA_SPEC"),
        ("Qwen2ForCausalLM", "sgl_lowlatency.specs.nvidia.dense:QWEN2_SPEC"),
        ("Qwen3ForCausalLM", "sgl_lowlatency.specs.nvidia.dense:QWEN3_SPEC"),
        ("Qwen3MoeForCausalLM", "sgl_lowlatency.specs.nvidia.qwen3_moe:QWEN3_MOE_SPEC"),
        ("DeepseekV4ForCausalLM", "sgl_lowlatency.specs.nvidia.deepseek_v4:DEEPSEEK_V4_SPEC"),
        ("DeepseekV4ForCausalLMDSpark", "sgl_lowlatency.specs.nvidia.deepseek_v4_dspark:DEEPSEEK_V4_DSPARK_SPEC"),
        ("DSparkDraftModel", "sgl_lowlatency.specs.nvidia.dspark:DSPARK_DRAFT_SPEC"),
        ("Qwen3DSparkModel", "sgl_lowlatency.specs.nvidia.dspark:DSPARK_DRAFT_SPEC"),
    ]
    assert emulated == []


def test_emulation_is_installed_on_request_only(registered, emulated, monkeypatch):
    monkeypatch.setenv("SGL_LOWLATENCY_EMULATE", "1")
    plugin.register_nvidia()
    assert len(registered) == 8 and emulated == [1]


def test_without_slices_of_a_layer_deepseek_has_its_drafts_proposals_alone(registered, emulated, monkeypatch):
    monkeypatch.setenv("SGL_LOWLATENCY_DEEPSEEK_SLICES", "none")
    plugin.register_nvidia()
    assert len(registered) == 8
    assert dict(registered)["DeepseekV4ForCausalLM"] == "sgl_lowlatency.specs.nvidia.deepseek_v4_dspark:DEEPSEEK_V4_TARGET_SPEC"
    assert dict(registered)["DeepseekV4ForCausalLMDSpark"] == "sgl_lowlatency.specs.nvidia.deepseek_v4_dspark:DEEPSEEK_V4_DSPARK_SPEC"


def test_a_bad_variable_raises_and_leaves_the_specs_to_name_it(registered, emulated, monkeypatch):
    monkeypatch.setenv("SGL_LOWLATENCY_EMULATE", "maybe")
    with pytest.raises(ValueError, match="SGL_LOWLATENCY_EMULATE='maybe' is not 0 or 1"):
        plugin.register_nvidia()
    assert len(registered) == 8 and emulated == []
    assert dict(registered)["DeepseekV4ForCausalLM"] == plugin.DEEPSEEK_V4_STEP_SPEC, "as by default"


def test_amd_registers_paths(monkeypatch):
    calls = []
    contract = ModuleType("sglang.kernels.plugin_kernels.amd.spec")
    contract.BACKEND, contract.register = "amd", lambda **fields: calls.append(fields)
    parts = contract.__name__.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    monkeypatch.setitem(sys.modules, contract.__name__, contract)
    plugin.register_amd()
    assert calls == [
        {"backend": "amd", "architecture": "Qwen3ForCausalLM", "path": "sgl_lowlatency.specs.amd.qwen3:QWEN3_SPEC"},
        {"backend": "amd", "architecture": "Qwen3MoeForCausalLM", "path": "sgl_lowlatency.specs.amd.qwen3_moe:QWEN3_MOE_SPEC"},
    ]
