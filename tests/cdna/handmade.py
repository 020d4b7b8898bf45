"""Programs of a few instructions behind a descriptor made here: what the tests of the machine run."""

from __future__ import annotations

from cdna.elf import Argument, CodeObject, Descriptor, Kernel
from cdna.program import Program

ENTRY = 0x1000


def handmade(
    lines: list[str],
    *,
    rsrc2: int = 1 << 7,  # the workgroup's x in a scalar register
    properties: int = 1 << 3,  # the address of the arguments in the two before it
    preload: int = 0,
    rsrc1: int = 0xF0 << 12,  # denormals kept
    lds: int = 64,
    kernarg: int = 16,
) -> Program:
    """A program with one kernel, "k", of four bytes an instruction and s_endpgm behind them; 16 bytes of arguments."""
    descriptor = Descriptor(lds, 0, kernarg, 0, rsrc1, rsrc2, 0, properties, preload)
    kernel = Kernel("k", ENTRY, descriptor, (Argument(0, 16, "by_value"),), 8, 0, 16, 0, 0, lds, 0, kernarg, 1024)
    text = "".join(f"\t{line} // {ENTRY + 4 * i:012X}: 00000000\n" for i, line in enumerate([*lines, "s_endpgm"]))
    return Program(CodeObject("gfx950", {"k": kernel}, ((ENTRY, bytes(0x200)),)), text)
