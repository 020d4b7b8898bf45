"""Runs single instructions on one wave: what the tests of the instruction tables use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from cdna import program  # noqa: F401  (it fills the tables)
from cdna.disassembly import parse
from cdna.memory import Memory
from cdna.tables import decode
from cdna.wave import ALL, VCC, Wave


@dataclasses.dataclass
class _Program:
    isa: str

    def index_of(self, address: int) -> int:
        return address // 4


@dataclasses.dataclass
class _Workgroup:
    memory: Memory
    lds: np.ndarray
    machine: object = None
    index: tuple[int, int, int] = (0, 0, 0)
    gpu: int = 0
    cu: int = 0
    xcd: int = 0
    cu_of_xcd: int = 0
    scratch_bytes: int = 64
    code_base: int = 1 << 40


@dataclasses.dataclass
class _Clock:
    ticks: int


def wave(memory: Memory | None = None, lds: np.ndarray | None = None, *, cu: int = 0, xcd: int = 0, gpu: int = 0, ticks: int = 0) -> Wave:
    """A wave of 64 active lanes in a workgroup of its own."""
    lds = np.full(1024, 0xFF, np.uint8) if lds is None else lds
    return Wave(_Workgroup(memory or Memory(1 << 16), lds, _Clock(ticks), gpu=gpu, cu=cu, xcd=xcd), 0, 64)


def run(
    text: str | Iterable[str],
    w: Wave | None = None,
    *,
    v: Mapping[int, np.ndarray] = {},
    a: Mapping[int, np.ndarray] = {},
    s: Mapping[int, int] = {},
    exec_mask: int = ALL,
    vcc: int = 0,
    scc: int = 0,
    isa: str = "gfx950",
) -> Wave:
    """Runs instructions, one after another without branches, and returns the wave. Registers: uint32 or float32 of 64 lanes; s: 32-bit values."""
    w = w or wave()
    for rows, values in ((w.v, v), (w.a, a)):
        for i, value in values.items():
            rows[i] = np.asarray(value).view(np.uint32)
    for i, value in s.items():
        w.s[i] = value
    w.s[VCC], w.s[VCC + 1], w.scc = vcc & 0xFFFF_FFFF, vcc >> 32, scc
    w.set_exec(exec_mask)
    with np.errstate(all="ignore"):
        for line in [text] if isinstance(text, str) else text:
            decode(instruction(line), _Program(isa))(w)
    return w


def instruction(text: str, address: int = 0):
    """What llvm-objdump's line for text parses to."""
    (parsed,) = parse(f"\t{text} // {address:012X}: 00000000\n")
    return parsed
