"""Vector comparisons: one bit a lane into a pair of scalar registers."""

from __future__ import annotations

import numpy as np

from cdna.operands import F, I32, I64, Q, U, Operands
from cdna.tables import entry
from cdna.wave import mask_of

_RELATIONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lg": lambda x, y: (x < y) | (x > y),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "neq": np.not_equal,
    "nlg": lambda x, y: ~((x < y) | (x > y)),
    "nlt": lambda x, y: ~(x < y),
    "nle": lambda x, y: ~(x <= y),
    "ngt": lambda x, y: ~(x > y),
    "nge": lambda x, y: ~(x >= y),
    "u": lambda x, y: np.isnan(x) | np.isnan(y),
    "o": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
}
_KINDS = {"f32": F, "u32": U, "i32": I32, "u64": Q, "i64": I64, "u16": np.uint16, "i16": np.int16}


def _compare(relation: str, kind: str, *, to_exec: bool) -> None:
    """One bit a lane into operand 0; v_cmpx_… into exec too."""
    test, view = _RELATIONS[relation], _KINDS[kind]

    @entry(f"v_cmp{'x' if to_exec else ''}_{relation}_{kind}")
    def make(o: Operands):
        if kind == "f32":
            x, y = o.f32(1), o.f32(2)
        elif kind.endswith("64"):
            signed = kind == "i64"
            a, b = o.u64(1, signed=signed), o.u64(2, signed=signed)
            x, y = (lambda w: a(w).view(view)), (lambda w: b(w).view(view))
        elif kind.endswith("16"):
            a, b = o.u32(1), o.u32(2)
            x, y = (lambda w: a(w).astype(np.uint16).view(view)), (lambda w: b(w).astype(np.uint16).view(view))
        else:
            a, b = o.u32(1), o.u32(2)
            x, y = (lambda w: a(w).view(view)), (lambda w: b(w).view(view))
        write = o.to_mask(0)

        def step(w):
            flags = np.broadcast_to(test(x(w), y(w)), 64)
            write(w, flags)
            if to_exec:
                w.set_exec(mask_of(flags & w.mask))

        return step


for _kind in _KINDS:
    for _relation in _RELATIONS if _kind == "f32" else ("eq", "ne", "lt", "le", "gt", "ge"):
        if (_kind, _relation) != ("f32", "ne"):
            for _exec in (False, True):
                _compare(_relation, _kind, to_exec=_exec)


@entry("v_cmp_class_f32")
def _classify(o: Operands):
    """Operand 2 has a bit for each class: signalling and quiet NaN, -inf, -normal, -subnormal, -0, +0, +subnormal, +normal, +inf."""
    write, x, y = o.to_mask(0), o.f32(1), o.u32(2)

    def step(w):
        value = np.broadcast_to(x(w), 64)
        raw, magnitude, negative = value.copy().view(U), np.abs(value), np.signbit(value)
        kind = np.where(magnitude == 0, 0, np.where(magnitude < np.finfo(F).tiny, 1, np.where(np.isinf(value), 3, 2)))
        index = np.where(negative, 5 - kind, 6 + kind)
        index = np.where(np.isnan(value), np.where(raw >> U(22) & U(1), 1, 0), index)
        write(w, (np.broadcast_to(y(w), 64) >> index.astype(U) & U(1)).astype(bool))

    return step
