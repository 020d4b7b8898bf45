"""Judges server arguments by SGLang's own resolution and our guard, without starting a server.

SGLang reports some refusals alone, before it looks at the rest (plugin not listed, no GPU, wrong GPU, both vendor flags).
Here the arguments are resolved once with the flag off, and then every check runs on the resolved settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import io
import json
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import sgl_lowlatency
from sgl_lowlatency import config, plugin
from sgl_lowlatency.guard.device import installation_reasons

DEFAULT_ISA = "sm_90"  # judged as if on this one where no GPU is visible, so that the other reasons still show
FLAG = "--enable-nvidia-megakernel"


@dataclasses.dataclass
class Verdict:
    """ok is whether the server would start with the kernels active. Every reason is in an operator's words.

    isa: the GPU judged for. emulated: host emulation is on. spec: the name of the spec that serves the model, or None.
    """

    reasons: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    isa: str | None = None
    emulated: bool = False
    spec: str | None = None

    @property
    def ok(self) -> bool:
        return not self.reasons


def judge(arguments: list[str], assume_gpu: str | None) -> Verdict:
    """The verdict on server arguments.

    assume_gpu: judge as if this GPU ("sm_90") were the only one here; None uses the real one.
    """
    verdict = Verdict()
    try:
        verdict.emulated = emulate = config.get().emulate
    except ValueError as error:
        verdict.reasons.append(str(error))
        return verdict
    try:
        binding = importlib.import_module("sglang.srt.kernel_plugins.nvidia.binding")
    except ModuleNotFoundError as error:
        verdict.reasons.append(unusable_sglang(error))
        return verdict
    installed = importlib.metadata.version("sglang")
    if installed != sgl_lowlatency.TESTED_SGLANG:
        verdict.notes.append(f"sglang {installed} is installed; this release is tested with {sgl_lowlatency.TESTED_SGLANG}")
    _load_plugins()
    verdict.reasons += binding.plugin_reasons()
    real_isa = binding.device_isa()
    verdict.isa = assume_gpu or real_isa
    if verdict.isa is None:
        verdict.reasons.append(f"no GPU is visible (judged as if on {DEFAULT_ISA}; --assume-gpu names another)")
        verdict.isa = DEFAULT_ISA
    with _as_if_on(binding, verdict.isa, arguments, simulate=verdict.isa != real_isa and not emulate) as arguments:
        _judge_arguments(verdict, binding, arguments, emulate=emulate)
    if assume_gpu and not emulate:
        here = installation_reasons(assume_gpu, emulate=False)
        verdict.notes += [f"on this machine {reason}" for reason in here]
        verdict.reasons = [reason for reason in verdict.reasons if reason not in here]
    return verdict


def unusable_sglang(error: ModuleNotFoundError) -> str:
    """The reason that SGLang's binding does not import."""
    missing = "sglang is not installed" if error.name == "sglang" else f"this sglang is not usable here ({error})"
    return f"{missing}: pip install sglang=={sgl_lowlatency.TESTED_SGLANG}"


def _load_plugins() -> None:
    from sglang.kernels.plugin_kernels.nvidia.spec import registered_architectures
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if not set(plugin.NVIDIA_SPECS) <= set(registered_architectures()):
        # Not installed or not listed: already a reason. The other checks still need the specs.
        plugin.register_nvidia()


@contextlib.contextmanager
def _as_if_on(binding: Any, isa: str, arguments: list[str], *, simulate: bool) -> Iterator[list[str]]:
    """SGLang's platform facts replaced by those of `isa`, and --device cuda, which it would otherwise detect."""
    if not simulate:
        yield arguments
        return
    from sglang.srt.runtime_context import override_platform

    capability = divmod(int(isa.removeprefix("sm_")), 10)
    facts = {
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
    given = any(word == "--device" or word.startswith("--device=") for word in arguments)
    with override_platform(**facts), mock.patch.object(binding, "device_isa", lambda: isa):
        yield arguments if given else [*arguments, "--device", "cuda"]


def _judge_arguments(verdict: Verdict, binding: Any, arguments: list[str], *, emulate: bool) -> None:
    """Parses, resolves and checks; adds to the verdict. Returns early where nothing further can be known."""
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
    if not server_args.enable_nvidia_megakernel:
        verdict.notes.append(f"{FLAG} is not in the command; judged as if it were")
    if server_args.enable_amd_monokernel:
        verdict.reasons.append("--enable-amd-monokernel is also set; use one of the two")
    if reason := model_path_reason(server_args.model_path):
        verdict.reasons.append(reason)
        return
    server_args.enable_nvidia_megakernel = server_args.enable_amd_monokernel = False
    try:
        server_args.resolve_once()
        hf_config = model_config_of(server_args).hf_config
    except Exception as error:  # whatever SGLang's handlers raise is the answer to the operator's question
        verdict.reasons.append(f"SGLang itself refuses this command: {type(error).__name__}: {error}")
        return
    cfg = resolving_view(server_args)
    spec, reasons = _spec_reasons(binding, cfg, hf_config, verdict.isa)
    if spec is not None:
        verdict.spec = spec.name
        reasons += binding._dtype_reasons(spec, model_config_of(server_args))
    verdict.reasons += reasons
    verdict.notes += _notes(cfg)
    if spec is not None and not reasons and cfg.speculative_algorithm is not None:
        drafts = cfg.speculative_num_draft_tokens
        verdict.notes.append(
            f"decode_step verifies up to {spec.max_rows // drafts} requests of {drafts} tokens at once; a step of more runs "
            "SGLang's forward"
        )


def model_path_reason(path: str) -> str | None:
    """Why a local model path cannot be one, or None."""
    local = os.path.expanduser(path)
    if os.path.isdir(local):
        return _config_reason(path, os.path.join(local, "config.json"))
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and "://" not in path and not os.path.exists(local):
        return f"the model path {path!r} does not exist"
    return None


def _config_reason(path: str, config: str) -> str | None:
    """What SGLang would trip over without naming it."""
    if not os.path.isfile(config):
        return f"{path!r} has no config.json"
    try:
        with open(config, encoding="utf-8") as file:
            names = json.load(file).get("architectures")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        return f"{config!r} is not a JSON object: {error}"
    return None if names else f"{config!r} names no architectures"


def _spec_reasons(binding: Any, cfg: Any, hf_config: Any, isa: str) -> tuple[Any, list[str]]:
    """SGLang's check on this ISA and, where the spec has no kernels for the ISA, that and the rest of its reasons."""
    spec, reasons = binding.megakernel_disable_reasons(cfg=cfg, hf_config=hf_config, isa=isa)
    if spec is not None:
        return spec, reasons
    for architecture in hf_config.architectures or ():
        if path := (plugin.NVIDIA_SPECS | plugin.NVIDIA_DRAFT_SPECS).get(architecture):
            module, _, attribute = path.partition(":")
            served = sorted(getattr(importlib.import_module(module), attribute).requires.isas)[-1]
            with mock.patch.object(binding, "device_isa", lambda: served):
                spec, more = binding.megakernel_disable_reasons(cfg=cfg, hf_config=hf_config, isa=served)
            return spec, reasons + more
    return None, reasons


def _notes(cfg: Any) -> list[str]:
    notes = []
    if not config.get().self_check:
        notes.append("SGL_LOWLATENCY_SELF_CHECK=0: the kernels would serve without being compared to SGLang's forward")
    if cfg.cuda_graph_config.decode.backend == "disabled":
        notes.append("decode CUDA graphs are disabled: every step is launched from Python")
    if cfg.load_format == "dummy":
        notes.append("--load-format dummy: such weights make any comparison of logits meaningless")
    return notes
