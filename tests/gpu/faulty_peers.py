"""Run as a script. Three of four virtual ranks wait for one that never comes: prints every rank's record, then the CUDA error."""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from epilogue_gpu import VirtualGroup  # noqa: E402

from sgl_lowlatency.kernels.fault import describe_fault  # noqa: E402


def main():
    group = VirtualGroup(4, 2, 1024, 512, deadline_s=0.2, live_ranks=3)
    torch.cuda.synchronize()
    group.launch(layer=7)  # the first launch also loads the kernels
    start = time.monotonic()
    step = group.steps[0]
    while len(step.faults()) < 3:
        if time.monotonic() - start > 20:
            raise SystemExit(f"{len(step.faults())} records after 20 s")
        time.sleep(0.001)
    print(f"after {time.monotonic() - start:.2f} s")
    for record in step.faults():
        print(describe_fault(record, "epilogue_multicast"))
    step.acknowledge_faults()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"trapped: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
