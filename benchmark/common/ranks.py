"""The ranks of a benchmark on several GPUs: this module started again once a rank, each a process with a GPU of its own, or emulated without one.

The parent calls `run`; a child finds `--rank`, `--num-ranks` and `--store` among its arguments (add_arguments) and calls `join`.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmark.common import deadline

# No multicast object is made, by whomever: unicast is what is measured.
UNICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclasses.dataclass(frozen=True)
class Place:
    """A child's rank, the device it runs on, and the group's CPU side."""

    rank: int
    num_ranks: int
    device: torch.device
    group: dist.ProcessGroup

    def barrier(self) -> None:
        """All ranks are here, and their GPUs have nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(self.group)

    def gather(self, value: object) -> list:
        """Every rank's, in rank order."""
        found: list = [None] * self.num_ranks
        dist.all_gather_object(found, value, self.group)
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--ranks and --device, and what `run` tells its children."""
    parser.add_argument("--ranks", type=int, default=2, help="processes, a GPU each (default 2)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: host emulation, whose times mean nothing")
    for name in ("--rank", "--store", "--work"):  # --work: the scratch folder that gpu_checks.sh names to every script; nothing is written
        parser.add_argument(name, default=None, help=argparse.SUPPRESS)


def typed(words: list[str]) -> list[str]:
    """A child's arguments as its parent was given them."""
    return words[: words.index("--rank")] if "--rank" in words else words


def missing(args: argparse.Namespace) -> str | None:
    """Why the ranks cannot run here, or None."""
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        return f"{args.ranks} ranks need as many GPUs, {torch.cuda.device_count()} are visible"
    return None


def start(module: str, words: list[str], num_ranks: int, **popen) -> list[subprocess.Popen]:
    """A process a rank that runs `python -m module words`."""
    store = Path(tempfile.mkdtemp(prefix="sgl-lowlatency-ranks-")) / "store"
    env = os.environ | UNICAST
    return [
        deadline.spawn([sys.executable, "-m", module, *words, "--rank", str(rank), "--store", str(store)], env=env, **popen)
        for rank in range(num_ranks)
    ]


def run(module: str, words: list[str], num_ranks: int, limit_s: float) -> int:
    """Starts the ranks and waits for all; 0 if all ended well, else the first other status. One that fails takes the others with it."""
    processes, end_s = start(module, words, num_ranks), time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                time.sleep(2.0)  # the others may have a word to say
                break
            if time.monotonic() > end_s:
                deadline.say(f"ranks still run after {limit_s:.0f} s: stopping them")
                return 124
            time.sleep(0.05)
        return next((code for process in processes if (code := process.poll())), 0)
    finally:
        deadline.kill_all()


def join(args: argparse.Namespace) -> Place:
    """In a child: meets the other ranks over gloo."""
    rank = int(args.rank)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo", init_method=f"file://{args.store}", rank=rank, world_size=args.ranks, timeout=datetime.timedelta(seconds=120)
    )
    atexit.register(dist.destroy_process_group)  # left to the interpreter's end, gloo's threads may abort the process
    return Place(rank, args.ranks, device, dist.group.WORLD)
