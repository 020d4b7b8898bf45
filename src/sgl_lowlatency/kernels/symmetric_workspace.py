"""The ranks' workspaces of abi/symmetric_workspace.hpp as one process sees them."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import torch

from sgl_lowlatency.kernels import abi  # first: raises with what to do when the extension is missing
from sgl_lowlatency import _C

MAX_RANKS: int = _C.abi.kMaxRanks
RENDEZVOUS_BYTES: int = _C.abi.kRendezvousBytes
PARITIES: int = _C.abi.kParities  # copies of the tiles' buffer that epilogue_multicast takes in turn

# symmetric_layout(num_ranks, max_rows, hidden, copies=PARITIES) -> SymmetricLayout with byte offsets and total_bytes
symmetric_layout = _C.symmetric_layout

# pack_rendezvous(address, total_bytes, terms, rank, num_ranks) -> the bytes of abi::Rendezvous; terms: a SHA-256
pack_rendezvous = _C.pack_rendezvous


@dataclasses.dataclass(frozen=True)
class MappedWorkspaces:
    """One workspace a rank, mapped here.

    rank: the first of this process's ranks. addresses: of every rank's workspace, in this process. layout: what all of them have,
    abi::SymmetricLayout or of a draft abi::DraftLayout. multicast: an address whose stores reach all of them, or 0. owner: what keeps the mappings
    alive.
    """

    rank: int
    addresses: tuple[int, ...]
    layout: Any
    owner: object
    multicast: int = 0

    def name_in(self, record: int, at: int) -> None:
        """Lets the fault record at address `record` name the group, whose abi::PeerGroup is put at address `at`: host memory that the device sees."""
        packed = _C.pack_peer_group(self.rank, self.layout, list(self.addresses))
        ctypes.memmove(at, packed, len(packed))
        ctypes.c_uint64.from_address(record + _C.abi.kFaultGroupOffset).value = at


def prepare(memory: torch.Tensor, layout: Any) -> None:
    """Puts a workspace, uint8 [layout.total_bytes], into its first state: words that are their own flags unwritten, all in front of them zero."""
    memory.fill_(0xFF)
    memory[: layout.unwritten] = 0


class _CudaBytes:
    """Device memory as torch takes it from other libraries."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 2}


def bytes_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes]: a view of memory of this process that torch did not allocate; the caller keeps it."""
    if device.type == "cuda":
        return torch.as_tensor(_CudaBytes(address, num_bytes), device=device)
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def allocate(num_bytes: int) -> int:
    """Address of memory of the current device that other processes may map, every byte 0xff; it takes whole blocks of 2 MiB. Raises RuntimeError naming
    the CUDA error, as all below."""
    return _C.allocate_symmetric(num_bytes)


def free(address: int) -> None:
    """Gives memory of `allocate` back. No other process may have it mapped."""
    _C.free_symmetric(address)


def ipc_handle(address: int) -> bytes:
    """What another process maps memory of `allocate` by."""
    return _C.ipc_handle(address)


def open_ipc(handle: bytes) -> int:
    """Maps another process's memory into the current device's context; its address here."""
    return _C.open_ipc(handle)


def close_ipc(address: int) -> None:
    """Unmaps memory of `open_ipc`."""
    _C.close_ipc(address)


def copy_to_device(address: int, content: bytes) -> None:
    """Returns when it has been copied."""
    _C.copy_to_device(address, content)


def copy_from_device(address: int, num_bytes: int) -> bytes:
    """Of this process's memory or of what it has mapped."""
    return _C.copy_from_device(address, num_bytes)


def views_of_ranks(mapped: MappedWorkspaces) -> list[MappedWorkspaces]:
    """What each rank of a process that has all of them sees."""
    return [MappedWorkspaces(rank, mapped.addresses, mapped.layout, mapped) for rank in range(len(mapped.addresses))]


def virtual_workspaces(
    num_ranks: int, max_rows: int, hidden: int, device: torch.device, copies: int = PARITIES, most_rows: int = _C.abi.kMaxPushedRows
) -> MappedWorkspaces:
    """Workspaces of `num_ranks` virtual ranks in one device's memory. copies: of the tiles' buffer. most_rows: of the kernel's launches. Raises
    ValueError for sizes out of range."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"num_ranks {num_ranks} is outside 1..{MAX_RANKS}")
    if not 1 <= max_rows <= most_rows:
        raise ValueError(f"max_rows {max_rows} is outside 1..{most_rows}")
    if hidden % abi.TILE_ROWS or not 0 < hidden <= _C.abi.kMaxReducedHidden:
        raise ValueError(f"hidden {hidden} is not a multiple of {abi.TILE_ROWS} up to {_C.abi.kMaxReducedHidden}")
    layout = symmetric_layout(num_ranks, max_rows, hidden, copies)
    memory = torch.empty(num_ranks, layout.total_bytes + 128, dtype=torch.uint8, device=device)
    views = []
    for row in memory:
        begin = -row.data_ptr() % 128
        views.append(row[begin : begin + layout.total_bytes])
        prepare(views[-1], layout)
    return MappedWorkspaces(0, tuple(view.data_ptr() for view in views), layout, owner=views)
