"""Runs launches on GPUs of one address space: which wave goes on, for how long, and what a workgroup starts with."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import numpy as np

from cdna.errors import BudgetSpent, Trap
from cdna.memory import Memory
from cdna.program import Program
from cdna.wave import BARRIER, ENDED, LANES, RUNNING, SLEEPING, Wave

_STEADY_TURN = 2000  # instructions of a wave before the next one, without a seed
_TURNS = (1, 3, 17, 120, 1000)  # the lengths that a seed picks from


@dataclasses.dataclass(frozen=True)
class Launch:
    """grid: workgroups, block: threads, each a number or up to three of them. arguments: the explicit ones as the kernel's metadata lays them out."""

    program: Program
    kernel: str
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    arguments: bytes
    dynamic_lds: int = 0  # bytes behind the static ones
    gpu: int = 0


@dataclasses.dataclass(frozen=True)
class Run:
    instructions: int  # of waves
    ticks: int


class Workgroup:
    """One workgroup, alone on its CU."""

    def __init__(self, machine: Machine, launch: Launch, number: int, index: tuple[int, int, int], cu: int):
        kernel = launch.program.code_object.kernels[launch.kernel]
        self.machine, self.memory, self.launch = machine, machine.memory, launch
        self.gpu, self.cu, self.index = launch.gpu, cu, index
        self.xcd, self.cu_of_xcd = number % machine.memory.num_xcds, number // machine.memory.num_xcds
        self.lds = np.full(kernel.lds_bytes + launch.dynamic_lds, 0xFF, np.uint8)
        self.scratch_bytes = kernel.scratch_bytes
        self.waves: list[Wave] = []
        self.code_base = 0


class Machine:
    """seed: None runs waves in turn; a number makes an adversary pick the next wave, its turn's length, and what stands still for a while.

    ticks: what s_memrealtime gives; one for each instruction of any wave. host: called between rounds, for what the host does meanwhile.
    """

    def __init__(self, memory: Memory, *, seed: int | None = None, host: Callable[[], None] = lambda: None):
        self.memory, self.host = memory, host
        self.ticks = 0
        self._random = None if seed is None else np.random.default_rng(seed)
        self._still: tuple[Workgroup, bool, int] | None = None  # a workgroup, or its whole GPU, and for how many rounds more

    def run(self, *streams: list[Launch], budget: int = 20_000_000) -> Run:
        """Runs streams of launches, each on a GPU of its own and one launch after another, all streams at once.

        Raises Fault of the kind that stopped a kernel. A trap stops its own GPU, and is raised when the others have stopped too.
        """
        gpus = [{launch.gpu for launch in stream} for stream in streams]
        if any(len(one) != 1 for one in gpus) or len(set.union(*gpus)) != len(gpus):
            raise ValueError("each stream is of one GPU, and each GPU has one stream")
        with np.errstate(all="ignore"):  # wrap-around, NaN and infinity are results
            return self._run([list(stream) for stream in streams], budget)

    def _run(self, streams: list[list[Launch]], budget: int) -> Run:
        start = self.ticks
        waiting = {stream[0].gpu: stream for stream in streams}
        groups = {gpu: self._groups(stream.pop(0)) for gpu, stream in waiting.items()}  # of the launch that a GPU runs
        traps: list[Trap] = []
        while groups:
            live = [wave for of_gpu in groups.values() for group in of_gpu for wave in group.waves if wave.state != ENDED]
            if self.ticks - start >= budget:
                raise BudgetSpent(f"{budget} instructions, {len(live)} waves still run")
            try:
                self._round(live, budget - (self.ticks - start))
            except Trap as trap:
                traps.append(trap)
                del groups[trap.gpu]
            self.host()
            for gpu, of_gpu in list(groups.items()):
                self._open_barriers(of_gpu)
                if all(wave.state == ENDED for group in of_gpu for wave in group.waves):
                    del groups[gpu]
                    self.memory.finish(gpu, is_last=not waiting[gpu])
                    if waiting[gpu]:
                        groups[gpu] = self._groups(waiting[gpu].pop(0))
        if traps:
            raise traps[0]
        return Run(self.ticks - start, self.ticks)

    def _round(self, live: list[Wave], budget: int) -> None:
        """One turn of some waves, each of at most budget instructions."""
        for wave, length in self._turns(live):
            if wave.state == SLEEPING:
                wave.state = RUNNING
            if wave.state == RUNNING:
                self._turn(wave, min(length, budget))
            self.memory.turn(wave)  # of one that waits at a barrier too: what it stored arrives some time

    def _turns(self, live: list[Wave]):
        if self._random is None:
            return [(wave, _STEADY_TURN) for wave in live]
        self._choose_still(live)
        order = self._random.permutation(len(live))
        lengths = self._random.choice(_TURNS, len(live))
        return [(live[i], int(lengths[i])) for i in order if not self._stands_still(live[i].workgroup)] or [(wave, _STEADY_TURN) for wave in live]

    def _choose_still(self, live: list[Wave]) -> None:
        """What the others overtake: a workgroup or a GPU, for one round or for many."""
        if self._still is not None and self._still[2] > 0:
            group, whole_gpu, rounds = self._still
            self._still = group, whole_gpu, rounds - 1
        elif self._random.random() < 0.3:
            group = live[self._random.integers(len(live))].workgroup
            self._still = group, bool(self._random.random() < 0.3), int(self._random.choice((0, 3, 30, 300)))
        else:
            self._still = None

    def _stands_still(self, group: Workgroup) -> bool:
        if self._still is None:
            return False
        still, whole_gpu, _ = self._still
        return group.gpu == still.gpu if whole_gpu else group is still

    def _turn(self, wave: Wave, length: int) -> None:
        code = wave.workgroup.launch.program.code
        for _ in range(length):
            at = wave.pc
            wave.pc = at + 1
            self.ticks += 1
            try:
                code[at](wave)
            except Exception as error:
                group = wave.workgroup
                error.add_note(
                    f"in {group.launch.kernel}, workgroup {group.index} of GPU {group.gpu}, wave {wave.index}: "
                    f"{group.launch.program.instructions[at]}"
                )
                raise
            if wave.state != RUNNING:
                return

    def _open_barriers(self, groups: list[Workgroup]) -> None:
        for group in groups:
            present = [wave for wave in group.waves if wave.state != ENDED]
            if present and all(wave.state == BARRIER for wave in present):
                for wave in present:
                    wave.state = RUNNING

    # --- what a workgroup starts with --------------------------------------------------------------------------------
    def _groups(self, launch: Launch) -> list[Workgroup]:
        grid, block = _three(launch.grid), _three(launch.block)
        kernel = launch.program.code_object.kernels[launch.kernel]
        threads = int(np.prod(block))
        if threads > kernel.max_workgroup:
            raise ValueError(f"{launch.kernel} is built for at most {kernel.max_workgroup} threads, not {threads}")
        _check_float_mode(launch)
        kernarg = self.memory.put(np.frombuffer(_kernarg(launch, grid, block), np.uint8))
        packet = self.memory.put(np.frombuffer(_packet(grid, block, kernarg), np.uint8))
        base = self.memory.image(launch.program)
        groups = []
        for number in range(int(np.prod(grid))):
            index = number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])
            group = Workgroup(self, launch, number, index, cu=1000 * launch.gpu + number)
            group.code_base = base
            for first in range(0, threads, LANES):
                wave = Wave(group, first // LANES, min(LANES, threads - first))
                self._first_registers(wave, kernel, kernarg, packet, block)
                group.waves.append(wave)
            groups.append(group)
        return groups

    def _first_registers(self, wave: Wave, kernel, kernarg: int, packet: int, block: tuple) -> None:
        """As LLVM's guide orders them: what the descriptor asks for, preloaded arguments, the workgroup's place."""
        descriptor, program = kernel.descriptor, wave.workgroup.launch.program
        values: list[int] = []
        # (bit of the descriptor's properties, scalar registers, what they hold, or None where it is not modelled)
        asked = (0, 4, None), (1, 2, packet), (2, 2, None), (3, 2, kernarg), (4, 2, 0), (5, 2, None), (6, 1, kernel.scratch_bytes)
        for bit, dwords, value in asked:
            if descriptor.enabled(bit):
                if value is None:
                    raise NotImplementedError(f"{kernel.name}: enable_sgpr bit {bit} of the kernel descriptor is not modelled")
                values += [value >> 32 * n & 0xFFFF_FFFF for n in range(dwords)]
        preload, offset = descriptor.preload_dwords, descriptor.preload_offset_dwords
        data = self.memory.get(kernarg, np.uint32, (offset + preload,))
        values += [int(value) for value in data[offset:]]
        for n, place in enumerate(wave.workgroup.index):
            if descriptor.rsrc2 >> (7 + n) & 1:
                values.append(place)
        wave.s[: len(values)] = values
        lane = np.arange(LANES, dtype=np.uint32) + np.uint32(wave.index * LANES)
        wave.v[0] = lane % block[0] | lane // block[0] % block[1] << np.uint32(10) | lane // (block[0] * block[1]) << np.uint32(20)
        # Arguments that are preloaded are not loaded again: such a kernel starts 256 bytes in.
        wave.pc = program.index_of(kernel.entry + (256 if preload else 0))


def _three(sizes: int | tuple[int, ...]) -> tuple[int, int, int]:
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return (*given, 1, 1, 1)[:3]


def _check_float_mode(launch: Launch) -> None:
    """Rounding to nearest even, f32 and f16 denormals kept: the mode that the arithmetic here has."""
    mode = launch.program.code_object.kernels[launch.kernel].descriptor.rsrc1 >> 12 & 0xFF
    if mode & 0x0F != 0 or mode >> 4 & 0x3 != 0x3:
        raise NotImplementedError(f"{launch.kernel}: float mode {mode:#x} of the kernel descriptor is not modelled")


def _kernarg(launch: Launch, grid: tuple, block: tuple) -> bytes:
    """Explicit arguments, then the hidden ones that are modelled; others are 0xFF, so that following such a pointer is a fault."""
    kernel = launch.program.code_object.kernels[launch.kernel]
    explicit = [argument for argument in kernel.arguments if not argument.kind.startswith("hidden_")]
    end = max((argument.offset + argument.size for argument in explicit), default=0)
    if len(launch.arguments) != end:
        raise ValueError(f"{launch.kernel} takes {end} bytes of arguments, not {len(launch.arguments)}")
    hidden = {"hidden_grid_dims": 3, "hidden_dynamic_lds_size": launch.dynamic_lds}
    for axis, blocks, threads in zip("xyz", grid, block, strict=True):
        hidden |= {f"hidden_block_count_{axis}": blocks, f"hidden_group_size_{axis}": threads, f"hidden_remainder_{axis}": 0}
        hidden[f"hidden_global_offset_{axis}"] = 0
    content = bytearray(b"\xff" * max(kernel.kernarg_bytes, end, 1))
    content[:end] = launch.arguments
    for argument in kernel.arguments:
        if argument.kind in hidden:
            content[argument.offset : argument.offset + argument.size] = hidden[argument.kind].to_bytes(argument.size, "little")
    return bytes(content)


def _packet(grid: tuple, block: tuple, kernarg: int) -> bytes:
    """The 64 bytes of the AQL dispatch packet: sizes in threads."""
    threads = [blocks * size for blocks, size in zip(grid, block, strict=True)]
    return struct.pack("<HHHHHHIIIIIQQQQ", 0, 3, *block, 0, *threads, 0, 0, 0, kernarg, 0, 0)
