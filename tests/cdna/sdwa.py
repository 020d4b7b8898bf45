"""Sub-dword addressing: an operand is a byte or a word of its register, and so is the destination."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from cdna.disassembly import Instruction
from cdna.errors import UnknownInstruction

U, I32 = np.uint32, np.int32
_PARTS = {"DWORD": (0, 32), **{f"BYTE_{n}": (8 * n, 8) for n in range(4)}, **{f"WORD_{n}": (16 * n, 16) for n in range(2)}}  # (shift, bits)


@dataclasses.dataclass(frozen=True)
class Selection:
    sources: dict[int, tuple[str, bool]]  # operand -> (part, extended by sign)
    part: str  # of the destination
    unused: str  # PAD: other bits become 0; PRESERVE: they stay; SEXT: copies of the sign

    @classmethod
    def take(cls, modifiers: dict[str, str], instruction: Instruction) -> Selection:
        """Removes its modifiers. A comparison has no dst_sel; its first vector operand is operand 1 all the same."""
        operands = instruction.operands
        sources = {}
        for k, name in ((1, "src0_sel"), (2, "src1_sel")):
            part = modifiers.pop(name, "DWORD")
            if part not in _PARTS:
                raise UnknownInstruction(f"{instruction}: {name}:{part}")
            sources[k] = part, len(operands) > k and operands[k].startswith("sext(")
        part, unused = modifiers.pop("dst_sel", "DWORD"), modifiers.pop("dst_unused", "UNUSED_PAD")
        if part not in _PARTS or unused not in ("UNUSED_PAD", "UNUSED_PRESERVE", "UNUSED_SEXT"):
            raise UnknownInstruction(f"{instruction}: dst_sel:{part} dst_unused:{unused}")
        return cls(sources, part, unused.removeprefix("UNUSED_"))

    def reader(self, read: Callable, k: int) -> Callable:
        part, signed = self.sources.get(k, ("DWORD", False))
        shift, bits = _PARTS[part]
        if bits == 32:
            return read
        if signed:
            up, down = U(32 - bits - shift), I32(32 - bits)
            return lambda w: ((read(w) << up).view(I32) >> down).view(U)
        return lambda w: read(w) >> U(shift) & U((1 << bits) - 1)

    def writer(self, file: str, register: int) -> Callable:
        shift, bits = _PARTS[self.part]
        field = U(((1 << bits) - 1) << shift)

        def write(w, value):
            old = (w.v if file == "v" else w.a)[register]
            placed = value << U(shift) & field
            if self.unused == "PRESERVE":
                placed = placed | old & ~field
            elif self.unused == "SEXT" and bits < 32:
                placed = ((value << U(32 - bits)).view(I32) >> I32(32 - bits)).view(U) << U(shift)
            np.copyto(old, placed, where=w.mask)

        return write
