"""One rank of test_parallel_rank.py, a process of its own: builds its share of a tiny model's step over workspaces that the processes really share, runs
every scenario, and prints what came of each as JSON; tensors go to STORE_FILE.RANK.

    python parallel_rank.py RANK NUM_RANKS STORE_FILE
"""

import atexit
import datetime
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from sgl_lowlatency.build.agreement import DisagreementError, exchange
from sgl_lowlatency.build.rank_group import meet
from sgl_lowlatency.kernels.decode_step import DecodeStep
from sgl_lowlatency.kernels.fault import DecodeStepFault
from sgl_lowlatency.kernels.geometry import Geometry
from sgl_lowlatency.plan.static_plan import make_plan
from sgl_lowlatency.reference.inputs import random_step, random_weights
from sgl_lowlatency.reference.sharding import shard_inputs, shard_weights
from sgl_lowlatency.reference.step import StepOutputs, read_kv_rows
from sgl_lowlatency.runtime.agreed_fallback import AgreedFallback

CPU = torch.device("cpu")
WHOLE = Geometry(3, 256, 8, 4, 64, 512, 500, 8192, 1e-6, False)
WEIGHTS_SEED, ROWS, GRID, DEADLINE_S = 5, 3, 4, 20.0


def inputs_of(launch):
    """The whole step's inputs of a launch."""
    return random_step(WHOLE, [65, 1, 17], 60 + launch)


class Rank:
    """A rank's step over the group's workspaces, met as the build does it."""

    def __init__(self, rank, size, group, rows=(ROWS,), deadline_s=DEADLINE_S):
        self.rank, self.size = rank, size
        local = WHOLE.shard(size)
        weights = shard_weights(WHOLE, random_weights(WHOLE, WEIGHTS_SEED, has_lm_head=True), rank, size)
        plans = {r: make_plan(local, r, GRID, has_head=True) for r in rows}
        self.step = DecodeStep(local, plans, weights, CPU, deadline_s, group=meet("Tiny", WHOLE.vocab, plans, CPU, group, 5.0))

    def run(self, launch):
        """(hidden, logits, K and V rows) of the rank."""
        used = shard_inputs(inputs_of(launch), self.rank, self.size)
        self.step.attach_kv(used.k_buffers, used.v_buffers, used.req_to_token)
        hidden = torch.full((ROWS, WHOLE.hidden), float("nan"), dtype=torch.bfloat16)
        logits = torch.full((ROWS, self.step.geometry.vocab), float("nan"))
        self.step.launch(
            ROWS, used.input_ids, used.positions, used.seq_lens, used.req_pool_indices, used.out_cache_loc, hidden, logits=logits
        )
        return hidden, logits, read_kv_rows(used)


def steps(rank, size, group):
    """Launches one after the other; a rank that comes late to one of them is waited for."""
    one, found = Rank(rank, size, group), []
    for launch in range(3):
        if rank == launch % size:
            time.sleep(0.2)
        hidden, logits, (k, v) = one.run(launch)
        found.append(StepOutputs(hidden, k, v, logits))
    torch.save([vars(one) for one in found], f"{sys.argv[3]}.{rank}")
    return {"executed": one.step.executed()[ROWS]}


def other_plans(rank, size, group):
    Rank(rank, size, group, rows=(ROWS, 5) if rank == size - 1 else (ROWS,))


def dead(rank, size, group):
    """The last rank ends behind the first launch."""
    one = Rank(rank, size, group, deadline_s=1.0)
    one.run(0)
    if rank == size - 1:
        return {"absent": True}
    one.run(1)


def fallback(rank, size, group):
    """The last rank cannot run steps of 3 rows; of 5 rows all can, until the first one has a reason of its own."""
    agreed = AgreedFallback(lambda claim: exchange(claim, group, 5.0, "agreement on a step"))
    own = "a forward hook on model.norm" if rank == size - 1 else None
    reasons = [agreed.reason(3, own), agreed.reason(3, own), agreed.reason(5, None), agreed.reason(5, None)]
    try:
        return {"reasons": [*reasons, agreed.reason(5, "a hook that came later" if rank == 0 else None)]}
    except RuntimeError as error:
        return {"reasons": [*reasons, str(error)]}


SCENARIOS = {"steps": steps, "other plans": other_plans, "fallback": fallback, "dead": dead}


def main():
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    atexit.register(dist.destroy_process_group)  # left to the interpreter's end, gloo's threads may abort the process
    groups = {name: dist.new_group(backend="gloo") for name in SCENARIOS}
    results = {}
    for name, scenario in SCENARIOS.items():
        dist.barrier()
        try:
            outcome = scenario(rank, size, groups[name]) or {}
        except DisagreementError as error:
            outcome = {"refused": str(error)}
        except DecodeStepFault as error:
            outcome = {"fault": str(error)}
        results[name] = outcome
    print(json.dumps(results), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
