"""What one wave owns: its registers, masks and place in the program."""

from __future__ import annotations

import functools

import numpy as np

LANES = 64
VCC, M0 = 106, 124  # places of vcc_lo and m0 among the scalar registers, as the encoding numbers them
ALL = (1 << LANES) - 1
POISON = 0xFFFF_FFFF  # of registers and LDS that nobody wrote: a NaN in f32, bf16 and f16

RUNNING, SLEEPING, BARRIER, ENDED = "running", "sleeping", "barrier", "ended"


@functools.lru_cache(maxsize=4096)
def bits(mask: int) -> np.ndarray:
    """bool [64], lane 0 first; shared, so never written."""
    return np.unpackbits(np.array([mask], "<u8").view(np.uint8), bitorder="little").astype(bool)


@functools.lru_cache(maxsize=4096)
def _lanes(mask: int) -> np.ndarray:
    return np.flatnonzero(bits(mask))


def mask_of(flags: np.ndarray) -> int:
    """The 64-bit integer of bool [64]."""
    return int(np.packbits(flags, bitorder="little").view("<u8")[0])


class Wave:
    """s: 128 scalar registers as integers; v, a: uint32 [256, 64], vf: the same memory as v in f32.

    exec is set through set_exec, which keeps mask (bool [64]), lanes (indices of active lanes) and full beside it.
    """

    def __init__(self, workgroup, index: int, live_lanes: int):
        self.workgroup, self.index = workgroup, index
        self.s = [POISON] * 128
        self.s[VCC] = self.s[VCC + 1] = 0
        self.v = np.full((256, LANES), POISON, np.uint32)
        self.a = np.full((256, LANES), POISON, np.uint32)
        self.vf = self.v.view(np.float32)
        self.scc = 0
        self.pc = 0  # index of the next instruction
        self.state = RUNNING
        self.queue: list = []  # vector memory operations in flight, oldest first (weak_memory.py)
        self.scratch = None  # uint8 [64, bytes], made by the first access
        self.set_exec((1 << live_lanes) - 1)

    def set_exec(self, value: int) -> None:
        self.exec = value
        self.full = value == ALL
        self.mask = bits(value)
        self.lanes = _lanes(value)

    @property
    def vcc(self) -> int:
        return self.s[VCC] | self.s[VCC + 1] << 32
