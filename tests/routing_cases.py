"""Logits that routing must get right, and the comparison of a Routing with its oracle. Shared by unit, emulation, contract and GPU tests."""

from __future__ import annotations

import torch

from sgl_lowlatency.reference import routing as oracle

NAN, INF = float("nan"), float("inf")
ROUNDING = 2.0**-24  # of a float32 operation, relative


def random_logits(rows: int, num_experts: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of a router's size: normal, of variance 4."""
    return (2 * torch.randn(rows, num_experts, generator=torch.Generator().manual_seed(seed))).to(dtype)


def hard_logits(num_experts: int, dtype: torch.dtype = torch.float32) -> tuple[list[str], torch.Tensor]:
    """(names, [rows, num_experts]): a row for every rule of choice. Ties lie within a lane's experts, across lanes and across words."""
    base = random_logits(1, num_experts, 99)[0]
    last = num_experts - 1
    cases = {
        "all equal": torch.zeros(num_experts),
        "equal pairs": base[torch.arange(num_experts) // 2],
        "equal in one lane": torch.where(torch.arange(num_experts) % 32 == 5 % num_experts, 7.0, base),
        "few values": torch.arange(num_experts).remainder(3).float(),
        "both zeros": torch.where(torch.arange(num_experts) % 2 == 0, -0.0, 0.0) - torch.where(base > 0, base, 0.0),
        "one large": base.clone().index_fill_(0, torch.tensor([last]), 60.0),
        "all -inf": torch.full((num_experts,), -INF),
        "one finite": torch.full((num_experts,), -INF).index_fill_(0, torch.tensor([last]), 3.0),
        "one +inf": base.clone().index_fill_(0, torch.tensor([num_experts // 2]), INF),
        "all +inf": torch.full((num_experts,), INF),
        "one NaN": base.clone().index_fill_(0, torch.tensor([0]), NAN),
        "all NaN": torch.full((num_experts,), NAN),
        "NaN and -inf": torch.where(torch.arange(num_experts) % 2 == 0, NAN, -INF),
        "below NaN": torch.where(torch.arange(num_experts) % 2 == 0, -2e30, NAN),
        "NaN's own rank": torch.where(torch.arange(num_experts) % 2 == 0, -1e30, NAN),
        "subnormal": torch.arange(num_experts).float() * 1e-40,
        "ascending": torch.linspace(-4, 4, num_experts),
        "descending": torch.linspace(4, -4, num_experts),
    }
    return list(cases), torch.stack(list(cases.values())).to(dtype)


def bits(words: torch.Tensor) -> list[int]:
    """int32 words as unsigned integers."""
    return [word & 0xFFFFFFFF for word in words.tolist()]


def same_weights(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within float32's rounding; NaN where NaN is expected and nowhere else.

    The roundings of two sums and of the divisions, and those of an exponent, which count as much as it is large: a weight w comes from
    about ln w. Nothing is asked below the smallest normal number.
    """
    if not torch.equal(actual.isnan(), expected.isnan()):
        return False
    wanted = expected[~expected.isnan()]
    allowed = wanted * ROUNDING * (32 - 4 * wanted.clamp(min=2.0**-126).log()) + 2.0**-126
    return bool(((actual.double()[~expected.isnan()] - wanted).abs() <= allowed).all())


def problems(routing, choices: oracle.Choices, num_experts: int) -> list[str]:
    """What of a Routing is not as the oracle has it, by name; empty when all is."""
    places = oracle.place(choices.ids, num_experts)
    words = [sum(1 << e % 32 for e in places.experts if e // 32 == w) for w in range(routing.active_words.numel())]
    wanted = {
        "ids": routing.ids.tolist() == choices.ids.tolist(),
        "weights": same_weights(routing.weights.cpu(), choices.weights),
        "row_bits": bits(routing.row_bits) == places.row_bits,
        "experts": routing.experts.tolist() == places.experts + [-1] * (num_experts - len(places.experts)),
        "places": routing.places.tolist() == places.places,
        "active_words": bits(routing.active_words) == words,
        "num_active": routing.num_active.tolist() == [len(places.experts)],
    }
    return [name for name, is_met in wanted.items() if not is_met]
