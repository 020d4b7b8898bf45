"""Reads a linked AMDGPU code object: its kernels, their descriptors and metadata, and the bytes that a loader maps.

Layouts: ELF64 little endian; the kernel descriptor and the note NT_AMDGPU_METADATA of LLVM's "User Guide for AMDGPU Backend", code object 5 and 6.
"""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

from cdna import msgpack

EM_AMDGPU, SHT_NOTE, SHT_DYNSYM, SHT_SYMTAB, PT_LOAD, NT_AMDGPU_METADATA = 224, 7, 11, 2, 1, 32


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """The 64 bytes of a kernel that the packet processor reads. Bits by their names in LLVM's guide."""

    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    entry_offset: int  # from the descriptor's own address, bytes
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload: int

    def enabled(self, bit: int) -> bool:
        return bool(self.properties >> bit & 1)

    @property
    def preload_dwords(self) -> int:
        return self.preload & 0x7F

    @property
    def preload_offset_dwords(self) -> int:
        return self.preload >> 7


@dataclasses.dataclass(frozen=True)
class Argument:
    offset: int  # bytes into the kernarg segment
    size: int  # bytes
    kind: str  # by_value, global_buffer, hidden_block_count_x, …


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    entry: int  # address of the first instruction
    descriptor: Descriptor
    arguments: tuple[Argument, ...]
    vgprs: int  # of the unified file: architectural ones and accumulation ones
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    lds_bytes: int  # static; dynamic LDS is in no metadata
    scratch_bytes: int
    kernarg_bytes: int
    max_workgroup: int  # threads


@dataclasses.dataclass(frozen=True)
class CodeObject:
    isa: str  # gfx942 or gfx950, feature suffixes removed
    kernels: dict[str, Kernel]
    segments: tuple[tuple[int, bytes], ...]  # (virtual address, bytes) of every PT_LOAD

    @classmethod
    def read(cls, path: str | Path) -> CodeObject:
        """Raises ValueError where the file is not an AMDGPU code object with metadata."""
        data = Path(path).read_bytes()
        if data[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", data, 18)[0] != EM_AMDGPU:
            raise ValueError(f"{path} is not an ELF64 AMDGPU code object (a bundle of several is not either)")
        sections = _sections(data)
        symbols = _symbols(data, sections)
        metadata = _metadata(data, sections)
        segments = _segments(data)
        if metadata is None:
            raise ValueError(f"{path} has no NT_AMDGPU_METADATA note")
        kernels = {}
        for record in metadata["amdhsa.kernels"]:
            address = symbols[record[".symbol"]]
            descriptor = _descriptor(_mapped(segments, address, 64))
            kernels[record[".name"]] = Kernel(
                name=record[".name"],
                entry=address + descriptor.entry_offset,
                descriptor=descriptor,
                arguments=tuple(Argument(a[".offset"], a[".size"], a[".value_kind"]) for a in record.get(".args", ())),
                vgprs=record[".vgpr_count"],
                agprs=record.get(".agpr_count", 0),
                sgprs=record[".sgpr_count"],
                vgpr_spills=record[".vgpr_spill_count"],
                sgpr_spills=record[".sgpr_spill_count"],
                lds_bytes=record[".group_segment_fixed_size"],
                scratch_bytes=record[".private_segment_fixed_size"],
                kernarg_bytes=record[".kernarg_segment_size"],
                max_workgroup=record[".max_flat_workgroup_size"],
            )
        isa = metadata["amdhsa.target"].rsplit("--", 1)[1].split(":")[0]
        return cls(isa=isa, kernels=kernels, segments=segments)


def _sections(data: bytes) -> list[tuple[int, int, int, int, int]]:
    """(type, address, offset, size, link) of every section."""
    start, entry, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
    found = []
    for i in range(count):
        _, kind, _, address, offset, size, link, *_ = struct.unpack_from("<IIQQQQIIQQ", data, start + i * entry)
        found.append((kind, address, offset, size, link))
    return found


def _symbols(data: bytes, sections: list) -> dict[str, int]:
    found = {}
    for kind, _, offset, size, link in sections:
        if kind not in (SHT_SYMTAB, SHT_DYNSYM):
            continue
        strings = sections[link][2]
        for at in range(offset, offset + size, 24):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            end = data.index(b"\0", strings + name)
            found[data[strings + name : end].decode()] = value
    return found


def _metadata(data: bytes, sections: list) -> dict | None:
    for kind, _, offset, size, _ in sections:
        if kind != SHT_NOTE:
            continue
        at = offset
        while at + 12 <= offset + size:
            name_size, value_size, note = struct.unpack_from("<III", data, at)
            value_at = at + 12 + (name_size + 3) // 4 * 4
            if note == NT_AMDGPU_METADATA:
                return msgpack.decode(data[value_at : value_at + value_size])
            at = value_at + (value_size + 3) // 4 * 4
    return None


def _segments(data: bytes) -> tuple[tuple[int, bytes], ...]:
    start, entry, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    found = []
    for i in range(count):
        kind, _, offset, address, _, in_file, in_memory, _ = struct.unpack_from("<IIQQQQQQ", data, start + i * entry)
        if kind == PT_LOAD:
            found.append((address, data[offset : offset + in_file] + bytes(in_memory - in_file)))
    return tuple(found)


def _mapped(segments: tuple, address: int, size: int) -> bytes:
    for start, content in segments:
        if start <= address and address + size <= start + len(content):
            return content[address - start : address - start + size]
    raise ValueError(f"address {address:#x} is in no loaded segment")


def _descriptor(content: bytes) -> Descriptor:
    lds, scratch, kernarg, _, entry = struct.unpack_from("<IIIIq", content)
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", content, 44)
    return Descriptor(lds, scratch, kernarg, entry, rsrc1, rsrc2, rsrc3, properties, preload)
