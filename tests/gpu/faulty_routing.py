"""Run as a script. Routes an id that no expert has, prints the record, then the CUDA error: a trap ends the CUDA context."""

import time

import torch
from faults import await_records, only, print_trap

from sgl_lowlatency.kernels.bitmap_routing import BitmapRouting
from sgl_lowlatency.kernels.fault import describe_fault


def main():
    router = BitmapRouting(128, 8, torch.device("cuda"))
    ids = torch.zeros(4, 8, dtype=torch.int32, device="cuda")
    ids[2, 5] = 128
    weights, out = torch.zeros(4, 8, device="cuda"), router.outputs(4)
    torch.cuda.synchronize()
    start = time.monotonic()
    router.route_ids(ids, weights, out, stream=torch.cuda.current_stream().cuda_stream)
    (record,) = await_records(lambda: only(router.fault()), start)
    print(describe_fault(record))
    router.acknowledge_fault()
    print_trap(start)


if __name__ == "__main__":
    main()
