"""Every environment variable of this package, parsed once and typed.

The standard library only: setup.py loads this file by path before the package exists.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping

PREFIX = "SGL_LOWLATENCY_"
DEEPSEEK_SLICES = ("attention_in", "attention_out", "moe")  # in a layer's order
MAX_PLANTED = 45  # the last value of dialect::Planted (csrc/include/sgl_lowlatency/dialect/planted.hpp)


@dataclasses.dataclass(frozen=True)
class Config:
    """The parsed environment.

    self_check: SGL_LOWLATENCY_SELF_CHECK, 0 or 1 (default 1). 0 serves without comparing against SGLang's forward
        first; it is logged as a warning.
    emulate: SGL_LOWLATENCY_EMULATE, 0 or 1 (default 0). 1 runs the kernels in host emulation on a machine without a
        GPU: correct and slow, for the demo and for tests.
    log_coverage_s: SGL_LOWLATENCY_LOG_COVERAGE_S, seconds between two coverage lines in the log (default 0: only the
        line at exit).
    cuda_archs: SGL_LOWLATENCY_CUDA_ARCHS, read at build time: a comma list out of sm_90a, sm_100a, sm_103a, or "none"
        for a host-only build. None when unset: every architecture that the installed nvcc can compile.
    draft_sampler: SGL_LOWLATENCY_DRAFT_SAMPLER, 0 or 1 (default 0). 1 takes the proposals of DSPARK drafts, dense ones and
        DeepSeek-V4.1's, from draft_sampler.
    deepseek_slices: SGL_LOWLATENCY_DEEPSEEK_SLICES, a comma list out of attention_in, attention_out, moe, or "none": what of a layer of
        DeepSeek-V4.1 is ours. All of them when unset.
    planted: SGL_LOWLATENCY_PLANTED, read at build time: the number of a bug (dialect::Planted) compiled into every
        kernel, so that a gate can be seen to fail. 0, the default, plants none.
    """

    self_check: bool = True
    emulate: bool = False
    log_coverage_s: float = 0.0
    cuda_archs: tuple[str, ...] | None = None
    draft_sampler: bool = False
    deepseek_slices: tuple[str, ...] = DEEPSEEK_SLICES
    planted: int = 0


def _flag(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value!r} is not 0 or 1")
    return value == "1"


def _seconds(name: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is not a number of seconds") from None
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name}={value!r} is not a finite number of seconds, 0 or more")
    return seconds


CUDA_ARCHS = ("sm_90a", "sm_100a", "sm_103a")


def _list(name: str, value: str, known: tuple[str, ...], otherwise: str = "") -> tuple[str, ...]:
    """The items of a comma list, in the order of `known`. otherwise: what else the value may be, in words."""
    items = [item.strip() for item in value.split(",")]
    unknown = [item for item in items if item not in known]
    if unknown:
        raise ValueError(f"{name}={value!r}: {unknown[0]!r} is not one of {', '.join(known)}{otherwise}")
    return tuple(item for item in known if item in items)


def _archs(name: str, value: str) -> tuple[str, ...]:
    return () if value == "none" else _list(name, value, CUDA_ARCHS, ", nor is the value 'none'")


def _slices(name: str, value: str) -> tuple[str, ...]:
    return () if value == "none" else _list(name, value, DEEPSEEK_SLICES, ", nor is the value 'none'")


def _planted(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) > MAX_PLANTED:
        raise ValueError(f"{name}={value!r} is not a number from 0 to {MAX_PLANTED}")
    return int(value)


_PARSERS = {
    "SELF_CHECK": ("self_check", _flag),
    "EMULATE": ("emulate", _flag),
    "LOG_COVERAGE_S": ("log_coverage_s", _seconds),
    "CUDA_ARCHS": ("cuda_archs", _archs),
    "DRAFT_SAMPLER": ("draft_sampler", _flag),
    "DEEPSEEK_SLICES": ("deepseek_slices", _slices),
    "PLANTED": ("planted", _planted),
}
NAMES = tuple(PREFIX + name for name in _PARSERS)


def parse(environ: Mapping[str, str]) -> Config:
    """The configuration in environ. Raises ValueError on a bad value or an unknown SGL_LOWLATENCY_* name."""
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in NAMES)
    if unknown:
        raise ValueError(f"{unknown[0]} is not a variable of sgl-lowlatency; there are {', '.join(NAMES)}")
    fields = {}
    for name, (field, parser) in _PARSERS.items():
        if PREFIX + name in environ:
            fields[field] = parser(PREFIX + name, environ[PREFIX + name])
    return Config(**fields)


@functools.cache
def get() -> Config:
    """The configuration of this process. Raises ValueError as parse does."""
    return parse(os.environ)
