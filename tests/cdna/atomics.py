"""Atomics of global and flat memory: one lane after another, at the GPU's scope or, with sc1, the system's; sc0 returns the old value."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from cdna.formats import bf16_to_f32, f32_to_bf16
from cdna.memory import AGENT, SYSTEM
from cdna.operands import Operands
from cdna.tables import entry
from cdna.vmem import deliver, flat_addresses, global_addresses, in_lds_window, stored


def _integers(function: Callable[[int, int], int], layout: str) -> Callable:
    limit = (1 << 8 * struct.calcsize(layout)) - 1

    def update(old: bytes, operand: bytes) -> bytes:
        result = function(struct.unpack(layout, old)[0], struct.unpack(layout, operand)[0])
        return (result & limit).to_bytes(len(old), "little")

    return update


def _floats(dtype) -> Callable:
    return lambda old, operand: (np.frombuffer(old, dtype) + np.frombuffer(operand, dtype)).astype(dtype).tobytes()


def _compare_swap(old: bytes, operand: bytes) -> bytes:
    """The operand is the new value, then what the old one has to be."""
    return operand[: len(old)] if old == operand[len(old) :] else old


def _bf16_pair(old: bytes, operand: bytes) -> bytes:
    total = bf16_to_f32(np.frombuffer(old, np.uint16)) + bf16_to_f32(np.frombuffer(operand, np.uint16))
    return f32_to_bf16(total).astype(np.uint16).tobytes()


_INTEGER_ATOMICS = {
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "swap": lambda old, x: x,
    "umax": max,
    "umin": min,
    "smax": max,
    "smin": min,
    "inc": lambda old, x: 0 if old >= x else old + 1,
    "dec": lambda old, x: x if old == 0 or old > x else old - 1,
}


def _atomic(name: str, size: int, update: Callable, operands: int = 1) -> None:
    """sc0: the old value is returned; sc1: system scope. Lanes one after another."""

    def make(o: Operands, *, flat: bool):
        returns = o.take("sc0")
        scope = SYSTEM if o.take("sc1") else AGENT
        o.take("nt")
        first = 1 if returns else 0
        addresses = flat_addresses(o, first) if flat else global_addresses(o, first, first + 2)
        data = stored(o, first + 1, size * operands, 0)
        target = o.registers(0) if returns else None

        def step(w):
            where, values = addresses(w), data(w)
            if flat and in_lds_window(w, where).any():
                raise o.unknown("a flat atomic on LDS is not modelled")
            memory = w.workgroup.memory
            before = memory.exchange(w, where, size, scope, lambda n, old: update(old, values[n].tobytes()), name)
            if target is not None:
                deliver(w, target[0], target[1], before, "u", None)
            else:
                memory.land(w, lambda: None, None)

        return step

    entry(f"global_{name}")(lambda o: make(o, flat=False))
    entry(f"flat_{name}")(lambda o: make(o, flat=True))


for _name, _function in _INTEGER_ATOMICS.items():
    _letter = "i" if _name.startswith("s") and _name in ("smax", "smin") else "I"
    _atomic(f"atomic_{_name}", 4, _integers(_function, f"<{_letter}"))
    _atomic(f"atomic_{_name}_x2", 8, _integers(_function, "<q" if _letter == "i" else "<Q"))
_atomic("atomic_cmpswap", 4, _compare_swap, operands=2)
_atomic("atomic_cmpswap_x2", 8, _compare_swap, operands=2)
_atomic("atomic_add_f32", 4, _floats(np.float32))
_atomic("atomic_add_f64", 8, _floats(np.float64))
_atomic("atomic_pk_add_f16", 4, _floats(np.float16))
_atomic("atomic_pk_add_bf16", 4, _bf16_pair)
