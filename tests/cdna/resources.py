"""What a kernel of a code object takes and does: registers, memory, and counts of the instructions that decide whether it is right and fast.

Counts are of instructions in the text of the kernel, not of executions. `python -m cdna.resources FILE…` in tests/ prints them.
"""

from __future__ import annotations

import dataclasses
import re
import sys

from cdna.disassembly import Instruction
from cdna.program import Program

REGISTERS = 512  # 32-bit registers a lane and SIMD, architectural and accumulation together
MAX_WAVES = 8  # a SIMD
SIMDS = 4  # a CU
LDS_BYTES = {"gfx942": 65536, "gfx950": 163840}  # a CU


@dataclasses.dataclass(frozen=True)
class Resources:
    vgprs: int  # of the unified file: architectural and accumulation registers
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int  # a lane
    scratch_accesses: int
    lds_bytes: int  # static
    workgroups: int  # that a CU holds at once, by registers, waves and static LDS
    waves: int  # a SIMD then has
    mfma: int
    lds_dma: int
    loads: int  # of global memory into registers
    stores: int
    atomics: int
    flat: int  # accesses that count as both global memory and LDS
    waits: int  # s_waitcnt
    full_waits: int  # with vmcnt(0)
    barriers: int
    agent_releases: int  # buffer_wbl2 sc1
    system_releases: int  # buffer_wbl2 sc0 sc1
    agent_acquires: int  # buffer_inv sc1
    system_acquires: int  # buffer_inv sc0 sc1
    traps: int
    calls: int


def _matches(pattern: str):
    return lambda instruction: re.match(pattern, instruction.mnemonic) is not None


def _cache(mnemonic: str, scope: set[str]):
    return lambda instruction: instruction.mnemonic == mnemonic and set(instruction.modifiers) == scope


_COUNTED = {
    "scratch_accesses": _matches(r"scratch_"),
    "mfma": _matches(r"v_s?mfma"),
    "lds_dma": lambda i: re.match(r"global_load_lds_", i.mnemonic) is not None or "lds" in i.modifiers,
    "loads": lambda i: re.match(r"(global|buffer|flat)_load_(?!lds)", i.mnemonic) is not None and "lds" not in i.modifiers,
    "stores": _matches(r"(global|buffer|flat)_store_"),
    "atomics": _matches(r"(global|buffer|flat)_atomic_"),
    "flat": _matches(r"flat_"),
    "waits": _matches(r"s_waitcnt"),
    "full_waits": lambda i: i.mnemonic == "s_waitcnt" and "vmcnt(0)" in i.modifiers,
    "barriers": _matches(r"s_barrier"),
    "agent_releases": _cache("buffer_wbl2", {"sc1"}),
    "system_releases": _cache("buffer_wbl2", {"sc0", "sc1"}),
    "agent_acquires": _cache("buffer_inv", {"sc1"}),
    "system_acquires": _cache("buffer_inv", {"sc0", "sc1"}),
    "traps": _matches(r"s_trap"),
    "calls": _matches(r"s_swappc"),
}


def instructions_of(program: Program, name: str) -> list[Instruction]:
    """From a kernel's entry to the next kernel's, padding behind its end included."""
    kernels = program.code_object.kernels
    entry = kernels[name].entry
    end = min((kernel.entry for kernel in kernels.values() if kernel.entry > entry), default=None)
    return [i for i in program.instructions if i.address >= entry and (end is None or i.address < end)]


def measure(program: Program, name: str) -> Resources:
    """The resources of one kernel. Raises KeyError where the code object has none of this name."""
    kernel = program.code_object.kernels[name]
    instructions = instructions_of(program, name)
    counts = {field: sum(map(counts_it, instructions)) for field, counts_it in _COUNTED.items()}
    waves = -(-kernel.max_workgroup // 64)  # of a workgroup
    by_registers = min(MAX_WAVES, REGISTERS // max(8, -(-kernel.vgprs // 8) * 8))  # waves a SIMD
    workgroups = by_registers * SIMDS // waves
    if kernel.lds_bytes:
        workgroups = min(workgroups, LDS_BYTES[program.isa] // kernel.lds_bytes)
    return Resources(
        vgprs=kernel.vgprs,
        agprs=kernel.agprs,
        sgprs=kernel.sgprs,
        vgpr_spills=kernel.vgpr_spills,
        sgpr_spills=kernel.sgpr_spills,
        scratch_bytes=kernel.scratch_bytes,
        lds_bytes=kernel.lds_bytes,
        workgroups=workgroups,
        waves=-(-workgroups * waves // SIMDS),
        **counts,
    )


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a kernel has to keep to. most, least: field -> bound; a kernel is held to the numbers that its design gives."""

    most: dict[str, int]
    least: dict[str, int]

    def broken(self, found: Resources) -> list[str]:
        """Each bound that found does not keep, in words."""
        over = [f"{name} {getattr(found, name)} is more than {bound}" for name, bound in self.most.items() if getattr(found, name) > bound]
        return over + [f"{name} {getattr(found, name)} is less than {bound}" for name, bound in self.least.items() if getattr(found, name) < bound]


def main(paths: list[str]) -> None:
    """One line a kernel: what is not zero."""
    for path in paths:
        program = Program.load(path)
        for name in program.code_object.kernels:
            found = dataclasses.asdict(measure(program, name))
            print(f"{name} {program.isa}:", ", ".join(f"{field} {value}" for field, value in found.items() if value))


if __name__ == "__main__":
    main(sys.argv[1:])
