"""Makes a machine without a GPU pass for one to SGLang's checks of both kernel plugins (SGL_LOWLATENCY_EMULATE=1, nothing else).

SGLang runs on the CPU backend as it is. What it lacks there, and what `install` puts in place, is this and no more:

- the probes that `--enable-nvidia-megakernel` and `--enable-amd-monokernel` call: the ISA, which is sm_90 to the one and gfx950 to the other, free
  memory, the device's properties, whether the current stream is capturing;
- `vllm._custom_ops.rotary_embedding`, a name SGLang's rotary embedding imports on the CPU and never calls;
- a cos/sin table kept in fp32, as SGLang keeps it on CUDA.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import sys
import types

logger = logging.getLogger(__name__)

ISA, AMD_ISA = "sm_90", "gfx950"
NUM_SMS = 256  # what residency checks see: gfx950 has most. The emulated grids are smaller (build/device_limits.py, build/monokernel.py)
FREE_BYTES = 64 << 30


def install() -> None:
    """Installs the probes in this process; a second call does nothing. Logs and leaves everything alone on a GPU host."""
    import torch

    if torch.cuda.is_available():
        logger.error("SGL_LOWLATENCY_EMULATE=1 is ignored: this machine has a GPU. Unset it to silence this message.")
        return
    from sglang.srt.kernel_plugins.amd import binding as amd_binding
    from sglang.srt.kernel_plugins.nvidia import binding

    if binding.device_isa() == ISA:
        return
    properties = types.SimpleNamespace(
        name="host emulation", major=9, minor=0, multi_processor_count=NUM_SMS, total_memory=FREE_BYTES
    )
    binding.device_isa, amd_binding.device_isa = lambda: ISA, lambda: AMD_ISA
    torch.cuda.mem_get_info = lambda device=None: (FREE_BYTES, FREE_BYTES)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.is_current_stream_capturing = lambda: False
    # Read by SGLang when a model is built, in this process and in those it starts.
    os.environ.setdefault("SGLANG_ROPE_CACHE_FP32", "1")
    _provide_rope_import()
    logger.warning("Host emulation is on: the kernels run on the CPU, correct and slow.")


def _provide_rope_import() -> None:
    if importlib.util.find_spec("vllm") is not None:
        return

    def rotary_embedding(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError("host emulation: SGLang's native rotary embedding was expected to run")

    for name in ("vllm", "vllm._custom_ops"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, origin="sgl_lowlatency host emulation")
        sys.modules[name] = module
    sys.modules["vllm"]._custom_ops = sys.modules["vllm._custom_ops"]
    sys.modules["vllm._custom_ops"].rotary_embedding = rotary_embedding
