"""Virtual ranks of one GPU on real geometries with few layers: the real protocol, whose workspaces are one memory."""

import torch
from decode_step_gpu import CUT, weights_of
from parallel_cases import RankRunner

from sgl_lowlatency.plan.tiles import grid_for


def blocks_per_rank(local, num_ranks):
    """The GPU's SMs over the ranks, or fewer for a small share."""
    return grid_for(local, torch.cuda.get_device_properties(0).multi_processor_count // num_ranks)


def rank_runner(geometry, weights, num_ranks, rows, deadline_s=5.0, **options):
    properties = torch.cuda.get_device_properties(0)
    grid = blocks_per_rank(geometry.shard(num_ranks), num_ranks)
    return RankRunner(
        geometry, weights, num_ranks, rows, grid, deadline_s=deadline_s, shared_memory_bytes=properties.shared_memory_per_block_optin, **options
    )


def cut_runner(name, seed, num_ranks, rows, weight_format="bf16", has_head=True, **options):
    """(geometry, weights, RankRunner) of a cut model."""
    geometry, weights = CUT[name], weights_of(name, seed, weight_format, CUT[name].vocab if has_head else 0)
    return geometry, weights, rank_runner(geometry, weights, num_ranks, rows, **options)
