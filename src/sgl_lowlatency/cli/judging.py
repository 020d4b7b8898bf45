"""What the verdicts on both vendors' flags have in common: the arguments parsed, and resolved by SGLang with both flags off."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import io
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import sgl_lowlatency
from sgl_lowlatency import config

FLAGS = {"enable_nvidia_megakernel": "--enable-nvidia-megakernel", "enable_amd_monokernel": "--enable-amd-monokernel"}


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


@dataclasses.dataclass(frozen=True)
class Resolved:
    """cfg: the resolved server arguments. model_config: SGLang's, of the served model."""

    cfg: Any
    model_config: Any


def begin(binding_name: str) -> tuple[Verdict, Any]:
    """(a verdict, the vendor's binding in SGLang), or a verdict that says why nothing can be judged, and None."""
    verdict = Verdict()
    try:
        verdict.emulated = config.get().emulate
        binding = importlib.import_module(binding_name)
    except ValueError as error:
        verdict.reasons.append(str(error))
        return verdict, None
    except ModuleNotFoundError as error:
        verdict.reasons.append(unusable_sglang(error))
        return verdict, None
    installed = importlib.metadata.version("sglang")
    if installed != sgl_lowlatency.TESTED_SGLANG:
        verdict.notes.append(f"sglang {installed} is installed; this release is tested with {sgl_lowlatency.TESTED_SGLANG}")
    return verdict, binding


def unusable_sglang(error: ModuleNotFoundError) -> str:
    """The reason that SGLang's binding does not import."""
    missing = "sglang is not installed" if error.name == "sglang" else f"this sglang is not usable here ({error})"
    return f"{missing}: pip install sglang=={sgl_lowlatency.TESTED_SGLANG}"


@contextlib.contextmanager
def as_if_on(binding: Any, isa: str, facts: Mapping[str, Any], arguments: list[str], *, simulate: bool) -> Iterator[list[str]]:
    """With `simulate` SGLang's facts of the platform are replaced by `facts`, its GPU by `isa`; gives the arguments with --device cuda, which it would
    otherwise detect. Without, the arguments as they are."""
    if not simulate:
        yield arguments
        return
    from sglang.srt.runtime_context import override_platform

    given = any(word == "--device" or word.startswith("--device=") for word in arguments)
    with override_platform(**facts), mock.patch.object(binding, "device_isa", lambda: isa):
        yield arguments if given else [*arguments, "--device", "cuda"]


def resolve(verdict: Verdict, arguments: list[str], flag: str) -> Resolved | None:
    """Parses and resolves. flag: the name in FLAGS of the one that is judged. None where nothing further can be known; the verdict says why."""
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
    from sglang.srt.server_args import prepare_server_args

    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage):
            server_args = prepare_server_args(arguments)
    except SystemExit:
        lines = usage.getvalue().strip().splitlines()
        verdict.reasons.append(f"SGLang does not accept the arguments: {lines[-1] if lines else 'no message'}")
        return None
    for name, words in FLAGS.items():
        if name == flag and not getattr(server_args, name):
            verdict.notes.append(f"{words} is not in the command; judged as if it were")
        if name != flag and getattr(server_args, name):
            verdict.reasons.append(f"{words} is also set; use one of the two")
    if reason := model_path_reason(server_args.model_path):
        verdict.reasons.append(reason)
        return None
    server_args.enable_nvidia_megakernel = server_args.enable_amd_monokernel = False
    try:
        server_args.resolve_once()
        model_config = model_config_of(server_args)
    except Exception as error:  # whatever SGLang's handlers raise is the answer to the operator's question
        verdict.reasons.append(f"SGLang itself refuses this command: {type(error).__name__}: {error}")
        return None
    return Resolved(resolving_view(server_args), model_config)


def note_installation(verdict: Verdict, reasons: list[str]) -> None:
    """Of an assumed GPU: what this machine's installation lacks to run on it, `reasons`, are notes. The server is to start elsewhere."""
    verdict.notes += [f"on this machine {reason}" for reason in reasons]
    verdict.reasons = [reason for reason in verdict.reasons if reason not in reasons]


def notes(cfg: Any) -> list[str]:
    """What an operator should know of a served command."""
    found = []
    if not config.get().self_check:
        found.append("SGL_LOWLATENCY_SELF_CHECK=0: the kernels would serve without being compared to SGLang's forward")
    if cfg.cuda_graph_config.decode.backend == "disabled":
        found.append("decode CUDA graphs are disabled: every step is launched from Python")
    if cfg.load_format == "dummy":
        found.append("--load-format dummy: such weights make any comparison of logits meaningless")
    return found


def model_path_reason(path: str) -> str | None:
    """Why a local model path cannot be one, or None."""
    local = os.path.expanduser(path)
    if os.path.isdir(local):
        return _config_reason(path, os.path.join(local, "config.json"))
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and "://" not in path and not os.path.exists(local):
        return f"the model path {path!r} does not exist"
    return None


def _config_reason(path: str, config_path: str) -> str | None:
    """What SGLang would trip over without naming it."""
    if not os.path.isfile(config_path):
        return f"{path!r} has no config.json"
    try:
        with open(config_path, encoding="utf-8") as file:
            names = json.load(file).get("architectures")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        return f"{config_path!r} is not a JSON object: {error}"
    return None if names else f"{config_path!r} names no architectures"
