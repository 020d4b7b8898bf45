"""Device memory as a kernel would like it to be: every access takes effect at once, in order, for everyone.

Also what both memories share: allocations, bounds, and the operations that instructions ask for. Scopes are numbered as the encoding does, sc0 +
2 sc1: 0 a wave, 1 a workgroup, 2 the GPU (agent), 3 the system.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cdna.errors import MemoryFault

BASE = 0x7E00_0000_0000  # of every address: nothing fits in 32 bits, so that a lost upper half is a fault
ALIGNMENT = 256  # bytes; at least as much lies between two allocations
AGENT, SYSTEM = 2, 3


class Memory:
    """One address space for host and GPUs. bytes: uint8 [size], what host and peers see. Workgroup b runs on XCD b % num_xcds of its GPU."""

    def __init__(self, size: int = 1 << 22, *, num_xcds: int = 8):
        self.num_xcds = num_xcds
        self.bytes = np.zeros(size, np.uint8)
        self._allocated = np.zeros(size, bool)
        self._top = ALIGNMENT
        self._images: dict[int, int] = {}

    # --- the host's side ------------------------------------------------------------------------------------------
    def alloc(self, size: int) -> int:
        """Address of size bytes, filled with 0xFF: NaN in every float format. Raises MemoryError where the arena is full."""
        start = self._top
        if start + size + ALIGNMENT > len(self.bytes):
            raise MemoryError(f"{size} bytes do not fit: {start} of {len(self.bytes)} are in use")
        self._allocated[start : start + size] = True
        self.bytes[start : start + size] = 0xFF
        self._top = (start + size + 2 * ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return BASE + start

    def put(self, array: np.ndarray) -> int:
        """Address of a copy of array."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.alloc(data.size)
        self.bytes[address - BASE : address - BASE + data.size] = data
        return address

    def get(self, address: int, dtype, shape: tuple[int, ...]) -> np.ndarray:
        """A copy of what the host sees at address."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[address - BASE : address - BASE + size].copy().view(dtype).reshape(shape)

    def set(self, address: int, array: np.ndarray) -> None:
        """The host writes array at address, between launches."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes[address - BASE : address - BASE + data.size] = data

    def image(self, program) -> int:
        """What to add to a program's virtual addresses: its segments are copied in once."""
        if id(program) not in self._images:
            segments = program.code_object.segments
            base = self.alloc(max(start + len(content) for start, content in segments))
            for start, content in segments:
                self.set(base + start, np.frombuffer(content, np.uint8))
            self._images[id(program)] = base
        return self._images[id(program)]

    # --- the instructions' side -------------------------------------------------------------------------------------
    def places(self, addresses: np.ndarray, size: int, what: str) -> np.ndarray:
        """Indices [n, size] into bytes. Raises MemoryFault where an access is not inside one allocation."""
        starts = addresses - BASE
        if starts.size:
            wrong = (starts < 0) | (starts + size > len(self.bytes))
            if not wrong.any():
                wrong = ~(self._allocated[starts] & self._allocated[starts + size - 1])
            if wrong.any():
                lane = int(np.flatnonzero(wrong)[0])
                raise MemoryFault(f"{what}: {size} bytes at {int(addresses[lane]):#x} are outside every allocation ({int(wrong.sum())} lanes)")
        return starts[:, None] + np.arange(size)

    def read(self, w, addresses: np.ndarray, size: int, scope: int, what: str) -> np.ndarray:
        """uint8 [n, size] of int64 [n]."""
        return self.bytes[self.places(addresses, size, what)]

    def read_scalar(self, w, address: int, size: int, what: str) -> np.ndarray:
        return self.bytes[self.places(np.array([address], np.int64), size, what)][0]

    def write(self, w, addresses: np.ndarray, data: np.ndarray, scope: int, what: str) -> None:
        """data: uint8 [n, size]. Where lanes write one byte, the last lane's stays."""
        self.bytes[self.places(addresses, data.shape[1], what)] = data

    def land(self, w, apply: Callable[[], None], poison: Callable[[], None] | None) -> None:
        """apply: puts loaded data where it belongs. poison: makes the place unusable until then."""
        apply()

    def land_in_lds(self, w, apply: Callable[[], None]) -> None:
        apply()

    def exchange(self, w, addresses: np.ndarray, size: int, scope: int, update: Callable[[int, bytes], bytes], what: str) -> np.ndarray:
        """Replaces the bytes of each address, one after another, by update(number, old); returns the old ones, uint8 [n, size]."""
        places = self.places(addresses, size, what)
        before = np.empty((len(addresses), size), np.uint8)
        for n, place in enumerate(places):
            before[n] = self.bytes[place]
            self.bytes[place] = np.frombuffer(update(n, before[n].tobytes()), np.uint8)
        return before

    def wait(self, w, left: int) -> None:
        """s_waitcnt vmcnt(left)."""

    def write_back(self, w, scope: int) -> None:
        """buffer_wbl2."""

    def invalidate(self, w, scope: int) -> None:
        """buffer_inv."""

    def invalidate_scalar(self, w) -> None:
        """s_dcache_inv."""

    def end(self, w) -> None:
        """s_endpgm."""

    def turn(self, w) -> None:
        """The machine leaves a wave for another one: a chance for what it stored."""

    def finish(self, gpu: int, *, is_last: bool) -> None:
        """Every workgroup of a GPU's launch has ended. is_last: of its stream, so that the host waits for it."""
