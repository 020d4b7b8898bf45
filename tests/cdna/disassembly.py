"""Splits llvm-objdump's text of a code object into instructions."""

from __future__ import annotations

import dataclasses
import re

_LINE = re.compile(r"^\t(\S+)\s*(.*?)\s*// ([0-9A-F]+): ((?:[0-9A-F]{8} ?)+)")
_OPERAND = re.compile(r"(?:\[[^\]]*\]|\([^)]*\)|[^,\[(])+")  # commas inside brackets separate nothing
# Words after the last operand. What an instruction's entry does not read is an error there (operands.Operands.finish).
_MODIFIER = re.compile(
    r"^(?:(offset|offset0|offset1|quad_perm|row_shl|row_shr|row_ror|row_bcast|wave_\w+|row_newbcast|row_mask|bank_mask|bound_ctrl|op_sel|op_sel_hi|"
    r"neg_lo|neg_hi|mul|div|cbsz|abid|blgp|bitop3|dst_sel|dst_unused|src0_sel|src1_sel|neg):(\S+)"
    r"|(row_mirror|row_half_mirror|clamp|sc0|sc1|nt|lds|offen|idxen|glc|slc|gds|off_|vmcnt\(\d+\)|lgkmcnt\(\d+\)|expcnt\(\d+\)))$"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int  # virtual address in the code object, bytes
    size: int  # bytes, a literal included
    mnemonic: str
    operands: tuple[str, ...]
    modifiers: dict[str, str]  # value "" where the word has none
    text: str

    def __str__(self) -> str:
        return f"{self.text} at {self.address:#x}"


def parse(text: str) -> list[Instruction]:
    """Every instruction in llvm-objdump -d's text, by address."""
    found = [_instruction(match) for match in map(_LINE.match, text.splitlines()) if match]
    return sorted(found, key=lambda instruction: instruction.address)


def _instruction(match: re.Match) -> Instruction:
    mnemonic, rest, address, words = match.groups()
    operands, modifiers = [], {}
    pieces = [piece.strip() for piece in _OPERAND.findall(rest)]
    for index, piece in enumerate(pieces):
        # Only the last piece has modifiers behind its operand, or has modifiers alone.
        for word in _words(piece) if index == len(pieces) - 1 else [piece]:
            modifier = _MODIFIER.match(word)
            if modifier is None:
                operands.append(word)
            elif modifier[1]:
                modifiers[modifier[1]] = modifier[2]
            else:
                modifiers[modifier[3]] = ""
    size = 4 * len(words.split())
    return Instruction(int(address, 16), size, mnemonic, tuple(operands), modifiers, f"{mnemonic} {rest}".strip())


def _words(piece: str) -> list[str]:
    """Splits at blanks outside brackets."""
    return re.findall(r"(?:\[[^\]]*\]|\([^)]*\)|\S)+", piece)
