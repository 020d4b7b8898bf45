"""Runs k1 and k2 as the compiler made them: their code objects in the interpreter, in the place of host emulation."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import tempfile
from pathlib import Path
from unittest import mock

import cdna
import monokernel_cases
import numpy as np
from cdna import toolchain

from sgl_lowlatency.kernels.fault import MonokernelFault, describe_mono_fault
from sgl_lowlatency.kernels.host_words import COUNTER_BYTES, FAULT_BYTES

CSRC = Path(__file__).resolve().parent.parent / "csrc"
THREADS = 512  # of a workgroup, abi::kMonoThreads


@functools.cache
def program(kernel: str, isa: str, planted: int = 0) -> cdna.Program:
    """Compiles csrc/launch/<kernel>.hip with a planted bug, or none."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"-I{CSRC}", f"-I{CSRC / 'include'}", f"-DSGL_LOWLATENCY_PLANTED={planted}"]
        path = toolchain.compile_hip(CSRC / f"launch/{kernel}.hip", Path(folder) / f"{kernel}.co", isa, *options)
        return cdna.Program.load(path)


def _bytes_at(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _regions(ranks: list, streams: list, inputs: tuple) -> dict[int, int]:
    """Host address -> size of everything that a step's parameters point into."""
    tensors = [*inputs]
    found = {}
    for rank, stream in zip(ranks, streams, strict=True):
        for layer in rank._layers:
            tensors += [getattr(layer, field.name) for field in dataclasses.fields(layer)]
        tensors += [rank._cos_sin, rank.handover, rank.state, rank.q, rank.x, *rank.residuals, rank.routed_ids, rank.routed_logits]
        tensors += [*rank._k_buffers, *rank._v_buffers, rank._req_to_token]
        found[rank._host.address] = FAULT_BYTES + COUNTER_BYTES
        for address in rank.workspaces.addresses:
            found[address] = rank.workspaces.layout.total_bytes
        if stream:
            found[stream[0].x] = stream[0].launch.rows * rank.geometry.hidden * 2  # the embedding
    return found | {t.data_ptr(): t.numel() * t.element_size() for t in tensors if hasattr(t, "data_ptr") and t.numel()}


class Interpreted:
    """Stands in for monokernel_cases.emulate: the same parameters, with every address moved into the interpreter's memory.

    Each rank is a GPU of its own, with its launches one after another. weak: None for memory that reorders nothing, or the keyword arguments of
    cdna.WeakMemory. seed: of the schedule. planted: number of a bug that is compiled in. instructions: of waves, run so far.
    """

    def __init__(self, isa: str, *, weak: dict | None = None, seed: int | None = None, planted: int = 0, budget: int = 20_000_000):
        self.isa, self.weak, self.seed, self.planted, self.budget = isa, weak, seed, planted, budget
        self.instructions = 0
        self.inputs: tuple = ()

    @contextlib.contextmanager
    def in_place_of_emulation(self):
        """monokernel_cases.Group then runs code objects."""
        with mock.patch.object(monokernel_cases, "emulate", self), mock.patch.object(monokernel_cases, "MonoInputs", self._inputs):
            yield self

    def _inputs(self, positions, out_cache_loc, seq_lens, req_pool_indices, *rest):
        self.inputs = positions, out_cache_loc, seq_lens, req_pool_indices
        return _MonoInputs(positions, out_cache_loc, seq_lens, req_pool_indices, *rest)

    def __call__(self, ranks, streams, options=None, regions=(), slowness=()):
        """As kernels.monokernel.emulate: raises MonokernelFault where a rank left a record."""
        host = _regions(ranks, streams, self.inputs)
        size = sum((n + 1023) // 256 * 256 for n in host.values()) + (1 << 20)
        memory = cdna.Memory(size) if self.weak is None else cdna.WeakMemory(size, **self.weak)
        moved = {address: memory.put(_bytes_at(address, n)) for address, n in host.items()}
        machine = cdna.Machine(memory, seed=self.seed, host=lambda: self._acknowledge(ranks, memory, moved))
        queues = [
            [
                cdna.Launch(
                    program(kernel, self.isa, self.planted), kernel, rank.grid, THREADS, _relocated(params.to_bytes(), host, moved), gpu=rank.rank
                )
                for kernel, params in zip(itertools.cycle(("k1", "k2")), stream)
            ]
            for rank, stream in zip(ranks, streams, strict=True)
            if stream
        ]
        try:
            self.instructions += machine.run(*queues, budget=self.budget).instructions
        except cdna.Trap as trap:
            self._take_back(memory, host, moved)
            records = [record for rank in ranks if (record := rank.fault()) is not None]
            raise MonokernelFault("; ".join(map(describe_mono_fault, records)) or f"no record: {trap}") from trap
        self._take_back(memory, host, moved)
        return Report()

    def _acknowledge(self, ranks: list, memory: cdna.Memory, moved: dict[int, int]) -> None:
        """What the host does while a kernel waits with its record: it reads it, and says so."""
        for rank in ranks:
            here, there = _bytes_at(rank._host.address, FAULT_BYTES), moved[rank._host.address]
            here[:] = memory.get(there, np.uint8, (FAULT_BYTES,))
            if rank.fault() is not None:
                rank.acknowledge_fault()
                memory.set(there, here)

    def _take_back(self, memory: cdna.Memory, host: dict[int, int], moved: dict[int, int]) -> None:
        for address, size in host.items():
            _bytes_at(address, size)[:] = memory.get(moved[address], np.uint8, (size,))


def _relocated(params: bytes, host: dict[int, int], moved: dict[int, int]) -> bytes:
    """params with every word that is an address of one of the host's regions turned into the interpreter's."""
    words = np.frombuffer(params, np.uint64).copy()
    for i, word in enumerate(map(int, words)):
        for address, size in host.items():
            if address <= word < address + size:
                words[i] = moved[address] + word - address
    return words.tobytes()


@dataclasses.dataclass(frozen=True)
class Report:
    """What the interpreter has of emulation's report: it looks for no races, weak memory shows them in the results."""

    num_races: int = 0


_MonoInputs = monokernel_cases.MonoInputs
