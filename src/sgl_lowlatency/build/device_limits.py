"""What the device offers a persistent kernel: how many blocks stay resident and how much shared memory each has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_lowlatency import config

EMULATED_GRID = 4  # blocks of a step in host emulation: enough for edges and split attention to cross blocks
EMULATED_SHARED_MEMORY_BYTES = 227 * 1024  # sm_90's, so that emulated plans choose the ring and panels of the real ones


@dataclass(frozen=True)
class DeviceLimits:
    """grid: blocks of one launch, one an SM. shared_memory_bytes: dynamic shared memory a block may ask for."""

    grid: int
    shared_memory_bytes: int
    name: str


def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of `device`; a CPU device is the host emulation's, and only with SGL_LOWLATENCY_EMULATE=1 (else ValueError)."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceLimits(
            grid=properties.multi_processor_count,
            shared_memory_bytes=properties.shared_memory_per_block_optin,
            name=f"{properties.name}, sm_{properties.major}{properties.minor}",
        )
    if device.type == "cpu" and config.get().emulate:
        return DeviceLimits(EMULATED_GRID, EMULATED_SHARED_MEMORY_BYTES, "host emulation")
    raise ValueError(
        f"the model is on {device.type!r}: decode_step runs on a CUDA device, or on the CPU in host emulation "
        "(SGL_LOWLATENCY_EMULATE=1)"
    )
