"""The registry of instructions: a mnemonic's entry makes, from its operands, the function that runs it on a wave."""

from __future__ import annotations

import re
from collections.abc import Callable

from cdna.disassembly import Instruction
from cdna.errors import UnknownInstruction
from cdna.operands import Operands
from cdna.wave import Wave

Step = Callable[[Wave], None]
Entry = Callable[[Operands], Step]
_ENTRIES: dict[str, Entry] = {}
_ENCODING = re.compile(r"_(?:e32|e64|dpp|sdwa)$")


def entry(*mnemonics: str) -> Callable[[Entry], Entry]:
    """Registers one entry for mnemonics, written without their encoding's suffix."""

    def register(make: Entry) -> Entry:
        for mnemonic in mnemonics:
            if mnemonic in _ENTRIES:
                raise ValueError(f"{mnemonic} has an entry already")
            _ENTRIES[mnemonic] = make
        return make

    return register


def decode(instruction: Instruction, program) -> Step:
    """The function of one instruction. Raises UnknownInstruction, which names it."""
    make = _ENTRIES.get(_ENCODING.sub("", instruction.mnemonic))
    if make is None:
        raise UnknownInstruction(f"{instruction} has no entry")
    operands = Operands(instruction, program)
    step = make(operands)
    operands.finish()
    return step


def mnemonics() -> frozenset[str]:
    """Every mnemonic that has an entry, without encodings."""
    return frozenset(_ENTRIES)
