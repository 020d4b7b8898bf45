"""The numerics gate: ours may be at most twice as far from the oracle as SGLang's own bf16 path is, per output.

Two distances: relative L2, and the largest absolute difference. The largest of few differences is small by luck, so the
standard path's counts as at least LUCK standard deviations of its differences; a wrong element is off by hundreds. Nor does it count
as less than what rounding the largest value to the output's own type may cost: nobody can be nearer than that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sgl_lowlatency.reference.step import StepOutputs

DEFAULT_FACTOR = 2.0
LUCK = 8.0


@dataclass(frozen=True)
class Figure:
    """One output's errors against the oracle: relative L2 and largest absolute, ours and the standard path's."""

    output: str
    ours_rel_l2: float
    standard_rel_l2: float
    ours_max_abs: float
    standard_max_abs: float
    standard_rms: float  # root mean square of the standard path's differences
    rounding_abs: float  # most that rounding the oracle to the type of ours may cost
    num_not_finite: int  # elements of ours that are NaN or infinite: poison left unwritten, or a NaN computed
    factor: float

    @property
    def ratio(self) -> float:
        """The larger of the two error ratios, ours over standard; infinite when an element of ours is not finite."""
        if self.num_not_finite:
            return float("inf")
        return max(
            _ratio(self.ours_rel_l2, self.standard_rel_l2),
            _ratio(self.ours_max_abs, max(self.standard_max_abs, LUCK * self.standard_rms, self.rounding_abs)),
        )

    @property
    def passed(self) -> bool:
        return self.ratio <= self.factor

    def __str__(self) -> str:
        text = (
            f"{'ok  ' if self.passed else 'MISS'} {self.output}: rel L2 {self.ours_rel_l2:.3e} (standard {self.standard_rel_l2:.3e}), "
            f"max abs {self.ours_max_abs:.3e} (standard {self.standard_max_abs:.3e}), ratio {self.ratio:.2f} of {self.factor:g}"
        )
        return text + (f", {self.num_not_finite} elements not finite" if self.num_not_finite else "")


@dataclass(frozen=True)
class TopToken:
    """The largest logit of each row. num_decided: rows where the oracle's first leads its second by more than twice the standard path's
    largest error, so that a path as good as that one takes the same token; num_agreed: of them, rows where ours does."""

    num_rows: int
    num_decided: int
    num_agreed: int

    @property
    def passed(self) -> bool:
        return self.num_agreed == self.num_decided

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'MISS'} top token: {self.num_agreed} of {self.num_decided} decided rows, of {self.num_rows}"


@dataclass(frozen=True)
class GateReport:
    figures: tuple[Figure, ...]
    top_token: TopToken | None = None  # where there are logits

    @property
    def passed(self) -> bool:
        return all(figure.passed for figure in self.figures) and (self.top_token is None or self.top_token.passed)

    @property
    def misses(self) -> tuple[Figure, ...]:
        return tuple(figure for figure in self.figures if not figure.passed)

    @property
    def worst_ratio(self) -> float:
        return max(figure.ratio for figure in self.figures)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.figures, *([] if self.top_token is None else [self.top_token]))))


def _ratio(ours: float, standard: float) -> float:
    if ours == 0.0:
        return 0.0
    return ours / standard if standard > 0.0 else float("inf")


def _errors(x: torch.Tensor, oracle: torch.Tensor) -> tuple[float, float, float]:
    """(relative L2, largest absolute, root mean square) of the difference."""
    difference = x.double() - oracle.double()
    norm = float(oracle.double().norm())
    l2 = float(difference.norm())
    return l2 / norm if norm > 0.0 else l2, float(difference.abs().max()), l2 / difference.numel() ** 0.5


def _rounding(oracle: torch.Tensor, dtype: torch.dtype) -> float:
    """Half a unit in the last place of the largest value, where `dtype` is bf16; nothing else is rounded at the end."""
    largest = float(oracle.double().abs().max())
    return math.ldexp(0.5, math.frexp(largest)[1] - 8) if dtype == torch.bfloat16 else 0.0


def figure(output: str, ours: torch.Tensor, standard: torch.Tensor, oracle: torch.Tensor, factor: float = DEFAULT_FACTOR) -> Figure:
    """Compares one output. All three have one shape. Raises ValueError for other shapes or an oracle that is not finite."""
    if not ours.shape == standard.shape == oracle.shape:
        raise ValueError(f"{output}: shapes {list(ours.shape)}, {list(standard.shape)}, {list(oracle.shape)} differ")
    for name, tensor in (("oracle", oracle), ("standard path", standard)):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{output}: the {name} is not finite, nothing can be compared with it")
    ours_rel_l2, ours_max_abs, _ = _errors(ours, oracle)
    standard_rel_l2, standard_max_abs, standard_rms = _errors(standard, oracle)
    num_not_finite = int((~ours.isfinite()).sum())
    return Figure(
        output, ours_rel_l2, standard_rel_l2, ours_max_abs, standard_max_abs, standard_rms, _rounding(oracle, ours.dtype), num_not_finite, factor
    )


def top_token(ours: torch.Tensor, standard: torch.Tensor, oracle: torch.Tensor) -> TopToken:
    """Of logits [rows, vocab]."""
    first, second = oracle.topk(2, dim=-1).values.unbind(-1)
    is_decided = first - second > 2 * (standard.double() - oracle.double()).abs().max()
    agrees = ours.argmax(-1) == oracle.argmax(-1)
    return TopToken(oracle.shape[0], int(is_decided.sum()), int((is_decided & agrees).sum()))


def compare(ours: StepOutputs, standard: StepOutputs, oracle: StepOutputs, factor: float = DEFAULT_FACTOR) -> GateReport:
    """The gate of a step: hidden, the KV rows of every layer, the inputs of captured layers (aux), and logits and their top token when all
    three have them.

    aux must be in all three or in none.
    """
    figures = [figure("hidden", ours.hidden, standard.hidden, oracle.hidden, factor)]
    has_aux = {outputs.aux is not None for outputs in (ours, standard, oracle)}
    if len(has_aux) > 1:
        raise ValueError("some of the outputs have aux and some have none")
    for name in ("k_rows", "v_rows", *(["aux"] if has_aux == {True} else [])):
        triples = zip(getattr(ours, name), getattr(standard, name), getattr(oracle, name), strict=True)
        figures += [figure(f"{name}[{layer}]", *tensors, factor) for layer, tensors in enumerate(triples)]
    if ours.logits is not None and standard.logits is not None and oracle.logits is not None:
        figures.append(figure("logits", ours.logits, standard.logits, oracle.logits, factor))
        return GateReport(tuple(figures), top_token(ours.logits, standard.logits, oracle.logits))
    return GateReport(tuple(figures))
