"""Run as a script. Three of four virtual ranks of attention_out wait for one that never comes: prints every rank's record, then the CUDA error."""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults import await_records, print_trap  # noqa: E402
from parallel_attention_out_cases import TINY, Group, Inputs  # noqa: E402

from sgl_lowlatency import _C  # noqa: E402

DEADLINE_S = 0.4  # ranks wait half of it for each other


def main():
    group, inputs = Group(4, TINY, grid=4, device="cuda", deadline_s=DEADLINE_S), Inputs(TINY, 2, 0, "cuda")
    group.run(inputs)  # the first launch also loads the kernels
    ranks, arguments = group.virtual.ranks, group.arguments(inputs)
    filled = [rank.fill(layer, **its)[0] for rank, layer, its in zip(ranks, group.layers, arguments, strict=True)]
    torch.cuda.synchronize()
    start = time.monotonic()
    _C.virtual_attention_out_launch_cuda(filled[:3], group.virtual.grid, torch.cuda.current_stream().cuda_stream)
    print("\n".join(await_records(group.virtual.faults, start, 3)))
    for one in ranks:
        one.acknowledge_fault()
    print_trap(start)


if __name__ == "__main__":
    main()
