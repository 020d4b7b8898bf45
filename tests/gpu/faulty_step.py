"""Run as a script: `faulty_step.py KIND`. Launches one step that must end itself, prints the record, then the CUDA error.

A trap ends the CUDA context, so each fault has a process of its own. KIND: lost_words, token, slot.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from decode_step_cases import lose_tile
from decode_step_gpu import CUT, gpu_runner
from faults import await_records, only, print_trap

from sgl_lowlatency.kernels.fault import describe_fault
from sgl_lowlatency.reference.inputs import random_step

OUT_PROJ = 1  # abi::OpIdx
DEADLINE_S = 0.5


def spoil(kind, runner, inputs):
    if kind == "lost_words":
        lose_tile(runner, 3, OUT_PROJ)
    elif kind == "token":
        inputs.input_ids[1] = CUT["qwen3-0.6b"].vocab
    elif kind == "slot":
        inputs.req_to_token[inputs.req_pool_indices[1], 7] = -3
    else:
        raise SystemExit(f"unknown fault {kind}")


def main(kind):
    runner = gpu_runner("qwen3-0.6b", 51, (3,), deadline_s=DEADLINE_S)
    inputs = random_step(CUT["qwen3-0.6b"], [65, 100, 17], 51, "cuda")
    runner.attach(inputs)
    spoil(kind, runner, inputs)
    torch.cuda.synchronize()
    start = time.monotonic()
    runner.launch(inputs, torch.zeros(3, 1024, dtype=torch.bfloat16, device="cuda"))
    (record,) = await_records(lambda: only(runner.kernel.fault()), start)
    print(describe_fault(record))
    runner.kernel.acknowledge_fault()
    print_trap(start)


if __name__ == "__main__":
    main(sys.argv[1])
