"""Where a wave goes next, waits, clocks and the few facts it can ask of the machine."""

from __future__ import annotations

import re

from cdna.errors import Trap
from cdna.operands import M64, Operands
from cdna.tables import entry
from cdna.wave import BARRIER, ENDED, SLEEPING


def _target(o: Operands) -> int:
    """Index of the instruction that a branch's 16-bit distance, in dwords, leads to."""
    distance = int(o.texts[0], 0) & 0xFFFF
    distance -= 1 << 16 if distance >> 15 else 0
    return o.program.index_of(o.instruction.address + 4 + 4 * distance)


def _branch(name: str, taken) -> None:
    @entry(name)
    def make(o: Operands):
        target = _target(o)

        def step(w):
            if taken(w):
                w.pc = target

        return step


_branch("s_branch", lambda w: True)
_branch("s_cbranch_scc0", lambda w: not w.scc)
_branch("s_cbranch_scc1", lambda w: w.scc)
_branch("s_cbranch_vccz", lambda w: w.vcc == 0)
_branch("s_cbranch_vccnz", lambda w: w.vcc != 0)
_branch("s_cbranch_execz", lambda w: w.exec == 0)
_branch("s_cbranch_execnz", lambda w: w.exec != 0)


@entry("s_getpc_b64")
def _get_pc(o: Operands):
    write, after = o.to_scalar(0, 2), o.instruction.address + o.instruction.size
    return lambda w: write(w, w.workgroup.code_base + after)


@entry("s_setpc_b64")
def _set_pc(o: Operands):
    read, program = o.scalar(0, 2), o.program

    def step(w):
        w.pc = program.index_of(read(w) - w.workgroup.code_base)

    return step


@entry("s_swappc_b64")
def _swap_pc(o: Operands):
    read, write, program = o.scalar(1, 2), o.to_scalar(0, 2), o.program
    after = o.instruction.address + o.instruction.size

    def step(w):
        target = read(w)
        write(w, w.workgroup.code_base + after)
        w.pc = program.index_of(target - w.workgroup.code_base)

    return step


@entry("s_nop", "s_setprio", "s_inst_prefetch", "s_icache_inv")
def _nothing(o: Operands):
    """Changes the time that something takes, or reads again what never changes."""
    return lambda w: None


@entry("s_barrier")
def _barrier(o: Operands):
    """Waits for the waves of the workgroup, and for no memory of anyone."""

    def step(w):
        w.state = BARRIER

    return step


@entry("s_sleep")
def _sleep(o: Operands):
    def step(w):
        w.state = SLEEPING

    return step


@entry("s_endpgm")
def _end(o: Operands):
    def step(w):
        w.state = ENDED
        w.workgroup.memory.end(w)

    return step


@entry("s_trap")
def _trap(o: Operands):
    number = int(o.texts[0], 0)

    def step(w):
        raise Trap(f"s_trap {number} in workgroup {w.workgroup.index} of GPU {w.workgroup.gpu}, wave {w.index}", w.workgroup.gpu)

    return step


@entry("s_waitcnt")
def _wait(o: Operands):
    """vmcnt(N): until at most N vector memory operations of the wave are in flight. lgkmcnt and expcnt have nothing to wait for here."""
    counts = {}
    for word in [*o.modifiers, *o.texts]:
        match = re.match(r"^(vmcnt|lgkmcnt|expcnt)\((\d+)\)$", word)
        if match is None:
            raise o.unknown(f"count {word!r}")
        counts[match[1]] = int(match[2])
    o.modifiers.clear()
    if "vmcnt" not in counts:
        return lambda w: None
    left = counts["vmcnt"]
    return lambda w: w.workgroup.memory.wait(w, left)


@entry("s_memrealtime", "s_memtime")
def _clock(o: Operands):
    """Both count the machine's ticks; what a tick stands for is the machine's."""
    write = o.to_scalar(0, 2)
    return lambda w: write(w, w.workgroup.machine.ticks & M64)


@entry("s_getreg_b32")
def _get_register(o: Operands):
    """XCC_ID: the XCD. HW_ID: the CU of that XCD from bit 8 on, its shader engine and array 0; the wave's slot, below, is its number."""
    write = o.to_scalar(0)
    if o.texts[1] == "hwreg(HW_REG_XCC_ID)":
        return lambda w: write(w, w.workgroup.xcd)
    if o.texts[1] == "hwreg(HW_REG_HW_ID)":
        return lambda w: write(w, w.workgroup.cu_of_xcd << 8 | w.index)
    raise o.unknown(f"register {o.texts[1]!r}")


def _scope(o: Operands) -> int:
    return o.take("sc0") | o.take("sc1") << 1


@entry("buffer_wbl2")
def _write_back(o: Operands):
    scope = _scope(o)
    return lambda w: w.workgroup.memory.write_back(w, scope)


@entry("buffer_inv")
def _invalidate(o: Operands):
    scope = _scope(o)
    return lambda w: w.workgroup.memory.invalidate(w, scope)


@entry("s_dcache_inv", "s_dcache_inv_vol")
def _invalidate_scalar(o: Operands):
    return lambda w: w.workgroup.memory.invalidate_scalar(w)
