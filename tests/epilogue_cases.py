"""Groups of emulated ranks that run epilogue_multicast, each as a GPU with a stream of launches, and their oracle.

Inputs are small integers: products and sums are exact in float32, so what is right is right bit by bit.
"""

import dataclasses

import torch

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.epilogue_multicast import EpilogueMulticast, RankTensors
from sgl_lowlatency.kernels.symmetric_workspace import MappedWorkspaces, virtual_workspaces

EPS = 1e-6
POISON = 0x7FFF  # a NaN as bf16


def integers(generator, *shape):
    """bf16 integers -2..2."""
    return torch.randint(-2, 3, shape, generator=generator).to(torch.bfloat16)


def oracle(inputs, weights, residual, norm_weight, eps=EPS):
    """(sum, normed) in float64. inputs, weights: a rank's each."""
    total = residual.double()
    for x, weight in zip(inputs, weights, strict=True):
        total = total + x.double() @ weight.double().T
    inverse = torch.rsqrt(total.square().mean(dim=1, keepdim=True) + eps)
    return total, total * inverse * norm_weight.double()


@dataclasses.dataclass
class Outcome:
    report: object
    faults: list  # a rank's each, or None
    sums: list  # [rank][launch] bf16 [rows, hidden]
    normed: list


class Group:
    """num_ranks ranks with workspaces of their own; every run begins with fresh ones. rows: of each launch."""

    def __init__(self, num_ranks, rows, hidden=32, k=64, blocks=1, seed=0, deadline_s=0.02, multicast=False):
        generator = torch.Generator().manual_seed(seed)
        self.num_ranks, self.rows, self.hidden, self.k = num_ranks, list(rows), hidden, k
        self.blocks = blocks if isinstance(blocks, list) else [blocks] * num_ranks
        self.deadline_s, self.multicast = deadline_s, multicast
        self.weights = [integers(generator, hidden, k) for _ in range(num_ranks)]
        self.norm_weight = torch.ones(hidden, dtype=torch.bfloat16)
        self.inputs = [[integers(generator, n, k) for _ in range(num_ranks)] for n in self.rows]  # [launch][rank]
        self.residuals = [integers(generator, n, hidden) for n in self.rows]
        self.expected = [oracle(x, self.weights, r, self.norm_weight) for x, r in zip(self.inputs, self.residuals, strict=True)]

    def run(self, seed=0, planted=0, starvation=-1, launches=None, slowness=(), check_order=True, rows_of=None):
        """launches: a rank's number of launches each, all by default. rows_of: {rank: rows of all of its launches}, for ranks that disagree."""
        mapped = virtual_workspaces(self.num_ranks, max(self.rows), self.hidden, torch.device("cpu"))
        multicast = torch.zeros(mapped.layout.total_bytes + 128, dtype=torch.uint8)
        multicast_base = multicast.data_ptr() + -multicast.data_ptr() % 128
        steps, streams, outputs = [], [], []
        for rank in range(self.num_ranks):
            view = MappedWorkspaces(rank, mapped.addresses, mapped.layout, mapped, multicast_base if self.multicast else 0)
            step = EpilogueMulticast(
                self.weights[rank : rank + 1], self.norm_weight, blocks_per_rank=self.blocks[rank], deadline_s=self.deadline_s, workspaces=view, rms_eps=EPS
            )
            steps.append(step)
            count = len(self.rows) if launches is None else launches[rank]
            stream, outs = [], []
            for launch in range(count):
                rows = (rows_of or {}).get(rank, self.rows[launch])
                sums, normed = (torch.full((rows, self.hidden), POISON, dtype=torch.int16).view(torch.bfloat16) for _ in range(2))
                tensors = RankTensors(self.inputs[launch][rank][:rows], self.residuals[launch][:rows], sums, normed)
                outs.append(tensors)
                stream.append(step.params([tensors], layer=launch))
            streams.append(stream)
            outputs.append(outs)
        regions = []
        if check_order:
            regions = [(f"workspace {rank}", address, mapped.layout.total_bytes, True) for rank, address in enumerate(mapped.addresses)]
        multicasts = [(multicast_base, mapped.layout.total_bytes, list(mapped.addresses))] if self.multicast else []
        report = _C.epilogue_multicast_emulate(
            streams, slowness=list(slowness), seed=seed, planted=planted, starvation=starvation, regions=regions, multicasts=multicasts
        )
        faults = [(step.faults() or [None])[0] for step in steps]
        return Outcome(report, faults, [[t.sum for t in outs] for outs in outputs], [[t.normed for t in outs] for outs in outputs])

    def problems(self, outcome):
        """What of an outcome is not the oracle's, of every launch of every rank."""
        found = []
        if outcome.report.status != "ok":
            found.append(f"{outcome.report.status}: {outcome.report.message}")
        found += [f"rank {rank} left a fault" for rank, fault in enumerate(outcome.faults) if fault is not None]
        if outcome.report.num_races:
            found.append(f"{outcome.report.num_races} races")
        for rank in range(self.num_ranks):
            for launch, (sums, normed) in enumerate(zip(outcome.sums[rank], outcome.normed[rank], strict=True)):
                wanted, wanted_normed = self.expected[launch]
                if not torch.equal(sums, wanted[: sums.shape[0]].to(torch.bfloat16)):
                    found.append(f"rank {rank}, launch {launch}: wrong sum")
                if not torch.allclose(normed.double(), wanted_normed[: sums.shape[0]], rtol=2**-8, atol=1e-6):
                    found.append(f"rank {rank}, launch {launch}: wrong norm")
                if not torch.equal(normed, outcome.normed[0][launch]):
                    found.append(f"rank {rank}, launch {launch}: not rank 0's bits")
        return found
