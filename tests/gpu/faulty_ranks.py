"""Run as a script. Three of four virtual ranks of decode_step wait for one that never comes: prints every rank's record, then the CUDA error. With the word
`verify` it is a verify step, whose ranks have a launch each."""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults import await_records, print_trap  # noqa: E402
from parallel_gpu import cut_runner  # noqa: E402

from sgl_lowlatency import _C  # noqa: E402
from sgl_lowlatency.reference.inputs import random_step  # noqa: E402

DEADLINE_S = 0.4  # ranks wait half of it for each other


def main():
    is_verify = "verify" in sys.argv
    rows, chains = (8, {8: 4}) if is_verify else (2, {})
    geometry, _, runner = cut_runner("qwen3-0.6b", 82, 4, (rows,), deadline_s=DEADLINE_S, rows_per_request=chains)
    step = random_step(geometry, [17, 65], 82, "cuda", rows_per_request=chains.get(rows, 1), lengths_are_prefix=is_verify)
    runner.run(step, apart=is_verify)  # the first launch also loads the kernels
    begun = runner.begin(step)
    prepared = [one.prepare(**arguments)[0] for one, (_, arguments) in zip(runner.steps, begun)]
    torch.cuda.synchronize()
    start = time.monotonic()
    if is_verify:
        for one, (_, arguments), own in list(zip(runner.steps, begun, runner.streams))[:3]:
            one.launch(**arguments, stream=own.cuda_stream)
    else:
        _C.virtual_step_launch_cuda(prepared[:3], runner.ranks.grid, torch.cuda.current_stream().cuda_stream)
    print("\n".join(await_records(runner.ranks.faults, start, 3)))
    for one in runner.steps:
        one.acknowledge_fault()
    print_trap(start)


if __name__ == "__main__":
    main()
