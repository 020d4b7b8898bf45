"""Random hyper-connections, and what kernels make of them compared with the oracle."""

import torch

from sgl_lowlatency.kernels.hyper_connection import MIXES, STREAMS, HyperConnection
from sgl_lowlatency.reference import gate
from sgl_lowlatency.reference import hyper_connection as oracle

COEFFICIENTS_REL_L2 = 1e-5  # of fp32 sums and 40 normalisations: about 1e-6; a wrong column, scale or sum is 1e-3 and more


def random_hyper(normal, hidden, device="cpu"):
    """Whose mixes are of the order of one. normal(*shape, std): random values."""
    mix = normal(MIXES, STREAMS * hidden, std=2 * (STREAMS * hidden) ** -0.5)
    return HyperConnection(mix, torch.tensor([0.9, 1.1, 1.3], device=device), normal(MIXES, std=0.5), 20, 1e-6, 1e-20)


def seeded_hyper(hidden, seed, device="cpu"):
    generator = torch.Generator(device=device).manual_seed(500 + seed)
    return random_hyper(lambda *shape, std: torch.randn(*shape, generator=generator, device=device) * std, hidden, device)


def random_streams(rows, hidden, seed, device="cpu"):
    return torch.randn(rows, STREAMS, hidden, generator=torch.Generator().manual_seed(2000 + seed)).bfloat16().to(device)


def empty_post(rows, hidden, device="cpu"):
    """Poisoned streams_out and coefficients."""
    nan = float("nan")
    streams_out = torch.full((rows, STREAMS, hidden), nan, dtype=torch.bfloat16, device=device)
    return {"streams_out": streams_out, "coefficients": torch.full((rows, MIXES), nan, device=device)}


def post_problems(found, hyper, streams, outputs):
    """What is wrong with what a launch of fused_moe left in `found`, which empty_post made. outputs: oracle and standard path of the MoE's output."""
    mixed = oracle.coefficients(hyper, streams)
    wanted, standard = (oracle.streams_behind(mixed, y, streams) for y in outputs)
    figure = gate.figure("streams", found["streams_out"], standard.bfloat16(), wanted)
    return coefficients_problems(found["coefficients"], mixed) + ([] if figure.passed else [str(figure)])


def coefficients_problems(found, wanted):
    """Nothing, or how far coefficients [rows, 24] are from the oracle's beyond fp32 rounding."""
    difference = float((found.double() - wanted).norm() / wanted.norm())
    return [] if difference < COEFFICIENTS_REL_L2 else [f"coefficients are {difference:.1e} from the oracle"]
