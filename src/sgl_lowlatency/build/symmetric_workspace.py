"""The workspaces that the ranks of a tensor-parallel group share: allocated, exchanged, mapped and checked before the first launch.

CUDA, and ROCm with a HIP runtime: device memory of its own, mapped by IPC; never part of SGLang's communicators. CPU, in emulation: a file that
the processes map.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sgl_lowlatency.build.agreement import DisagreementError, exchange, require_agreement
from sgl_lowlatency.kernels import symmetric_workspace as shared
from sgl_lowlatency.kernels.hip import HipRuntime
from sgl_lowlatency.kernels.hip_memory import HipSharedMemory
from sgl_lowlatency.kernels.symmetric_workspace import MAX_RANKS, PARITIES, RENDEZVOUS_BYTES, MappedWorkspaces, prepare, symmetric_layout

WHAT = "symmetric workspace"


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the ranks must have in common, and the layout that follows from it. spec: its identity. plan_hash: of the static plans. grid: blocks a
    rank. widths: rows of steps."""

    spec: str
    plan_hash: str
    grid: int
    widths: tuple[int, ...]
    max_rows: int
    hidden: int
    copies: int = PARITIES  # of the tiles' buffer

    def layout(self, num_ranks: int) -> Any:
        """Of each rank's workspace: offsets `rendezvous` and `unwritten`, and `total_bytes`."""
        return symmetric_layout(num_ranks, self.max_rows, self.hidden, self.copies)

    def claim(self) -> dict[str, Any]:
        """All of it as JSON has it, by name."""
        return {**dataclasses.asdict(self), "widths": list(self.widths)}


class SymmetricWorkspace:
    """This rank's workspace and its views of the others', until close(). `mapped` is what kernels take."""

    def __init__(self, mapped: MappedWorkspaces, undo: contextlib.ExitStack, own: Any, meet: Callable[[], object]):
        self.mapped, self._undo, self._own, self._meet = mapped, undo, own, meet

    def close(self) -> None:
        """Unmaps the peers, and gives the memory back once every rank has unmapped it. All ranks call it together, with no launch under way.

        Raises DisagreementError naming a rank that does not come; the memory is left to the end of the process then, since that rank may
        still have it mapped.
        """
        self._undo.close()
        self._meet()
        self._own.free()


class SharedTerms(Protocol):
    """Terms, or those of another kernel."""

    def layout(self, num_ranks: int) -> Any: ...

    def claim(self) -> dict[str, Any]: ...


def build_symmetric_workspace(
    terms: SharedTerms, device: torch.device, group: dist.ProcessGroup, deadline_s: float, hip: HipRuntime | None = None
) -> SymmetricWorkspace:
    """Allocates, exchanges handles over `group` (gloo), maps every peer and checks that each mapping is the memory that its owner claims.

    All ranks call it together. Raises DisagreementError, on every rank alike, when terms or layouts differ or a mapping is not what was
    claimed; when a rank does not come within deadline_s it is named. ValueError for a group of more than 8. Device memory whose handle the others
    have seen is then left to the end of the process. hip: of a ROCm device.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if num_ranks > MAX_RANKS:
        raise ValueError(f"{WHAT}: {num_ranks} ranks are more than {MAX_RANKS}")
    layout, claim = terms.layout(num_ranks), terms.claim()
    digest = hashlib.sha256(json.dumps(claim, sort_keys=True).encode()).digest()
    memory_of = _FileMemory if device.type == "cpu" else _CudaMemory if hip is None else _HipMemoryOf(hip)
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, contextlib.ExitStack() as undo:
        own = memory_of.allocate(layout, undo)
        block = shared.pack_rendezvous(own.address, layout.total_bytes, digest, rank, num_ranks)
        own.write(layout.rendezvous, block)
        claim = {**claim, "bytes": layout.total_bytes, "device type": device.type}
        private = {"handle": own.handle, "rendezvous": block.hex()}
        received = exchange({"claim": claim, "private": private}, group, deadline_s, WHAT)
        require_agreement([one["claim"] for one in received], WHAT)
        addresses, wrong = _map_peers(memory_of, received, own, layout, rank, undo)
        # A second round: a rank that could not map a peer takes the others with it.
        verdicts = exchange({"wrong": wrong}, group, deadline_s, f"{WHAT}, after mapping")
        failures = [f"rank {other}: {what}" for other, verdict in enumerate(verdicts) for what in verdict["wrong"]]
        if failures:
            raise DisagreementError(f"{WHAT}: mappings failed:\n  - " + "\n  - ".join(failures))
        own.everyone_has_mapped()
        kept = undo.pop_all()
    mapped = MappedWorkspaces(rank, tuple(addresses), layout, owner=kept)
    return SymmetricWorkspace(mapped, kept, own, lambda: exchange({}, group, deadline_s, f"{WHAT}, closing"))


def _map_peers(
    memory_of: Any, received: Sequence[dict], own: Any, layout: Any, rank: int, undo: contextlib.ExitStack
) -> tuple[list[int], list[str]]:
    """(addresses by rank, what is wrong with the mappings)."""
    addresses, wrong = [], []
    for other, one in enumerate(received):
        if other == rank:
            addresses.append(own.address)
            continue
        try:
            peer = memory_of.map(one["private"]["handle"], layout, undo)
            found = peer.read(layout.rendezvous, RENDEZVOUS_BYTES)
        except (OSError, RuntimeError, ValueError) as error:
            wrong.append(f"cannot map rank {other}: {error}")
            continue
        if found.hex() != one["private"]["rendezvous"]:
            wrong.append(f"what is mapped of rank {other} is not the workspace that it claims")
        addresses.append(peer.address)
    return addresses, wrong


class _FileMemory:
    """Memory that processes of one host share through a file, which has no name any more once everyone has mapped it."""

    def __init__(self, address: int, view: torch.Tensor, path: str, unlink: Callable[[], None] = lambda: None):
        self.address, self.handle, self._view, self._unlink = address, path, view, unlink

    @classmethod
    def allocate(cls, layout: Any, undo: contextlib.ExitStack) -> _FileMemory:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        descriptor, path = tempfile.mkstemp(prefix=f"sgl-lowlatency-{os.getpid()}-", dir=folder)
        with os.fdopen(descriptor, "r+b") as file:
            unlink = contextlib.ExitStack()
            unlink.callback(os.unlink, path)
            undo.push(unlink)
            file.truncate(layout.total_bytes)
            memory = cls._of_file(file, path, layout, unlink.close)
        undo.push(memory._keep)
        prepare(memory._view, layout)
        return memory

    @classmethod
    def map(cls, handle: str, layout: Any, undo: contextlib.ExitStack) -> _FileMemory:
        with open(handle, "r+b") as file:
            memory = cls._of_file(file, handle, layout)
        undo.push(memory._keep)
        return memory

    @classmethod
    def _of_file(cls, file: Any, path: str, layout: Any, unlink: Callable[[], None] = lambda: None) -> _FileMemory:
        view = torch.frombuffer(mmap.mmap(file.fileno(), layout.total_bytes), dtype=torch.uint8)
        return cls(view.data_ptr(), view, path, unlink)

    def write(self, offset: int, content: bytes) -> None:
        self._view[offset : offset + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def read(self, offset: int, num_bytes: int) -> bytes:
        return bytes(self._view[offset : offset + num_bytes].tolist())

    def everyone_has_mapped(self) -> None:
        self._unlink()

    def free(self) -> None:
        """What is mapped goes with the last view of it."""

    def _keep(self, *_: object) -> None:
        """On an exit stack: mapped as long as that has not been closed."""


class _CudaMemory:
    """Memory of the current device that other processes map by its IPC handle."""

    def __init__(self, address: int, handle: str):
        self.address, self.handle = address, handle

    @classmethod
    def allocate(cls, layout: Any, undo: contextlib.ExitStack) -> _CudaMemory:
        address = shared.allocate(layout.total_bytes)
        memory = cls(address, shared.ipc_handle(address).hex())
        memory.write(0, bytes(layout.unwritten))
        return memory

    @classmethod
    def map(cls, handle: str, layout: Any, undo: contextlib.ExitStack) -> _CudaMemory:
        address = shared.open_ipc(bytes.fromhex(handle))
        undo.callback(shared.close_ipc, address)
        return cls(address, handle)

    def write(self, offset: int, content: bytes) -> None:
        shared.copy_to_device(self.address + offset, content)

    def read(self, offset: int, num_bytes: int) -> bytes:
        return shared.copy_from_device(self.address + offset, num_bytes)

    def everyone_has_mapped(self) -> None:
        pass

    def free(self) -> None:
        shared.free(self.address)


class _HipMemory(HipSharedMemory):
    """Memory of the current ROCm device that other processes map."""

    def everyone_has_mapped(self) -> None:
        pass


class _HipMemoryOf:
    """What _CudaMemory's class methods are, of one HIP runtime."""

    def __init__(self, runtime: HipRuntime):
        self._runtime = runtime

    def allocate(self, layout: Any, undo: contextlib.ExitStack) -> _HipMemory:
        memory = _HipMemory.allocate(self._runtime, layout.total_bytes)
        memory.write(0, bytes(layout.tiles))  # all but the tiles is zero
        return memory

    def map(self, handle: str, layout: Any, undo: contextlib.ExitStack) -> _HipMemory:
        memory = _HipMemory.map(self._runtime, handle)
        undo.callback(memory.close)
        return memory
