"""Runs gfx942 and gfx950 code objects on the CPU: a test tool, since no AMD GPU is at hand.

    program = cdna.Program.load("k1.co")                       # ELF, and llvm-objdump's text of it
    memory = cdna.WeakMemory(seed=1)                           # or cdna.Memory(): every access at once and in order
    x = memory.put(numpy_array); y = memory.alloc(4096)        # device addresses; every access is checked against them
    machine = cdna.Machine(memory, seed=1)
    machine.run([cdna.Launch(program, "k1", grid=8, block=256, arguments=struct.pack("<2Q", x, y))])
    memory.get(y, np.float32, (1024,))

A register is one numpy vector of 64 lanes. An instruction that is not in the tables raises UnknownInstruction with its text; a modifier that
its entry does not read does too. Modules: elf, disassembly, program (what is run); tables, operands, dpp, sdwa, scalar, vector, compare, packed,
lanes, mfma, lds, vmem, atomics, private, control (what an instruction does); memory, weak_memory (where its data goes); machine (who runs when);
resources, limits (what a kernel takes, and what it may); toolchain, fixtures.

Not modelled: time, bank conflicts, faults of alignment, exceptions, denormal flushing of v_exp, v_log and v_rcp, f64, fp6, scaled 32x32 MFMA. Fused
f32 operations round twice, through f64. The transcendental instructions are rounded to nearest, where the GPU's may be one unit off. MFMA sums
its products in f64 and adds the accumulator in f32; the GPU's own order is not published.
"""

from cdna.elf import CodeObject
from cdna.errors import BudgetSpent, Fault, MemoryFault, Trap, UnknownInstruction
from cdna.machine import Launch, Machine, Run
from cdna.memory import Memory
from cdna.program import Program
from cdna.weak_memory import WeakMemory

__all__ = [
    "BudgetSpent",
    "CodeObject",
    "Fault",
    "Launch",
    "Machine",
    "Memory",
    "MemoryFault",
    "Program",
    "Run",
    "Trap",
    "UnknownInstruction",
    "WeakMemory",
]
