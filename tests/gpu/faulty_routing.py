"""Run as a script. Routes an id that no expert has, prints the record, then the CUDA error: a trap ends the CUDA context."""

import time

import torch

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
    while (record := router.fault()) is None:
        if time.monotonic() - start > 20:
            raise SystemExit("no record after 20 s")
        time.sleep(0.001)
    print(describe_fault(record))
    router.acknowledge_fault()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"trapped: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
