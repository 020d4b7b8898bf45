"""The entry points as SGLang finds and runs them."""

import inspect
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from sglang.kernels.plugin_kernels.amd.spec import MonoSpec
from sglang.kernels.plugin_kernels.amd.spec import find_spec as find_amd_spec
from sglang.kernels.plugin_kernels.nvidia.spec import ENTRY_POINT, MegakernelSpec, find_spec, registered_architectures

from sgl_lowlatency import plugin


def test_the_installed_entry_points_are_sglangs():
    points = {point.name: point.value for point in entry_points(group="sglang.srt.plugins")}
    assert points[ENTRY_POINT] == "sgl_lowlatency.plugin:register_nvidia"
    assert points["amd_monokernel"] == "sgl_lowlatency.plugin:register_amd"


def test_every_registered_path_is_a_spec_of_this_api_version():
    plugin.register_nvidia()
    specs = plugin.NVIDIA_SPECS | plugin.NVIDIA_DRAFT_SPECS
    assert set(specs) <= set(registered_architectures())
    for architecture in specs:
        spec, why = find_spec(architectures=[architecture], isa="sm_90")
        assert why == "" and isinstance(spec, MegakernelSpec)


def test_registering_twice_is_harmless():
    plugin.register_nvidia()
    before = registered_architectures()
    plugin.register_nvidia()
    assert registered_architectures() == before


REGISTER = """
import sys
from sgl_lowlatency import plugin
assert not {"torch", "sglang"} & set(sys.modules), "loading the entry points imports them"
import sglang.kernels.plugin_kernels.amd.spec  # SGLang's own; their package imports torch
import sglang.kernels.plugin_kernels.nvidia.spec as contract
before = set(sys.modules)
plugin.register_nvidia()
plugin.register_amd()
print(contract.registered_architectures(), sorted(set(sys.modules) - before))
"""


def test_registering_imports_nothing_but_the_configuration():
    """In a fresh process, as every SGLang process does it: paths only, neither the specs nor torch."""
    done = subprocess.run([sys.executable, "-c", REGISTER], capture_output=True, text=True, timeout=120)
    registered = sorted(plugin.NVIDIA_SPECS | plugin.NVIDIA_DRAFT_SPECS)
    assert (done.returncode, done.stdout) == (0, f"{registered} ['sgl_lowlatency.config']\n"), done.stderr


@pytest.mark.parametrize("isa", ["gfx942", "gfx950"])
def test_every_amd_path_is_a_spec_of_this_api_version(isa):
    plugin.register_amd()
    plugin.register_amd()  # twice is harmless
    for architecture in plugin.AMD_SPECS:
        spec, why = find_amd_spec(backend="amd", architectures=[architecture], isa=isa)
        assert why == "" and isinstance(spec, MonoSpec) and spec.load_tensor is None
    spec, why = find_amd_spec(backend="amd", architectures=["Qwen3ForCausalLM"], isa="gfx90a")
    assert spec is None and why == "monokernel backend 'amd' has no spec for ['Qwen3ForCausalLM'] on gfx90a"


def test_a_draft_model_is_not_judged_by_what_the_kernel_computes(monkeypatch):
    """It keeps SGLang's forward, so a draft that the kernel could not run is no reason to refuse the server."""
    from sglang.srt.layers.moe.utils import draft_model_build_scope
    from sglang.srt.runtime_context import get_flags

    from sgl_lowlatency.runtime import sglang_state
    from sgl_lowlatency.specs.nvidia.dense import QWEN3_SPEC

    monkeypatch.setattr(sglang_state, "tensor_parallel", lambda: sglang_state.TensorParallel(0, 1, None))  # there are no groups here
    assert QWEN3_SPEC.model_disable_reasons(object(), None) == [
        "the loaded model is builtins.object, not sglang.srt.models.qwen3.Qwen3ForCausalLM"
    ]
    assert "in_speculative_scope = True" in inspect.getsource(draft_model_build_scope)
    get_flags().moe.in_speculative_scope = True
    try:
        assert QWEN3_SPEC.model_disable_reasons(object(), None) == []
    finally:
        get_flags().moe.in_speculative_scope = False
