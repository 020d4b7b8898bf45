"""Judges server arguments that ask for NVIDIA's kernels, by SGLang's own resolution and our guard, without starting a server.

SGLang reports some refusals alone, before it looks at the rest (plugin not listed, no GPU, wrong GPU, both vendor flags).
Here the arguments are resolved once with the flag off, and then every check runs on the resolved settings.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

from sgl_lowlatency import plugin
from sgl_lowlatency.cli import judging
from sgl_lowlatency.cli.judging import Verdict
from sgl_lowlatency.guard.device import installation_reasons

DEFAULT_ISA = "sm_90"  # judged as if on this one where no GPU is visible, so that the other reasons still show


def judge(arguments: list[str], assume_gpu: str | None) -> Verdict:
    """The verdict on server arguments.

    assume_gpu: judge as if this GPU ("sm_90") were the only one here; None uses the real one.
    """
    verdict, binding = judging.begin("sglang.srt.kernel_plugins.nvidia.binding")
    if binding is None:
        return verdict
    _load_plugins()
    verdict.reasons += binding.plugin_reasons()
    real_isa = binding.device_isa()
    verdict.isa = assume_gpu or real_isa
    if verdict.isa is None:
        verdict.reasons.append(f"no GPU is visible (judged as if on {DEFAULT_ISA}; --assume-gpu names another)")
        verdict.isa = DEFAULT_ISA
    simulate = verdict.isa != real_isa and not verdict.emulated
    with judging.as_if_on(binding, verdict.isa, _facts(verdict.isa), arguments, simulate=simulate) as arguments:
        _judge_arguments(verdict, binding, arguments)
    if assume_gpu and not verdict.emulated:
        judging.note_installation(verdict, installation_reasons(assume_gpu, emulate=False))
    return verdict


def _load_plugins() -> None:
    from sglang.kernels.plugin_kernels.nvidia.spec import registered_architectures
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if not set(plugin.NVIDIA_SPECS) <= set(registered_architectures()):
        # Not installed or not listed: already a reason. The other checks still need the specs.
        plugin.register_nvidia()


def _facts(isa: str) -> dict[str, Any]:
    """SGLang's facts of a machine with this GPU."""
    capability = divmod(int(isa.removeprefix("sm_")), 10)
    return {
        "is_cuda": True,
        "is_hip": False,
        "is_sm90": capability[0] == 9,
        "is_hopper_with_cuda_12_3": capability[0] == 9,
        "is_sm100": capability[0] == 10,
        "is_sm100_or_sm110": capability[0] in (10, 11),
        "is_sm110": capability[0] == 11,
        "is_sm120": capability[0] == 12,
        "is_blackwell": capability[0] in (10, 11, 12),
        "has_amx": False,
        "has_flashinfer": True,
        "device_sm": int(isa.removeprefix("sm_")),
        "device_capability": capability,
    }


def _judge_arguments(verdict: Verdict, binding: Any, arguments: list[str]) -> None:
    """Parses, resolves and checks; adds to the verdict. Returns early where nothing further can be known."""
    resolved = judging.resolve(verdict, arguments, "enable_nvidia_megakernel")
    if resolved is None:
        return
    cfg = resolved.cfg
    spec, reasons = _spec_reasons(binding, cfg, resolved.model_config.hf_config, verdict.isa)
    if spec is not None:
        verdict.spec = spec.name
        reasons += binding._dtype_reasons(spec, resolved.model_config)
    verdict.reasons += reasons
    verdict.notes += judging.notes(cfg)
    if spec is not None and not reasons:
        verdict.notes += _coverage_notes(spec, cfg)


def _coverage_notes(spec: Any, cfg: Any) -> list[str]:
    """Which steps of an accepted server SGLang's forward runs."""
    if not spec.max_rows:
        return ["every step of the target runs SGLang's forward; the draft's proposals are draft_sampler's"]
    if cfg.speculative_algorithm is None:
        return []
    drafts = cfg.speculative_num_draft_tokens
    kernel = "decode_step" if "decode_step" in spec.name else "a step of slices"
    return [f"{kernel} verifies up to {spec.max_rows // drafts} requests of {drafts} tokens at once; a step of more runs SGLang's forward"]


def _spec_reasons(binding: Any, cfg: Any, hf_config: Any, isa: str) -> tuple[Any, list[str]]:
    """SGLang's check on this ISA and, where the spec has no kernels for the ISA, that and the rest of its reasons."""
    spec, reasons = binding.megakernel_disable_reasons(cfg=cfg, hf_config=hf_config, isa=isa)
    if spec is not None:
        return spec, reasons
    for architecture in hf_config.architectures or ():
        if path := plugin.nvidia_specs().get(architecture):
            module, _, attribute = path.partition(":")
            served = sorted(getattr(importlib.import_module(module), attribute).requires.isas)[-1]
            with mock.patch.object(binding, "device_isa", lambda: served):
                spec, more = binding.megakernel_disable_reasons(cfg=cfg, hf_config=hf_config, isa=served)
            return spec, reasons + more
    return None, reasons
