"""What the build of AMD's steps refuses, and memory that ranks share on ROCm, on a HIP runtime that writes down its calls."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from hip_stub import build, needs_compiler  # noqa: E402
from monokernel_cases import tiny  # noqa: E402

from sgl_lowlatency.build import monokernel, symmetric_workspace  # noqa: E402
from sgl_lowlatency.kernels import code_objects  # noqa: E402
from sgl_lowlatency.kernels.hip import HipRuntime  # noqa: E402
from sgl_lowlatency.kernels.monokernel import mono_layout  # noqa: E402


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "log"))
    return HipRuntime(build(tmp_path))


@pytest.fixture
def gpu(runtime, monkeypatch):
    """gpu(units): a GPU of so many CUs. The stub's runtime holds three workgroups a CU."""
    monkeypatch.setattr(monokernel, "HipRuntime", lambda: runtime)
    monkeypatch.setattr(code_objects, "read", lambda kernel, isa: b"\x7fELF")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def of(units):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=units))

    return of


@needs_compiler
def test_workgroups_that_are_resident_at_once_are_launched(runtime, gpu):
    gpu(86)
    objects, workgroups = monokernel._objects("gfx950", 256, torch.device("cuda"))
    assert workgroups == 256 and objects.runtime is runtime


@needs_compiler
def test_workgroups_that_are_not_resident_at_once_are_refused(gpu):
    """Before any launch."""
    gpu(64)
    with pytest.raises(RuntimeError, match="k1 needs 256 workgroups resident at once; this GPU, of 64 CUs, holds 192"):
        monokernel._objects("gfx950", 256, torch.device("cuda"))


def test_a_model_elsewhere_is_refused():
    with pytest.raises(ValueError, match=r"the model is on 'cpu': k1 and k2 run on a ROCm device, .* \(SGL_LOWLATENCY_EMULATE=1\)"):
        monokernel._objects("gfx950", 256, torch.device("cpu"))


@needs_compiler
def test_a_rocm_workspace_is_unwritten_and_mapped_by_its_handle(runtime):
    layout, memory_of = mono_layout(2, 2, 64), symmetric_workspace._HipMemoryOf(runtime)
    with contextlib.ExitStack() as undo:
        own = memory_of.allocate(layout, undo)
        assert own.read(0, layout.tiles) == bytes(layout.tiles)
        assert set(own.read(layout.tiles, layout.total_bytes - layout.tiles)) == {0xFF}
        own.write(layout.rendezvous, b"who I am")
        assert memory_of.map(own.handle, layout, undo).read(layout.rendezvous, 8) == b"who I am"
    own.free()


def test_ranks_of_other_releases_do_not_agree(monkeypatch):
    context = SimpleNamespace(isa="gfx950", widths=(1, 2))
    ours = monokernel._terms("Qwen3ForCausalLM", tiny(2, 64, 2, 1, 64, 64), context, 1, 256)
    monkeypatch.setattr("sgl_lowlatency.__version__", "0.0.0")
    theirs = monokernel._terms("Qwen3ForCausalLM", tiny(2, 64, 2, 1, 64, 64), context, 1, 256)
    assert ours.digest() != theirs.digest() and dataclasses.replace(theirs, plan_hash=ours.plan_hash) == ours
