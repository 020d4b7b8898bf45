"""Run as a script. Three of four virtual ranks wait for one that never comes: prints every rank's record, then the CUDA error."""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from epilogue_gpu import VirtualGroup  # noqa: E402
from faults import await_records, print_trap  # noqa: E402

from sgl_lowlatency.kernels.fault import describe_fault  # noqa: E402


def main():
    group = VirtualGroup(4, 2, 1024, 512, deadline_s=0.2, live_ranks=3)
    torch.cuda.synchronize()
    group.launch(layer=7)  # the first launch also loads the kernels
    start = time.monotonic()
    step = group.steps[0]
    for record in await_records(step.faults, start, 3):
        print(describe_fault(record, "epilogue_multicast"))
    step.acknowledge_faults()
    print_trap(start)


if __name__ == "__main__":
    main()
