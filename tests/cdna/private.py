"""What is no lane's and every lane's own: the scalar loads, and scratch memory, each lane's own bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cdna.errors import MemoryFault
from cdna.operands import I64, M32, Operands
from cdna.tables import entry
from cdna.vmem import LOADS, STORES, deliver, stored


def _scratch(o: Operands, vector: int, scalar: int) -> Callable:
    offset = o.number("offset")
    distance = None if o.texts[vector] == "off" else o.lanes(vector)
    base = None if o.texts[scalar] == "off" else o.scalar(scalar)
    o.take("nt")

    def places(w, size):
        if w.scratch is None:
            w.scratch = np.full((64, w.workgroup.scratch_bytes), 0xFF, np.uint8)
        starts = np.full(len(w.lanes), offset, I64) + (base(w) if base else 0)
        if distance is not None:
            starts = starts + distance(w)[w.lanes].astype(I64)
        if starts.size and (starts.min() < 0 or starts.max() + size > w.scratch.shape[1]):
            raise MemoryFault(f"scratch address {int(starts.max())} + {size} of {w.scratch.shape[1]} bytes")
        return w.lanes[:, None], starts[:, None] + np.arange(size)

    return places


def _scratch_load(name: str, kind: str) -> None:
    size, extension, half = LOADS[kind]

    @entry(name)
    def make(o: Operands):
        places, (file, first, _) = _scratch(o, 1, 2), o.registers(0)
        return lambda w: deliver(w, file, first, _scratch_bytes(w, places, size), extension, half)


def _scratch_bytes(w, places: Callable, size: int) -> np.ndarray:
    where = places(w, size)
    return w.scratch[where]


def _scratch_store(name: str, kind: str) -> None:
    size, shift = STORES[kind]

    @entry(name)
    def make(o: Operands):
        places, data = _scratch(o, 0, 2), stored(o, 1, size, shift)

        def step(w):
            where = places(w, size)
            w.scratch[where] = data(w)

        return step


for _kind in LOADS:
    _scratch_load(f"scratch_load_{_kind}", _kind)
for _kind in STORES:
    _scratch_store(f"scratch_store_{_kind}", _kind)


def _scalar_load(name: str, dwords: int, *, buffer: bool) -> None:
    @entry(name)
    def make(o: Operands):
        write, offset, extra = o.to_scalar(0, dwords), o.number("offset"), o.scalar(2)
        base = o.scalar(1, 4 if buffer else 2)

        def step(w):
            distance = extra(w) + offset
            resource = base(w)
            address = resource & (1 << 48) - 1 if buffer else resource
            if buffer and distance + 4 * dwords > resource >> 64 & M32:
                raise MemoryFault(f"{name}: offset {distance} of {resource >> 64 & M32} bytes")
            data = w.workgroup.memory.read_scalar(w, address + distance & ~3, 4 * dwords, name)
            write(w, int.from_bytes(data.tobytes(), "little"))

        return step


for _dwords in (1, 2, 3, 4, 8, 16):
    _suffix = f"x{_dwords}" if _dwords > 1 else ""
    for _buffered in (False, True):
        _scalar_load(f"s_{'buffer_' if _buffered else ''}load_dword{_suffix}", _dwords, buffer=_buffered)
