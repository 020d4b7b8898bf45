"""Data parallel primitives: operand 1 is read from another lane of the wave.

A lane whose source is outside its row, or inactive, reads 0 with bound_ctrl:1 and is not written without it. Lanes that row_mask or bank_mask
leave out are not written either.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

_LANE = np.arange(64)
_ROW = _LANE & ~15
_IN_ROW = _LANE & 15
_CONTROLS = ("quad_perm", "row_mirror", "row_half_mirror", "row_shr", "row_shl", "row_ror", "row_bcast", "row_newbcast")


def _sources(control: str, value: str) -> tuple[np.ndarray, np.ndarray]:
    """(source lane, whether it exists) of each of 64 lanes."""
    every = np.ones(64, bool)
    if control == "quad_perm":
        picks = np.array([int(n) for n in re.findall(r"\d", value)])
        return (_LANE & ~3) + picks[_LANE & 3], every
    if control == "row_mirror":
        return _ROW + 15 - _IN_ROW, every
    if control == "row_half_mirror":
        return (_LANE & ~7) + 7 - (_LANE & 7), every
    n = int(value)
    if control == "row_shr":
        return _LANE - n, _IN_ROW >= n
    if control == "row_shl":
        return _LANE + n, _IN_ROW + n < 16
    if control == "row_ror":
        return _ROW + ((_IN_ROW - n) & 15), every
    if control == "row_newbcast":
        return _ROW + n, every
    return _LANE // (n + 1) * (n + 1) - 1, _LANE > n  # row_bcast:15 and :31, from the last lane of the rows below


@dataclasses.dataclass(frozen=True)
class Permutation:
    source: np.ndarray  # lane that each lane reads
    exists: np.ndarray  # bool [64]
    chosen: np.ndarray  # bool [64], lanes of row_mask and bank_mask
    zero_fill: bool

    @classmethod
    def take(cls, modifiers: dict[str, str]) -> Permutation:
        """Removes its modifiers. Raises KeyError where no known control is there (the caller's finish names what is)."""
        (control,) = [name for name in _CONTROLS if name in modifiers]
        source, exists = _sources(control, modifiers.pop(control))
        rows, banks = int(modifiers.pop("row_mask", "0xf"), 0), int(modifiers.pop("bank_mask", "0xf"), 0)
        chosen = (rows >> (_LANE >> 4) & 1 & banks >> (_LANE >> 2 & 3)).astype(bool)
        return cls(np.clip(source, 0, 63), exists, chosen, modifiers.pop("bound_ctrl", "") == "1")

    def reader(self, read: Callable) -> Callable:
        def permuted(w):
            values = np.broadcast_to(read(w), 64)[self.source]
            return np.where(self._valid(w), values, np.uint32(0))

        return permuted

    def writer(self, file: str, register: int) -> Callable:
        def write(w, value):
            lanes = w.mask & self.chosen
            if not self.zero_fill:
                lanes = lanes & self._valid(w)
            np.copyto((w.v if file == "v" else w.a)[register], value, where=lanes)

        return write

    def _valid(self, w) -> np.ndarray:
        return self.exists & w.mask[self.source]
