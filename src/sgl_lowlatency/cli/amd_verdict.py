"""Judges a launch command that asks for AMD's kernels, as verdict.py does for NVIDIA's: resolved once with the flag off, then every check."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator
from typing import Any
from unittest import mock

from sgl_lowlatency import plugin
from sgl_lowlatency.cli.verdict import Verdict, model_path_reason, unusable_sglang
from sgl_lowlatency.kernels import code_objects

DEFAULT_ISA = "gfx950"  # judged as if on this one where no AMD GPU is visible
FLAGS = ("--enable-amd-monokernel", "--monokernel-backend")
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
    """The verdict on server arguments. assume_gpu: as if this GPU ("gfx942") were the only one here; None uses the real one."""
    verdict = Verdict()
    try:
        binding = importlib.import_module("sglang.srt.kernel_plugins.amd.binding")
    except ModuleNotFoundError as error:
        verdict.reasons.append(unusable_sglang(error))
        return verdict
    plugin.register_amd()
    real = binding.device_isa()
    here = real if real in code_objects.ISAS else None
    verdict.isa = assume_gpu or here
    if verdict.isa is None:
        verdict.reasons.append(f"no AMD GPU with kernels here is visible (judged as if on {DEFAULT_ISA}; --assume-gpu names another)")
        verdict.isa = DEFAULT_ISA
    with _as_if_on(binding, verdict.isa, arguments, simulate=verdict.isa != here) as arguments:
        _judge_arguments(verdict, binding, arguments)
    return verdict


@contextlib.contextmanager
def _as_if_on(binding: Any, isa: str, arguments: list[str], *, simulate: bool) -> Iterator[list[str]]:
    """SGLang's platform facts replaced by ROCm's and its GPU by `isa`, and --device cuda, SGLang's word for ROCm too."""
    if not simulate:
        yield arguments
        return
    from sglang.srt.runtime_context import override_platform

    given = any(word == "--device" or word.startswith("--device=") for word in arguments)
    with override_platform(**_ROCM), mock.patch.object(binding, "device_isa", lambda: isa):
        yield arguments if given else [*arguments, "--device", "cuda"]


def _judge_arguments(verdict: Verdict, binding: Any, arguments: list[str]) -> None:
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
    from sglang.srt.server_args import prepare_server_args

    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage):
            server_args = prepare_server_args(arguments)
    except SystemExit:
        lines = usage.getvalue().strip().splitlines()
        verdict.reasons.append(f"SGLang does not accept the arguments: {lines[-1] if lines else 'no message'}")
        return
    if not server_args.enable_amd_monokernel:
        verdict.notes.append(f"{FLAGS[0]} is not in the command; judged as if it were")
    if server_args.enable_nvidia_megakernel:
        verdict.reasons.append("--enable-nvidia-megakernel is also set; use one of the two")
    if reason := model_path_reason(server_args.model_path):
        verdict.reasons.append(reason)
        return
    server_args.enable_nvidia_megakernel = server_args.enable_amd_monokernel = False
    try:
        server_args.resolve_once()
        model_config = model_config_of(server_args)
    except Exception as error:  # whatever SGLang's handlers raise is the answer to the operator's question
        verdict.reasons.append(f"SGLang itself refuses this command: {type(error).__name__}: {error}")
        return
    cfg = resolving_view(server_args)
    spec, reasons = binding.monokernel_disable_reasons(cfg=cfg, model_config=model_config, isa=verdict.isa)
    verdict.spec = spec.name if spec is not None else None
    verdict.reasons += reasons
    if cfg.load_format == "dummy":
        verdict.notes.append("--load-format dummy: such weights make any comparison of logits meaningless")
