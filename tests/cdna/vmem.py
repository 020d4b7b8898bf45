"""Loads and stores of global, flat and buffer memory, and LDS-DMA."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cdna import lds
from cdna.operands import I64, SHARED_BASE, U, Operands
from cdna.tables import entry
from cdna.wave import M0, POISON

# Type of a load: (bytes, "u" or "s" of what is less than a dword, half that it is put in).
LOADS = {
    "ubyte": (1, "u", None),
    "sbyte": (1, "s", None),
    "ushort": (2, "u", None),
    "sshort": (2, "s", None),
    "ubyte_d16": (1, "u", "low"),
    "ubyte_d16_hi": (1, "u", "high"),
    "sbyte_d16": (1, "s", "low"),
    "sbyte_d16_hi": (1, "s", "high"),
    "short_d16": (2, "u", "low"),
    "short_d16_hi": (2, "u", "high"),
    "dword": (4, "u", None),
    "dwordx2": (8, "u", None),
    "dwordx3": (12, "u", None),
    "dwordx4": (16, "u", None),
}
STORES = {"byte": (1, 0), "byte_d16_hi": (1, 16), "short": (2, 0), "short_d16_hi": (2, 16), "dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0)}
STORES["dwordx4"] = (16, 0)  # type: (bytes, shift)
Addresses = Callable  # of a wave: int64 of the active lanes


def _scope(o: Operands) -> int:
    o.take("nt")  # a hint for the caches: no order, no scope
    return o.take("sc0") | o.take("sc1") << 1


def _extended(data: np.ndarray, kind: str) -> np.ndarray:
    """uint8 [n, 1 or 2] to uint32 [n]."""
    types = {(1, "u"): np.uint8, (1, "s"): np.int8, (2, "u"): np.uint16, (2, "s"): np.int16}
    return np.ascontiguousarray(data).view(types[data.shape[1], kind]).ravel().astype(np.int64).astype(U)


def deliver(w, file: str, first: int, data: np.ndarray, kind: str, half: str | None) -> None:
    """Loaded bytes of the active lanes, uint8 [n, size], on their way to registers."""
    rows, lanes = w.v if file == "v" else w.a, w.lanes
    size = data.shape[1]
    if half is not None:
        value = _extended(data, kind) & U(0xFFFF)

        def merge():
            old = rows[first, lanes]
            rows[first, lanes] = old & U(0xFFFF) | value << U(16) if half == "high" else old & U(0xFFFF0000) | value

        return w.workgroup.memory.land(w, merge, None)
    values = _extended(data, kind)[None] if size < 4 else np.ascontiguousarray(data).view(U).T
    last = first + len(values)

    def put():
        rows[first:last, lanes] = values

    def poison():
        rows[first:last, lanes] = POISON

    w.workgroup.memory.land(w, put, poison)


def stored(o: Operands, k: int, size: int, shift: int) -> Callable:
    """Reads what a store writes: uint8 [active lanes, size]."""
    rows = o.rows(k, max(1, size // 4))

    def read(w):
        values = rows(w)[:, w.lanes] >> U(shift)
        return np.ascontiguousarray(values.T).view(np.uint8)[:, :size]

    return read


def global_addresses(o: Operands, vector: int, scalar: int) -> Addresses:
    """A 64-bit vector address, or a 64-bit scalar base and an unsigned 32-bit vector offset; both plus the instruction's offset."""
    offset = o.number("offset")
    if o.texts[scalar] == "off":
        read = o.u64(vector)
        return lambda w: np.broadcast_to(read(w), 64)[w.lanes].astype(I64) + offset
    base, distance = o.scalar(scalar, 2), o.lanes(vector)
    return lambda w: distance(w)[w.lanes].astype(I64) + (base(w) + offset)


def _load(name: str, kind: str) -> None:
    size, extension, half = LOADS[kind]

    @entry(name)
    def make(o: Operands):
        addresses, (file, first, _), scope = global_addresses(o, 1, 2), o.registers(0), _scope(o)
        return lambda w: deliver(w, file, first, w.workgroup.memory.read(w, addresses(w), size, scope, name), extension, half)


def _store(name: str, kind: str) -> None:
    size, shift = STORES[kind]

    @entry(name)
    def make(o: Operands):
        addresses, data, scope = global_addresses(o, 0, 2), stored(o, 1, size, shift), _scope(o)
        return lambda w: w.workgroup.memory.write(w, addresses(w), data(w), scope, name)


def _to_lds(w, data: np.ndarray, offset: int, what: str) -> None:
    """LDS-DMA: m0 + offset + lane * size, inactive lanes counted."""
    size = data.shape[1]
    where = lds.places(w, (w.s[M0] & 0x3FFFF) + offset + w.lanes * size, size, what)
    target = w.workgroup.lds

    def put():
        target[where] = data

    w.workgroup.memory.land_in_lds(w, put)


def _load_to_lds(name: str, size: int) -> None:
    @entry(name)
    def make(o: Operands):
        offset = int(o.modifiers.get("offset", "0"), 0)  # of both addresses
        addresses, scope = global_addresses(o, 0, 1), _scope(o)
        return lambda w: _to_lds(w, w.workgroup.memory.read(w, addresses(w), size, scope, name), offset, name)


for _kind in LOADS:
    _load(f"global_load_{_kind}", _kind)
for _kind in STORES:
    _store(f"global_store_{_kind}", _kind)
for _kind in ("dword", "dwordx3", "dwordx4"):
    _load_to_lds(f"global_load_lds_{_kind}", LOADS[_kind][0])


# --- flat: global memory, or LDS where the address is in its window ------------------------------------------------
def in_lds_window(w, addresses: np.ndarray) -> np.ndarray:
    """bool [n]: lanes whose address is in the window of LDS."""
    return (addresses >= SHARED_BASE) & (addresses < SHARED_BASE + (1 << 32))


def flat_addresses(o: Operands, k: int) -> Addresses:
    read, offset = o.u64(k), o.number("offset")
    return lambda w: np.broadcast_to(read(w), 64)[w.lanes].astype(I64) + offset


def _flat_load(name: str, kind: str) -> None:
    size, extension, half = LOADS[kind]

    @entry(name)
    def make(o: Operands):
        addresses, (file, first, _), scope = flat_addresses(o, 1), o.registers(0), _scope(o)

        def step(w):
            where = addresses(w)
            inside = in_lds_window(w, where)
            data = np.empty((len(where), size), np.uint8)
            data[inside] = w.workgroup.lds[lds.places(w, where[inside] - SHARED_BASE, size, name)]
            data[~inside] = w.workgroup.memory.read(w, where[~inside], size, scope, name)
            deliver(w, file, first, data, extension, half)

        return step


def _flat_store(name: str, kind: str) -> None:
    size, shift = STORES[kind]

    @entry(name)
    def make(o: Operands):
        addresses, data, scope = flat_addresses(o, 0), stored(o, 1, size, shift), _scope(o)

        def step(w):
            where, values = addresses(w), data(w)
            inside = in_lds_window(w, where)
            w.workgroup.lds[lds.places(w, where[inside] - SHARED_BASE, size, name)] = values[inside]
            if not inside.all():
                w.workgroup.memory.write(w, where[~inside], values[~inside], scope, name)

        return step


for _kind in LOADS:
    _flat_load(f"flat_load_{_kind}", _kind)
for _kind in STORES:
    _flat_store(f"flat_store_{_kind}", _kind)


# --- buffers: a base and a size in four scalar registers -------------------------------------------------------------
def _buffer(o: Operands, vector: int) -> Callable:
    """Reads (addresses, whether each lane is inside). Raw buffers only: a stride is an error, an index too."""
    resource, extra, offset = o.scalar_index(vector + 1), o.scalar(vector + 2), o.number("offset")
    if resource is None:
        raise o.unknown(f"buffer {o.texts[vector + 1]!r}")
    if o.take("offen"):
        distance = o.lanes(vector)
    elif o.texts[vector] in ("off", "0"):
        distance = None
    else:
        raise o.unknown("an address by index is not modelled")

    def locate(w, size):
        high, records = w.s[resource + 1], w.s[resource + 2]
        if high >> 16 & 0x3FFF:
            raise o.unknown("a buffer with a stride is not modelled")
        base = w.s[resource] | (high & 0xFFFF) << 32
        within = offset + (distance(w)[w.lanes].astype(I64) if distance is not None else np.zeros(len(w.lanes), I64))
        return base + within + extra(w), within + extra(w) + size <= records

    return locate


def _buffer_read(w, locate: Callable, size: int, scope: int, name: str) -> np.ndarray:
    """uint8 [n, size]; 0 where a lane is outside the buffer."""
    where, inside = locate(w, size)
    data = np.zeros((len(where), size), np.uint8)
    if inside.any():
        data[inside] = w.workgroup.memory.read(w, where[inside], size, scope, name)
    return data


def _buffer_load(name: str, kind: str) -> None:
    size, extension, half = LOADS[kind]

    @entry(name)
    def make(o: Operands):
        if o.take("lds"):
            if "offset" in o.modifiers or half is not None:
                raise o.unknown("LDS-DMA of a buffer with an offset is not modelled")
            locate, scope = _buffer(o, 0), _scope(o)
            return lambda w: _to_lds(w, _buffer_read(w, locate, size, scope, name), 0, name)
        locate, (file, first, _), scope = _buffer(o, 1), o.registers(0), _scope(o)
        return lambda w: deliver(w, file, first, _buffer_read(w, locate, size, scope, name), extension, half)


def _buffer_store(name: str, kind: str) -> None:
    size, shift = STORES[kind]

    @entry(name)
    def make(o: Operands):
        locate, data, scope = _buffer(o, 1), stored(o, 0, size, shift), _scope(o)

        def step(w):
            where, inside = locate(w, size)
            if inside.any():
                w.workgroup.memory.write(w, where[inside], data(w)[inside], scope, name)

        return step


for _kind in LOADS:
    _buffer_load(f"buffer_load_{_kind}", _kind)
for _kind in STORES:
    _buffer_store(f"buffer_store_{_kind}", _kind)
