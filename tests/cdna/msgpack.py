"""Decodes the MessagePack that the note of a code object carries: maps, arrays, strings, integers, booleans, nil."""

from __future__ import annotations

import struct
from typing import Any

_SIZED = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_STRINGS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_ARRAYS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}
_PLAIN = {0xC0: None, 0xC2: False, 0xC3: True}


def decode(data: bytes) -> Any:
    """The one value in data; trailing padding is ignored. Raises ValueError on another type than those above."""
    return _value(data, 0)[0]


def _value(data: bytes, at: int) -> tuple[Any, int]:
    tag, at = data[at], at + 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag in _PLAIN:
        return _PLAIN[tag], at
    if tag in _SIZED:
        return _number(data, at, _SIZED[tag])
    if tag < 0x90:
        return _map(data, at, tag & 0x0F)
    if tag < 0xA0:
        return _array(data, at, tag & 0x0F)
    if tag < 0xC0:
        return _string(data, at, tag & 0x1F)
    for kinds, read in ((_STRINGS, _string), (_ARRAYS, _array), (_MAPS, _map)):
        if tag in kinds:
            size, at = _number(data, at, kinds[tag])
            return read(data, at, size)
    raise ValueError(f"MessagePack type {tag:#x} at byte {at - 1} is not one that a code object uses")


def _number(data: bytes, at: int, layout: str) -> tuple[int, int]:
    return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)


def _string(data: bytes, at: int, size: int) -> tuple[str, int]:
    return data[at : at + size].decode(), at + size


def _array(data: bytes, at: int, size: int) -> tuple[list, int]:
    items = []
    for _ in range(size):
        item, at = _value(data, at)
        items.append(item)
    return items, at


def _map(data: bytes, at: int, size: int) -> tuple[dict, int]:
    items = {}
    for _ in range(size):
        key, at = _value(data, at)
        items[key], at = _value(data, at)
    return items, at
