"""A code object that can be run: its instructions, decoded when a wave first reaches them."""

from __future__ import annotations

from pathlib import Path

from cdna import atomics, compare, control, disassembly, lanes, lds, mfma, packed, private, scalar, toolchain, vector, vmem  # noqa: F401
from cdna.elf import CodeObject
from cdna.errors import MemoryFault, UnknownInstruction
from cdna.tables import Step, decode


class Program:
    """instructions: by address; code: the function of each, in the same order."""

    def __init__(self, code_object: CodeObject, text: str):
        """text: llvm-objdump -d of the code object."""
        self.code_object, self.isa = code_object, code_object.isa
        self.instructions = disassembly.parse(text)
        if not self.instructions:
            raise ValueError("the disassembly has no instruction")
        self._index = {instruction.address: i for i, instruction in enumerate(self.instructions)}
        self.code: list[Step] = [self._decode_later(i) for i in range(len(self.instructions))]

    @classmethod
    def load(cls, path: str | Path, text: str | None = None) -> Program:
        """text: the disassembly where it is at hand; llvm-objdump is run otherwise."""
        return cls(CodeObject.read(path), toolchain.disassemble(path) if text is None else text)

    def _decode_later(self, i: int) -> Step:
        def first_time(w):
            self.code[i] = decode(self.instructions[i], self)
            self.code[i](w)

        return first_time

    def index_of(self, address: int) -> int:
        """Raises MemoryFault where no instruction starts at this virtual address."""
        try:
            return self._index[address]
        except KeyError:
            raise MemoryFault(f"no instruction starts at {address:#x}") from None

    def unknown(self) -> list[str]:
        """Why each instruction that the interpreter cannot run is unknown; an empty list where it can run all."""
        found = []
        for instruction in self.instructions:
            try:
                decode(instruction, self)
            except UnknownInstruction as error:
                found.append(str(error))
        return found
