"""Groups of ranks that run attention_out's shares of one layer, and the whole layer they must add up to."""

import dataclasses
import functools

import torch
from attention_out_cases import POSITIONS, random_weights

from sgl_lowlatency import _C
from sgl_lowlatency.kernels.attention_out import AttentionOutSizes
from sgl_lowlatency.kernels.decode_step import EmulationOptions
from sgl_lowlatency.kernels.hyper_connection import MIXES, STREAMS
from sgl_lowlatency.kernels.parallel_attention_out import ParallelAttentionOut, VirtualAttentionOut, virtual_attention_out_views
from sgl_lowlatency.kernels.slice import SCALE_BLOCK
from sgl_lowlatency.reference import attention_out as oracle
from sgl_lowlatency.reference import gate

TINY = AttentionOutSizes(hidden=128, heads=8, head_dim=64, rope_dim=16, groups=8, lora=128)  # of eight ranks each has a head, a group and a chunk of K
SPLIT = AttentionOutSizes(hidden=256, heads=8, head_dim=576, rope_dim=64, groups=4, lora=128)  # above 16 rows wo_a has two splits


def shard_weights(sizes, weights, rank, num_ranks):
    """A rank's rows of wo_a, and its columns of wo_b and of its scales: whole groups."""
    share = sizes.latent // num_ranks
    rows, blocks = slice(rank * share, (rank + 1) * share), slice(rank * share // SCALE_BLOCK, (rank + 1) * share // SCALE_BLOCK)
    return dataclasses.replace(
        weights, wo_a=weights.wo_a[rows].contiguous(), wo_b=weights.wo_b[:, rows].contiguous(), wo_b_scale=weights.wo_b_scale[:, blocks].contiguous()
    )


class Inputs:
    """x of the whole layer, positions and streams, with a rank's heads of x."""

    def __init__(self, sizes, rows, seed, device="cpu"):
        generator = torch.Generator().manual_seed(2000 + seed)
        self.x = torch.randn(rows, sizes.heads, sizes.head_dim, generator=generator).bfloat16().to(device)
        self.positions = torch.randint(0, POSITIONS, (rows,), generator=generator).to(device)
        self.streams = torch.randn(rows, STREAMS, sizes.hidden, generator=generator).bfloat16().to(device)

    def of_rank(self, rank, num_ranks):
        return self.x.chunk(num_ranks, dim=1)[rank].contiguous()


class Group:
    """num_ranks ranks over workspaces in one memory. sizes: the whole layer's."""

    def __init__(self, num_ranks, sizes=TINY, max_rows=48, grid=1, device="cpu", deadline_s=2.0, weights=None, emulation=None):
        self.sizes, self.num_ranks, self.device, self.max_rows = sizes, num_ranks, torch.device(device), max_rows
        self.weights = weights or random_weights(sizes, device)
        views = virtual_attention_out_views(num_ranks, max_rows, sizes.hidden, self.device)
        local = sizes.shard(num_ranks)
        ranks = [ParallelAttentionOut(local, max_rows, self.device, grid, deadline_s, view) for view in views]
        self.virtual = VirtualAttentionOut(ranks, emulation)
        self.shards = [shard_weights(sizes, self.weights, rank, num_ranks) for rank in range(num_ranks)]
        self.layers = [one.prepare(shard, 7) for one, shard in zip(ranks, self.shards, strict=True)]

    def arguments(self, inputs):
        """What every rank's launch takes, its outputs poisoned."""
        def poisoned(*shape, dtype=torch.bfloat16):
            return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

        rows, hidden = inputs.x.shape[0], self.sizes.hidden
        return [
            {"x": inputs.of_rank(rank, self.num_ranks), "positions": inputs.positions, "streams": inputs.streams,
             "streams_out": poisoned(rows, STREAMS, hidden), "out": poisoned(rows, hidden), "coefficients": poisoned(rows, MIXES, dtype=torch.float32)}
            for rank in range(self.num_ranks)
        ]  # fmt: skip

    def launch(self, arguments, apart=False):
        """All ranks at once; or apart, on CUDA, each on a stream of its own as on a GPU of its own. No two launches of a rank then overlap: on one GPU the
        second could take the room of another rank's first."""
        if not apart:
            self.virtual.launch(self.layers, arguments, torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0)
            return
        torch.cuda.synchronize(self.device)
        for rank, layer, its, own in zip(self.virtual.ranks, self.layers, arguments, self.cuda_streams, strict=True):
            rank.launch(layer, **its, stream=own.cuda_stream)

    @functools.cached_property
    def cuda_streams(self):
        return [torch.cuda.Stream(self.device) for _ in self.layers]

    def run(self, inputs, apart=False):
        """One launch of all ranks; every rank's arguments, outputs among them."""
        arguments = self.arguments(inputs)
        self.launch(arguments, apart)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return arguments

    def stream(self, inputs, launches=None, slowness=()):
        """Several launches in one emulation, each rank running on by itself. launches: of every rank, how many of them it runs; all by default.

        Returns (report, faults in words, [launch] every rank's arguments).
        """
        streams, written, all_arguments = [[] for _ in self.layers], [{} for _ in self.layers], []
        for index, one in enumerate(inputs):
            all_arguments.append(self.arguments(one))
            for rank, (kernel, layer, its) in enumerate(zip(self.virtual.ranks, self.layers, all_arguments[-1], strict=True)):
                layer.params.layer = index
                params, outputs = kernel.fill(layer, **its)
                written[rank] |= {f"{name} {index}": output for name, output in outputs.items()}
                if launches is None or index < launches[rank]:
                    streams[rank].append(_C.abi.ParallelAttentionOutParams(params))
        return self.virtual.emulate(streams, written, slowness), self.virtual.faults(), all_arguments

    def problems(self, inputs, arguments):
        """What is wrong with a launch: rank 0's streams and out through the numerics gate against the whole layer, other ranks' bits against its."""
        wanted, standard = oracle.outputs(self.sizes, self.weights, inputs.x, inputs.positions, inputs.streams)
        first = arguments[0]
        figures = [
            gate.figure(name, first[key], getattr(standard, name), getattr(wanted, name)) for name, key in (("streams", "streams_out"), ("out", "out"))
        ]
        found = [str(figure) for figure in figures if not figure.passed]
        return found + [f"rank {rank} has other bits than rank 0" for rank, its in enumerate(arguments) if not same_bits(its, first)]


def same_bits(one, other):
    return all(torch.equal(one[name], other[name]) for name in ("streams_out", "out", "coefficients"))


class Stream:
    """Launches of one group after the other, each rank running on by itself, and what each must leave bit by bit: what launches one by one leave, which
    the gate has judged. Every run begins with fresh workspaces."""

    def __init__(self, num_ranks, rows, grid=1, sizes=TINY):
        self.num_ranks, self.sizes, self.rows = num_ranks, sizes, rows
        self.options = {"num_ranks": num_ranks, "sizes": sizes, "max_rows": max(rows), "grid": grid, "weights": random_weights(sizes)}
        self.inputs = [Inputs(sizes, count, seed) for seed, count in enumerate(rows)]
        alone = Group(**self.options)
        self.expected = []
        for one in self.inputs:
            arguments = alone.run(one)
            assert alone.problems(one, arguments) == []
            self.expected.append(arguments[0])

    def run(self, launches=None, slowness=(), deadline_s=0.05, **options):
        """(report, faults in words, [launch][rank] arguments). options: EmulationOptions, order checked."""
        group = Group(**self.options, deadline_s=deadline_s, emulation=EmulationOptions(check_order=True, **options))
        return group.stream(self.inputs, launches, slowness)

    def problems(self, report, faults, all_arguments):
        found = [] if report.status == "ok" else [report.message]
        found += [f"{race.kind} ({race.missing}) in {race.region}+{race.offset}" for race in report.races] + faults
        for launch, (arguments, wanted) in enumerate(zip(all_arguments, self.expected, strict=True)):
            found += [f"wrong bits of rank {rank}, launch {launch}" for rank, its in enumerate(arguments) if not same_bits(its, wanted)]
        return found
