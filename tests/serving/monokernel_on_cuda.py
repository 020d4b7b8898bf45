"""AMD's specs for an NVIDIA GPU: SGLang's AMD dispatch over k1 and k2 in waves of two warps (kernels/monokernel_cuda.py). For tests; no user gets it.

SGLang's `device_isa` is sm_90 there, so the specs list it; the guard of ROCm's settings stays out. `register` is an entry point of the group
`sglang.srt.plugins`, which `install` puts on a server's path.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

NAME = "monokernel_on_cuda"


def install(folder: Path) -> dict[str, str]:
    """Writes the entry point into `folder`; returns what a server's environment needs to load it alone."""
    info = folder / f"{NAME}-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = {NAME}:register\n")
    (info / "RECORD").write_text("")
    path = [str(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # the package may be found by the last
    return {"SGLANG_PLUGINS": NAME, "PYTHONPATH": os.pathsep.join(path)}


def register() -> None:
    from sglang.kernels.plugin_kernels.amd.spec import BACKEND, register

    for architecture, attribute in (("Qwen3ForCausalLM", "QWEN3_SPEC"), ("Qwen3MoeForCausalLM", "QWEN3_MOE_SPEC")):
        register(backend=BACKEND, architecture=architecture, path=f"{NAME}:{attribute}")


def __getattr__(name: str) -> Any:
    if name not in ("QWEN3_SPEC", "QWEN3_MOE_SPEC"):
        raise AttributeError(name)
    from sgl_lowlatency.specs.amd import qwen3, qwen3_moe

    return _on_cuda(getattr(qwen3 if name == "QWEN3_SPEC" else qwen3_moe, name))


def _on_cuda(spec: Any) -> Any:
    import msgspec
    import torch
    from sglang.kernels.plugin_kernels.amd.spec import DeviceLimits

    units = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return msgspec.structs.replace(
        spec,
        devices={"sm_90": DeviceLimits(widths=spec.widths("gfx950"), tp_sizes=(1,), resident_blocks=units)},
        requires=msgspec.structs.replace(spec.requires, attention_backends=spec.requires.attention_backends | {"fa3"}),
        config_disable_reasons=None,
        build=functools.partial(_build, spec=spec, units=units),
    )


def _build(model: Any, hf_config: Any, context: Any, *, spec: Any, units: int) -> Any:
    import msgspec

    from sgl_lowlatency.build import monokernel
    from sgl_lowlatency.kernels.monokernel_cuda import ISA, MonokernelCuda

    def objects(isa: str, grid: int, device: Any) -> tuple[MonokernelCuda, int]:
        made = MonokernelCuda()
        made.require_resident(units)
        return made, units

    monokernel._objects = objects
    return spec.build(model, hf_config, msgspec.structs.replace(context, isa=ISA))
