"""How to start SGLang on the machine at hand: on a GPU when there is one, else on the CPU with host emulation."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from sgl_lowlatency import TESTED_SGLANG

ENTRY_POINT_GROUP, ENTRY_POINT = "sglang.srt.plugins", "nvidia_megakernel"
CONTEXT_LENGTH = 1100
MAX_TOTAL_TOKENS = 8192
COMMON = ["--mem-fraction-static", "0.3", "--max-running-requests", "16", "--enable-metrics"]
CPU_ONLY = [
    *("--device", "cpu", "--attention-backend", "torch_native"),
    *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    "--sleep-on-idle",  # the cores belong to whoever works
]
PLUGIN_FLAG = "--enable-nvidia-megakernel"


@dataclass(frozen=True)
class ServerSetup:
    """arguments: of sglang.launch_server without port and plugin flag. environment: added to the child's."""

    arguments: list[str]
    environment: dict[str, str]
    where: str


def server_setup(model: Path, extra: tuple[str, ...] = (), num_ranks: int = 1) -> ServerSetup:
    """The setup for `model` on this machine's GPUs, or on its CPU when torch sees none. num_ranks: that share the model."""
    import torch

    arguments = ["--model-path", str(model), "--context-length", str(CONTEXT_LENGTH)]
    arguments += ["--max-total-tokens", str(MAX_TOTAL_TOKENS), *COMMON, *extra]
    arguments += ["--tp", str(num_ranks)] if num_ranks > 1 else []
    environment = {"HF_HUB_OFFLINE": "1"}
    if torch.cuda.is_available():
        return ServerSetup(arguments, environment, torch.cuda.get_device_name())
    environment["SGL_LOWLATENCY_EMULATE"] = "1"
    environment["OMP_NUM_THREADS"] = "1"  # a tiny model's operations run slower when threads share them
    if num_ranks > 1:
        # SGLang wants a NUMA node a rank, or the cores of each; and takes a machine that has NCCL's library for one that has GPUs.
        cores = sorted(os.sched_getaffinity(0))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(num_ranks))
        environment["SGLANG_NCCL_SO_PATH"] = "/nonexistent"
    return ServerSetup(arguments + CPU_ONLY, environment, "the CPU, kernels in host emulation")


def missing_requirement() -> str | None:
    """What has to be installed before a server with the plugin can start, as a sentence; None when nothing has."""
    if importlib.util.find_spec("sglang") is None:
        return f"SGLang is not installed in this environment: pip install sglang=={TESTED_SGLANG}"
    names = {entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if ENTRY_POINT not in names:
        return "sgl-lowlatency is not installed in this environment (SGLang finds no entry point): pip install ."
    return None


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_free_port(port: int) -> bool:
    """Whether a server may listen on this TCP port of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of connections just closed is free, as to SGLang
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
