"""Judges a launch command that asks for AMD's kernels, as verdict.py does for NVIDIA's: resolved once with the flag off, then every check."""

from __future__ import annotations

import importlib.metadata

from sgl_lowlatency import plugin
from sgl_lowlatency.cli import judging
from sgl_lowlatency.cli.judging import Verdict
from sgl_lowlatency.guard.monokernel import launch_reasons
from sgl_lowlatency.kernels import code_objects

DEFAULT_ISA = "gfx950"  # judged as if on this one where no AMD GPU is visible
FLAGS = ("--enable-amd-monokernel", "--monokernel-backend")
ENTRY_POINT = "amd_monokernel"
# SGLang's facts of a machine, as they are on ROCm.
_ROCM = {
    "is_cuda": False,
    "is_hip": True,
    "is_sm90": False,
    "is_hopper_with_cuda_12_3": False,
    "is_sm100": False,
    "is_sm100_or_sm110": False,
    "is_sm110": False,
    "is_sm120": False,
    "is_blackwell": False,
    "has_amx": False,
    "has_flashinfer": False,
}


def asked_for(arguments: list[str]) -> bool:
    """Whether server arguments ask for AMD's kernels, by either name of the flag, and not for NVIDIA's."""
    amd = any(word.split("=")[0] in FLAGS for word in arguments)
    return amd and "--enable-nvidia-megakernel" not in arguments


def judge(arguments: list[str], assume_gpu: str | None) -> Verdict:
    """The verdict on server arguments. assume_gpu: as if this GPU ("gfx942") were the only one here, and what is installed here is
    a note; None uses the real one."""
    verdict, binding = judging.begin("sglang.srt.kernel_plugins.amd.binding")
    if binding is None:
        return verdict
    verdict.reasons += plugin_reasons()
    plugin.register_amd()  # whether SGLang would load it or not: the other checks need the specs
    real = binding.device_isa()
    here = real if real in code_objects.ISAS else None
    verdict.isa = assume_gpu or here
    if verdict.isa is None:
        verdict.reasons.append(f"no AMD GPU with kernels here is visible (judged as if on {DEFAULT_ISA}; --assume-gpu names another)")
        verdict.isa = DEFAULT_ISA
    simulate = verdict.isa != here and not verdict.emulated
    with judging.as_if_on(binding, verdict.isa, _ROCM, arguments, simulate=simulate) as arguments:
        resolved = judging.resolve(verdict, arguments, "enable_amd_monokernel")
        if resolved is None:
            return verdict
        spec, reasons = binding.monokernel_disable_reasons(cfg=resolved.cfg, model_config=resolved.model_config, isa=verdict.isa)
        verdict.spec = spec.name if spec is not None else None
        verdict.reasons += reasons
        verdict.notes += judging.notes(resolved.cfg)
    if assume_gpu and not verdict.emulated:
        judging.note_installation(verdict, launch_reasons(assume_gpu, code_objects.installed()))
    return verdict


def plugin_reasons() -> list[str]:
    """Why SGLang will not load the plugin that registers the specs; [] when it will. It says so of NVIDIA's plugin alone."""
    from sglang.srt.environ import envs

    if ENTRY_POINT not in {entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")}:
        return [f"the {ENTRY_POINT!r} plugin is not installed: SGLang runs in another environment than sgl-lowlatency"]
    listed = envs.SGLANG_PLUGINS.get()
    if listed and ENTRY_POINT not in {name.strip() for name in listed.split(",")}:
        return [f"SGLANG_PLUGINS={listed!r} does not list the {ENTRY_POINT!r} plugin"]
    return []
