"""Run as a script. Two of three ranks of k1 and k2 wait for one that never comes: prints both records, then the CUDA error. Argument: GPUs."""

import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "emulation")]
from faults import await_records, print_trap  # noqa: E402
from monokernel_cases import tiny  # noqa: E402
from monokernel_gpu import RanksInOneProcess  # noqa: E402

from sgl_lowlatency.kernels.fault import describe_mono_fault  # noqa: E402
from sgl_lowlatency.reference.inputs import random_step, random_weights  # noqa: E402


def main():
    g = tiny(2, 768, 6, 3, 64, 1536)
    alone = RanksInOneProcess(g, random_weights(g, seed=4), random_step(g, [9], seed=4), 1)
    alone.launch()  # loads the kernels
    alone.synchronize()
    group = RanksInOneProcess(g, random_weights(g, seed=5), random_step(g, [20, 3], seed=5), 3, int(sys.argv[1]), deadline_s=0.2, live_ranks=2)
    group.launch()
    start = time.monotonic()
    for record in await_records(group.faults, start, 2):
        print(describe_mono_fault(record))
    group.acknowledge_faults()
    print_trap(start)


if __name__ == "__main__":
    main()
