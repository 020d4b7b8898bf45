"""The workgroup's LDS. Every access is checked against its size; what nobody wrote reads as NaN."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from cdna.errors import MemoryFault
from cdna.operands import M32, Q, U, Operands
from cdna.tables import entry

_SIZES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


def places(w, addresses: np.ndarray, size: int, what: str) -> np.ndarray:
    """Byte indices [n, size] of sums of a 32-bit address and an offset, which wrap. Raises MemoryFault outside the LDS of the workgroup."""
    limit, addresses = len(w.workgroup.lds), addresses & M32
    if addresses.size and addresses.max() + size > limit:
        raise MemoryFault(f"{what}: LDS address {int(addresses.max())} + {size} of {limit} bytes")
    return addresses[:, None] + np.arange(size)


def _addresses(read: Callable, w) -> np.ndarray:
    return read(w)[w.lanes].astype(np.int64)


def _offsets(o: Operands, size: int) -> list[int]:
    """Byte offsets of the one or two accesses."""
    name = o.instruction.mnemonic
    if not re.search(r"(read|write)2|xchg2", name):
        return [o.number("offset")]
    scale = size * (64 if "st64" in name else 1)
    return [o.number("offset0") * scale, o.number("offset1") * scale]


def _write_register(w, file: str, first: int, data: np.ndarray) -> None:
    """uint8 [active lanes, 4n] into n registers."""
    count = data.shape[1] // 4
    (w.v if file == "v" else w.a)[first : first + count, w.lanes] = np.ascontiguousarray(data).view(U).T


def _read(name: str, size: int, convert: Callable | None = None) -> None:
    """convert: uint8 [n, size] of less than a dword to uint32 [n], from the old register and the bytes."""

    @entry(name)
    def make(o: Operands):
        address, offsets = o.lanes(1), _offsets(o, size)
        file, first, count = o.registers(0)
        if convert is None and count != len(offsets) * size // 4:
            raise o.unknown("destination and size differ")

        def step(w):
            base = _addresses(address, w)
            values = [w.workgroup.lds[places(w, base + offset, size, name)] for offset in offsets]
            for n, data in enumerate(values):
                if convert is None:
                    _write_register(w, file, first + n * size // 4, data)
                else:
                    rows = w.v if file == "v" else w.a
                    rows[first, w.lanes] = convert(rows[first, w.lanes], data)

        return step


def _write(name: str, size: int, *, high: bool = False) -> None:
    @entry(name)
    def make(o: Operands):
        address, offsets = o.lanes(0), _offsets(o, size)
        sources = [o.registers(1 + n) for n in range(len(offsets))]

        def step(w):
            base = _addresses(address, w)
            for offset, (file, first, _) in zip(offsets, sources, strict=True):
                rows = (w.v if file == "v" else w.a)[first : first + max(1, size // 4), w.lanes]
                data = np.ascontiguousarray((rows >> U(16) if high else rows).T).view(np.uint8)[:, :size]
                w.workgroup.lds[places(w, base + offset, size, name)] = data

        return step


def _unsigned(size: int) -> Callable:
    return lambda old, data: np.ascontiguousarray(data).view(np.uint8 if size == 1 else np.uint16).ravel().astype(U)


def _signed(size: int) -> Callable:
    return lambda old, data: np.ascontiguousarray(data).view(np.int8 if size == 1 else np.int16).ravel().astype(np.int32).view(U)


def _half(kind: Callable, high: bool) -> Callable:
    if high:
        return lambda old, data: old & U(0xFFFF) | kind(old, data) << U(16)
    return lambda old, data: old & U(0xFFFF0000) | kind(old, data) & U(0xFFFF)


for _kind, _size in _SIZES.items():
    if _size >= 4:
        _read(f"ds_read_{_kind}", _size)
    _write(f"ds_write_{_kind}", _size)
for _kind in ("b32", "b64"):
    for _stride in ("", "st64"):
        _read(f"ds_read2{_stride}_{_kind}", _SIZES[_kind])
        _write(f"ds_write2{_stride}_{_kind}", _SIZES[_kind])
for _letter, _extend in (("u", _unsigned), ("i", _signed)):
    for _bits in (8, 16):
        _read(f"ds_read_{_letter}{_bits}", _bits // 8, _extend(_bits // 8))
for _name, _extend in (("u8", _unsigned(1)), ("i8", _signed(1)), ("u16", _unsigned(2))):
    _read(f"ds_read_{_name}_d16", 1 if "8" in _name else 2, _half(_extend, False))
    _read(f"ds_read_{_name}_d16_hi", 1 if "8" in _name else 2, _half(_extend, True))
_write("ds_write_b8_d16_hi", 1, high=True)
_write("ds_write_b16_d16_hi", 2, high=True)


@entry("ds_read_b64_tr_b16")
def _read_transposed(o: Operands):
    """Four 16-bit words a lane, transposed among 16 lanes: word j of lane i is word i % 4 of what lane 4 * j + i // 4 points at.

    The order is what a Triton-made product on gfx950 needs (tests/unit/cdna/test_triton_objects.py).
    """
    address, offset = o.lanes(1), o.number("offset")
    file, first, count = o.registers(0)
    if count != 2:
        raise o.unknown("the destination is not a pair")
    lane = np.arange(64)[:, None]
    source = lane // 16 * 16 + 4 * np.arange(4) + lane % 16 // 4

    def step(w):
        if not w.full:
            raise o.unknown("inactive lanes are not modelled for it")
        words = w.workgroup.lds[places(w, _addresses(address, w) + offset, 8, o.instruction.mnemonic)].view(np.uint16)
        _write_register(w, file, first, words[source, lane % 4].view(np.uint8))

    return step


_ATOMICS = {
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "max": max,
    "min": min,
    "wrxchg": lambda old, x: x,
}


def _atomic(name: str, function: Callable, kind: str, *, returns: bool) -> None:
    """One lane after another, in the order of lanes. kind: u32, u64, i32, f32."""
    size = 8 if kind.endswith("64") else 4
    view = {"u32": U, "u64": Q, "i32": np.int32, "f32": np.float32}[kind]

    @entry(name)
    def make(o: Operands):
        address, offset, k = o.lanes(1 if returns else 0), o.number("offset"), 2 if returns else 1
        data = o.rows(k, size // 4)
        target = o.registers(0) if returns else None

        def step(w):
            index = places(w, _addresses(address, w) + offset, size, name)
            operand = np.ascontiguousarray(data(w)[:, w.lanes].T).view(view).ravel()
            before = np.empty((len(w.lanes), size), np.uint8)
            for n in range(len(w.lanes)):
                cell = w.workgroup.lds[index[n]]
                before[n] = cell
                new = np.array([function(cell.view(view)[0], operand[n])]).astype(view)
                w.workgroup.lds[index[n]] = new.view(np.uint8)
            if target is not None:
                _write_register(w, target[0], target[1], before)

        return step


for _name, _function in _ATOMICS.items():
    for _kind in ("u32", "u64") if _name not in ("and", "or", "xor", "wrxchg") else ("b32", "b64"):
        _type = _kind.replace("b", "u")
        if _name != "wrxchg":
            _atomic(f"ds_{_name}_{_kind}", _function, _type, returns=False)
        _returning = f"ds_{_name}_rtn_{_kind}"
        _atomic(_returning, _function, _type, returns=True)
for _name in ("max", "min"):
    _atomic(f"ds_{_name}_i32", _ATOMICS[_name], "i32", returns=False)
    _atomic(f"ds_{_name}_rtn_i32", _ATOMICS[_name], "i32", returns=True)
_atomic("ds_add_f32", lambda old, x: old + x, "f32", returns=False)
_atomic("ds_add_rtn_f32", lambda old, x: old + x, "f32", returns=True)
