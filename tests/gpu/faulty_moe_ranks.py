"""Run as a script. Three of four virtual ranks of fused_moe wait for one that never comes: prints every rank's record, then the CUDA error."""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults import await_records, print_trap  # noqa: E402
from parallel_moe_cases import MoeRanks  # noqa: E402

from sgl_lowlatency import _C  # noqa: E402

DEADLINE_S = 0.4  # ranks wait half of it for each other


def main():
    ranks = MoeRanks(4, 1024, grid=8, device="cuda", deadline_s=DEADLINE_S)
    x, _ = ranks.inputs(2)
    ranks.run(x)  # the first launch also loads the kernels
    outs = [ranks.empty(2)[0] for _ in ranks.kernels]
    params = [kernel.params(layer, x, out) for kernel, layer, out in zip(ranks.kernels, ranks.layers, outs, strict=True)]
    torch.cuda.synchronize()
    start = time.monotonic()
    _C.virtual_moe_launch_cuda(params[:3], ranks.grid, torch.cuda.current_stream().cuda_stream)
    print("\n".join(await_records(ranks.ranks.faults, start, 3)))
    for kernel in ranks.kernels:
        kernel.acknowledge_fault()
    print_trap(start)


if __name__ == "__main__":
    main()
