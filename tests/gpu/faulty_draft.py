"""Run as a script. A draft whose launch must end itself: `dead` leaves one of four ranks out, `anchor` names a token that the vocabulary does not
have. Prints the record, when it came, then the CUDA error: a trap ends the CUDA context."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from draft_cases import Draft
from faults import await_records, only, print_trap

from sgl_lowlatency.kernels.fault import describe_draft_fault

DEADLINE_S = 0.5


def main():
    ranks = [0, 1, 2] if sys.argv[1] == "dead" else None
    draft = Draft(512, 4000, 5, 2, num_ranks=4, blocks_per_rank=8, device="cuda", deadline_s=DEADLINE_S, ranks=ranks)
    hidden, anchors, at = (tensor.cuda() for tensor in draft.inputs(2))
    if sys.argv[1] == "anchor":
        anchors[1] = 4000
    torch.cuda.synchronize()
    start = time.monotonic()
    draft.sampler.launch(2, hidden, anchors, at, torch.cuda.current_stream().cuda_stream)
    (record,) = await_records(lambda: only(draft.sampler.fault()), start)
    print(describe_draft_fault(record))
    draft.sampler.acknowledge_fault()
    print_trap(start)


if __name__ == "__main__":
    main()
