"""Loads, stores and atomics of global, flat, buffer and scratch memory, LDS-DMA, and the scalar loads."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from cdna import lds
from cdna.errors import MemoryFault
from cdna.memory import AGENT, SYSTEM
from cdna.formats import bf16_to_f32, f32_to_bf16
from cdna.operands import M32, SHARED_BASE, I64, U, Operands
from cdna.tables import entry
from cdna.wave import M0, POISON

# Type of a load: (bytes, "u" or "s" of what is less than a dword, half that it is put in).
_LOADS = {
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
_STORES = {"byte": (1, 0), "byte_d16_hi": (1, 16), "short": (2, 0), "short_d16_hi": (2, 16), "dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0)}
_STORES["dwordx4"] = (16, 0)  # type: (bytes, shift)
Addresses = Callable  # of a wave: int64 of the active lanes


def _scope(o: Operands) -> int:
    o.take("nt")  # a hint for the caches: no order, no scope
    return o.take("sc0") | o.take("sc1") << 1


def _extended(data: np.ndarray, kind: str) -> np.ndarray:
    """uint8 [n, 1 or 2] to uint32 [n]."""
    types = {(1, "u"): np.uint8, (1, "s"): np.int8, (2, "u"): np.uint16, (2, "s"): np.int16}
    return np.ascontiguousarray(data).view(types[data.shape[1], kind]).ravel().astype(np.int64).astype(U)


def _deliver(w, file: str, first: int, data: np.ndarray, kind: str, half: str | None) -> None:
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


def _data(o: Operands, k: int, size: int, shift: int) -> Callable:
    """Reads what a store writes: uint8 [active lanes, size]."""
    rows = o.rows(k, max(1, size // 4))

    def read(w):
        values = rows(w)[:, w.lanes] >> U(shift)
        return np.ascontiguousarray(values.T).view(np.uint8)[:, :size]

    return read


def _global_addresses(o: Operands, vector: int, scalar: int) -> Addresses:
    """A 64-bit vector address, or a 64-bit scalar base and an unsigned 32-bit vector offset; both plus the instruction's offset."""
    offset = o.number("offset")
    if o.texts[scalar] == "off":
        read = o.u64(vector)
        return lambda w: np.broadcast_to(read(w), 64)[w.lanes].astype(I64) + offset
    base, distance = o.scalar(scalar, 2), o.lanes(vector)
    return lambda w: distance(w)[w.lanes].astype(I64) + (base(w) + offset)


def _load(name: str, kind: str) -> None:
    size, extension, half = _LOADS[kind]

    @entry(name)
    def make(o: Operands):
        addresses, (file, first, _), scope = _global_addresses(o, 1, 2), o.registers(0), _scope(o)
        return lambda w: _deliver(w, file, first, w.workgroup.memory.read(w, addresses(w), size, scope, name), extension, half)


def _store(name: str, kind: str) -> None:
    size, shift = _STORES[kind]

    @entry(name)
    def make(o: Operands):
        addresses, data, scope = _global_addresses(o, 0, 2), _data(o, 1, size, shift), _scope(o)
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
        addresses, scope = _global_addresses(o, 0, 1), _scope(o)
        return lambda w: _to_lds(w, w.workgroup.memory.read(w, addresses(w), size, scope, name), offset, name)


for _kind in _LOADS:
    _load(f"global_load_{_kind}", _kind)
for _kind in _STORES:
    _store(f"global_store_{_kind}", _kind)
for _kind in ("dword", "dwordx3", "dwordx4"):
    _load_to_lds(f"global_load_lds_{_kind}", _LOADS[_kind][0])


# --- flat: global memory, or LDS where the address is in its window ------------------------------------------------
def _split(w, addresses: np.ndarray) -> np.ndarray:
    """bool [n]: lanes whose address is in the window of LDS."""
    return (addresses >= SHARED_BASE) & (addresses < SHARED_BASE + (1 << 32))


def _flat_addresses(o: Operands, k: int) -> Addresses:
    read, offset = o.u64(k), o.number("offset")
    return lambda w: np.broadcast_to(read(w), 64)[w.lanes].astype(I64) + offset


def _flat_load(name: str, kind: str) -> None:
    size, extension, half = _LOADS[kind]

    @entry(name)
    def make(o: Operands):
        addresses, (file, first, _), scope = _flat_addresses(o, 1), o.registers(0), _scope(o)

        def step(w):
            where = addresses(w)
            inside = _split(w, where)
            data = np.empty((len(where), size), np.uint8)
            data[inside] = w.workgroup.lds[lds.places(w, where[inside] - SHARED_BASE, size, name)]
            data[~inside] = w.workgroup.memory.read(w, where[~inside], size, scope, name)
            _deliver(w, file, first, data, extension, half)

        return step


def _flat_store(name: str, kind: str) -> None:
    size, shift = _STORES[kind]

    @entry(name)
    def make(o: Operands):
        addresses, data, scope = _flat_addresses(o, 0), _data(o, 1, size, shift), _scope(o)

        def step(w):
            where, values = addresses(w), data(w)
            inside = _split(w, where)
            w.workgroup.lds[lds.places(w, where[inside] - SHARED_BASE, size, name)] = values[inside]
            if not inside.all():
                w.workgroup.memory.write(w, where[~inside], values[~inside], scope, name)

        return step


for _kind in _LOADS:
    _flat_load(f"flat_load_{_kind}", _kind)
for _kind in _STORES:
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
    size, extension, half = _LOADS[kind]

    @entry(name)
    def make(o: Operands):
        if o.take("lds"):
            if "offset" in o.modifiers or half is not None:
                raise o.unknown("LDS-DMA of a buffer with an offset is not modelled")
            locate, scope = _buffer(o, 0), _scope(o)
            return lambda w: _to_lds(w, _buffer_read(w, locate, size, scope, name), 0, name)
        locate, (file, first, _), scope = _buffer(o, 1), o.registers(0), _scope(o)
        return lambda w: _deliver(w, file, first, _buffer_read(w, locate, size, scope, name), extension, half)


def _buffer_store(name: str, kind: str) -> None:
    size, shift = _STORES[kind]

    @entry(name)
    def make(o: Operands):
        locate, data, scope = _buffer(o, 1), _data(o, 0, size, shift), _scope(o)

        def step(w):
            where, inside = locate(w, size)
            if inside.any():
                w.workgroup.memory.write(w, where[inside], data(w)[inside], scope, name)

        return step


for _kind in _LOADS:
    _buffer_load(f"buffer_load_{_kind}", _kind)
for _kind in _STORES:
    _buffer_store(f"buffer_store_{_kind}", _kind)


# --- scratch: each lane's own bytes ---------------------------------------------------------------------------------
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
    size, extension, half = _LOADS[kind]

    @entry(name)
    def make(o: Operands):
        places, (file, first, _) = _scratch(o, 1, 2), o.registers(0)
        return lambda w: _deliver(w, file, first, _scratch_bytes(w, places, size), extension, half)


def _scratch_bytes(w, places: Callable, size: int) -> np.ndarray:
    where = places(w, size)
    return w.scratch[where]


def _scratch_store(name: str, kind: str) -> None:
    size, shift = _STORES[kind]

    @entry(name)
    def make(o: Operands):
        places, data = _scratch(o, 0, 2), _data(o, 1, size, shift)

        def step(w):
            where = places(w, size)
            w.scratch[where] = data(w)

        return step


for _kind in _LOADS:
    _scratch_load(f"scratch_load_{_kind}", _kind)
for _kind in _STORES:
    _scratch_store(f"scratch_store_{_kind}", _kind)


# --- atomics ----------------------------------------------------------------------------------------------------------
def _integers(function: Callable[[int, int], int], layout: str) -> Callable:
    limit = (1 << 8 * struct.calcsize(layout)) - 1

    def update(old: bytes, operand: bytes) -> bytes:
        result = function(struct.unpack(layout, old)[0], struct.unpack(layout, operand)[0])
        return (result & limit).to_bytes(len(old), "little")

    return update


def _floats(dtype) -> Callable:
    return lambda old, operand: (np.frombuffer(old, dtype) + np.frombuffer(operand, dtype)).astype(dtype).tobytes()


def _compare_swap(old: bytes, operand: bytes) -> bytes:
    """The operand is the new value, then what the old one has to be."""
    return operand[: len(old)] if old == operand[len(old) :] else old


def _bf16_pair(old: bytes, operand: bytes) -> bytes:
    total = bf16_to_f32(np.frombuffer(old, np.uint16)) + bf16_to_f32(np.frombuffer(operand, np.uint16))
    return f32_to_bf16(total).astype(np.uint16).tobytes()


_INTEGER_ATOMICS = {
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "swap": lambda old, x: x,
    "umax": max,
    "umin": min,
    "smax": max,
    "smin": min,
    "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
}


def _atomic(name: str, size: int, update: Callable, operands: int = 1) -> None:
    """sc0: the old value is returned; sc1: system scope. Lanes one after another."""

    def make(o: Operands, *, flat: bool):
        returns = o.take("sc0")
        scope = SYSTEM if o.take("sc1") else AGENT
        o.take("nt")
        first = 1 if returns else 0
        addresses = _flat_addresses(o, first) if flat else _global_addresses(o, first, first + 2)
        data = _data(o, first + 1, size * operands, 0)
        target = o.registers(0) if returns else None

        def step(w):
            where, values = addresses(w), data(w)
            if flat and _split(w, where).any():
                raise o.unknown("a flat atomic on LDS is not modelled")
            memory = w.workgroup.memory
            before = memory.exchange(w, where, size, scope, lambda n, old: update(old, values[n].tobytes()), name)
            if target is not None:
                _deliver(w, target[0], target[1], before, "u", None)
            else:
                memory.land(w, lambda: None, None)

        return step

    entry(f"global_{name}")(lambda o: make(o, flat=False))
    entry(f"flat_{name}")(lambda o: make(o, flat=True))


for _name, _function in _INTEGER_ATOMICS.items():
    _letter = "i" if _name.startswith("s") and _name in ("smax", "smin") else "I"
    _atomic(f"atomic_{_name}", 4, _integers(_function, f"<{_letter}"))
    _atomic(f"atomic_{_name}_x2", 8, _integers(_function, "<q" if _letter == "i" else "<Q"))
_atomic("atomic_cmpswap", 4, _compare_swap, operands=2)
_atomic("atomic_cmpswap_x2", 8, _compare_swap, operands=2)
_atomic("atomic_add_f32", 4, _floats(np.float32))
_atomic("atomic_add_f64", 8, _floats(np.float64))
_atomic("atomic_pk_add_f16", 4, _floats(np.float16))
_atomic("atomic_pk_add_bf16", 4, _bf16_pair)


# --- scalar loads -----------------------------------------------------------------------------------------------------
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
