"""Turns the operands of one instruction into functions of a wave, so that running it looks nothing up.

Readers return uint32, float32, uint64 or int64 arrays of 64 lanes, or of one element where every lane has the same value. Writers take either
and change active lanes alone. DPP and SDWA are handled here, once: they change how operand 1 is read and which lanes are written.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np

from cdna.disassembly import Instruction
from cdna.dpp import Permutation
from cdna.errors import UnknownInstruction
from cdna.sdwa import Selection
from cdna.wave import M0, VCC, Wave, mask_of

U, F, Q, I32, I64 = np.uint32, np.float32, np.uint64, np.int32, np.int64
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
_NAMED = {"vcc": VCC, "vcc_lo": VCC, "vcc_hi": VCC + 1, "flat_scratch": 102, "flat_scratch_lo": 102, "flat_scratch_hi": 103, "m0": M0}
_SCALAR = re.compile(r"^s(?:(\d+)|\[(\d+):(\d+)\])$")
_VECTOR = re.compile(r"^([va])(?:(\d+)|\[(\d+):(\d+)\])$")
_INTEGER = re.compile(r"^-?(?:0x[0-9a-f]+|\d+)$")
_FLOAT = re.compile(r"^-?\d+\.\d+(?:e[-+]?\d+)?$")
_INVERSE_TWO_PI = 0x3E22F983
# Where 64-bit flat addresses reach LDS and scratch: the windows that src_shared_base and src_private_base give.
SHARED_BASE, PRIVATE_BASE = 1 << 44, 1 << 45
_BASES = {"src_shared_base": SHARED_BASE, "src_private_base": PRIVATE_BASE}


def constant(text: str, dwords: int = 1, *, signed: bool = True) -> int | None:
    """The bits of an inline constant or literal, or None where text is neither.

    64-bit: floats become f64, a 32-bit literal is extended by its sign for signed integers and by zeros otherwise.
    """
    text = text[4:-1] if text.startswith("lit(") else text
    if _FLOAT.match(text):
        if dwords == 2:
            return struct.unpack("<Q", struct.pack("<d", float(text)))[0]
        return _INVERSE_TWO_PI if text.startswith("0.15915") else struct.unpack("<I", struct.pack("<f", float(text)))[0]
    if _INTEGER.match(text):
        value = int(text, 0)
        if dwords == 2 and signed and text.startswith("0x") and 1 << 31 <= value < 1 << 32:
            value -= 1 << 32
        return value & (M64 if dwords == 2 else M32)
    return None


class Operands:
    """The operands of one instruction. Methods take the operand's index and return a reader or a writer."""

    def __init__(self, instruction: Instruction, program):
        self.instruction, self.program = instruction, program
        self.texts = instruction.operands
        self.modifiers = dict(instruction.modifiers)
        self.permutation = self.selection = None
        if instruction.mnemonic.endswith("_dpp"):
            self.permutation = Permutation.take(self.modifiers)
        if instruction.mnemonic.endswith("_sdwa"):
            self.selection = Selection.take(self.modifiers, instruction)

    def __len__(self) -> int:
        return len(self.texts)

    def unknown(self, why: str) -> UnknownInstruction:
        return UnknownInstruction(f"{self.instruction}: {why}")

    def finish(self) -> None:
        """Raises where a modifier was not read: its effect would be lost."""
        if self.modifiers:
            raise self.unknown(f"modifier {next(iter(self.modifiers))} is not modelled for it")

    def take(self, modifier: str) -> bool:
        """Whether the modifier is there."""
        return self.modifiers.pop(modifier, None) is not None

    def number(self, modifier: str, default: int = 0) -> int:
        return int(self.modifiers.pop(modifier, str(default)), 0)

    def numbers(self, modifier: str, default: list[int]) -> list[int]:
        text = self.modifiers.pop(modifier, None)
        return default if text is None else [int(n) for n in re.findall(r"\d+", text)]

    # --- scalar ---------------------------------------------------------------------------------------------------
    def scalar_index(self, k: int) -> int | None:
        """Place of a scalar register operand among the wave's, or None for another operand."""
        text = self.texts[k]
        match = _SCALAR.match(text)
        if match:
            return int(match[1] if match[1] is not None else match[2])
        return _NAMED.get(text)

    def scalar(self, k: int, dwords: int = 1, *, signed: bool = True) -> Callable[[Wave], int]:
        """Reads 1, 2 or 4 dwords as one unsigned integer. signed: as constant says."""
        text, i = self.texts[k], self.scalar_index(k)
        if i is not None:
            if dwords == 1:
                return lambda w: w.s[i]
            if dwords == 2:
                return lambda w: w.s[i] | w.s[i + 1] << 32
            return lambda w: sum(w.s[i + n] << 32 * n for n in range(dwords))
        if text in ("exec", "exec_lo"):
            return (lambda w: w.exec) if dwords == 2 else lambda w: w.exec & M32
        if text == "exec_hi":
            return lambda w: w.exec >> 32
        if text in _BASES:
            value = _BASES[text] if dwords == 2 else _BASES[text] & M32
            return lambda w: value
        if text == "scc" or text == "src_scc":
            return lambda w: w.scc
        value = constant(text, dwords, signed=signed)
        if value is None:
            raise self.unknown(f"scalar operand {text!r}")
        return lambda w: value

    def to_scalar(self, k: int, dwords: int = 1) -> Callable[[Wave, int], None]:
        """Writes 1 to 16 dwords."""
        text, i = self.texts[k], self.scalar_index(k)
        if i is not None:

            def write_one(w, value):
                w.s[i] = value & M32

            def write_many(w, value):
                for n in range(dwords):
                    w.s[i + n] = value >> 32 * n & M32

            return write_one if dwords == 1 else write_many
        if text == "exec" and dwords == 2:
            return lambda w, value: w.set_exec(value & M64)
        if text == "exec_lo":
            return lambda w, value: w.set_exec(w.exec >> 32 << 32 | value & M32)
        if text == "exec_hi":
            return lambda w, value: w.set_exec(w.exec & M32 | (value & M32) << 32)
        raise self.unknown(f"scalar destination {text!r}")

    def to_mask(self, k: int) -> Callable[[Wave, np.ndarray], None]:
        """Writes bool [64] into a pair of scalar registers; inactive lanes become 0."""
        write = self.to_scalar(k, 2)
        return lambda w, flags: write(w, mask_of(flags & w.mask))

    # --- vector ---------------------------------------------------------------------------------------------------
    def registers(self, k: int) -> tuple[str, int, int] | None:
        """(file "v" or "a", first, number) of a vector register operand, or None."""
        match = _VECTOR.match(self.texts[k])
        if match is None:
            return None
        if match[2] is not None:
            return match[1], int(match[2]), 1
        return match[1], int(match[3]), int(match[4]) - int(match[3]) + 1

    def rows(self, k: int, count: int) -> Callable[[Wave], np.ndarray]:
        """A view of count consecutive registers, uint32 [count, 64]."""
        found = self.registers(k)
        if found is None or found[2] != count:
            raise self.unknown(f"operand {self.texts[k]!r} is not {count} vector register(s)")
        file, first, _ = found
        return (lambda w: w.v[first : first + count]) if file == "v" else lambda w: w.a[first : first + count]

    def u32(self, k: int) -> Callable[[Wave], np.ndarray]:
        """Reads 32 bits a lane; a leading - or |…| acts on the sign bit."""
        text, negative, absolute = self.texts[k], False, False
        if re.match(r"^-[vas|]", text):
            negative, text = True, text[1:]
        if text.startswith("|"):
            absolute, text = True, text[1:-1]
        read = self._plain(k, text)
        if self.permutation is not None and k == 1:
            read = self.permutation.reader(read)
        if self.selection is not None:
            read = self.selection.reader(read, k)
        if not (negative or absolute):
            return read
        keep, flip = U(0x7FFFFFFF if absolute else M32), U(0x80000000 if negative else 0)
        return lambda w: read(w) & keep ^ flip

    def _plain(self, k: int, text: str) -> Callable[[Wave], np.ndarray]:
        text = text[5:-1] if text.startswith("sext(") else text  # SDWA's: the selection extends by sign
        match = _VECTOR.match(text)
        if match:
            i = int(match[2] if match[2] is not None else match[3])
            return (lambda w: w.v[i]) if match[1] == "v" else lambda w: w.a[i]
        match = _SCALAR.match(text)
        i = int(match[1] if match[1] is not None else match[2]) if match else _NAMED.get(text)
        if i is not None:
            return lambda w: np.array([w.s[i]], U)
        value = constant(text)
        if value is not None:
            fixed = np.array([value], U)
            return lambda w: fixed
        read = self.scalar(k)
        return lambda w: np.array([read(w)], U)

    def f32(self, k: int) -> Callable[[Wave], np.ndarray]:
        found = self.registers(k)
        if found is not None and found[0] == "v" and self.permutation is None and self.selection is None:
            i = found[1]
            return lambda w: w.vf[i]
        read = self.u32(k)
        return lambda w: read(w).view(F)

    def i32(self, k: int) -> Callable[[Wave], np.ndarray]:
        read = self.u32(k)
        return lambda w: read(w).view(I32)

    def u64(self, k: int, *, signed: bool = True) -> Callable[[Wave], np.ndarray]:
        """Reads 64 bits a lane. signed: how a literal is extended."""
        found = self.registers(k)
        if found is not None:
            both = self.rows(k, 2)
            return lambda w: both(w)[0].astype(Q) | both(w)[1].astype(Q) << Q(32)
        read = self.scalar(k, 2, signed=signed)
        return lambda w: np.array([read(w)], Q)

    def lanes(self, k: int) -> Callable[[Wave], np.ndarray]:
        """As u32, always of 64 elements."""
        read = self.u32(k)
        return lambda w: np.broadcast_to(read(w), 64)

    def _destination(self, k: int) -> tuple[str, int]:
        found = self.registers(k)
        if found is None:
            raise self.unknown(f"vector destination {self.texts[k]!r}")
        return found[:2]

    def to_u32(self, k: int = 0) -> Callable[[Wave, np.ndarray], None]:
        """Writes uint32; another type is an error of the instruction's entry (same_kind casting)."""
        file, i = self._destination(k)
        if self.permutation is not None:
            return self.permutation.writer(file, i)
        if self.selection is not None:
            return self.selection.writer(file, i)

        def write(w, value):
            np.copyto((w.v if file == "v" else w.a)[i], value, where=True if w.full else w.mask)

        return write

    def to_f32(self, k: int = 0) -> Callable[[Wave, np.ndarray], None]:
        """Writes float32, after the output modifiers mul, div and clamp."""
        clamp = self.take("clamp")
        scale = F(self.number("mul", 1)) / F(self.number("div", 1))
        write = self.to_u32(k)
        if not clamp and scale == 1:
            return lambda w, value: write(w, value.view(U))

        def modified(w, value):
            value = value * scale
            write(w, (np.where(np.isnan(value), F(0), np.clip(value, F(0), F(1))) if clamp else value).view(U))

        return modified

    def to_u64(self, k: int = 0) -> Callable[[Wave, np.ndarray], None]:
        file, i = self._destination(k)
        if self.registers(k)[2] != 2:
            raise self.unknown(f"vector destination {self.texts[k]!r} is not a pair")

        def write(w, value):
            rows, where = w.v if file == "v" else w.a, True if w.full else w.mask
            np.copyto(rows[i], (value & Q(M32)).astype(U), where=where)
            np.copyto(rows[i + 1], (value >> Q(32)).astype(U), where=where)

        return write
