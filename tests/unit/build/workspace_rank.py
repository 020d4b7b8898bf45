"""One rank of test_symmetric_workspace.py: runs every scenario with a gloo group of its own and prints what came of each as JSON.

    python workspace_rank.py RANK NUM_RANKS STORE_FILE
"""

import atexit
import ctypes
import datetime
import glob
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from sgl_lowlatency import _C
from sgl_lowlatency.build import symmetric_workspace
from sgl_lowlatency.build.agreement import DisagreementError
from sgl_lowlatency.build.symmetric_workspace import Terms, build_symmetric_workspace

CPU = torch.device("cpu")
DEADLINE_S = 3.0
LATE_S = 1.0
TERMS = {"spec": "qwen3 0.5.23", "plan_hash": "abc", "grid": 66, "widths": (1, 2, 4), "max_rows": 4, "hidden": 64}


def build(group, deadline_s=DEADLINE_S, **changed):
    return build_symmetric_workspace(Terms(**{**TERMS, **changed}), CPU, group, deadline_s)


def agree(rank, size, group):
    """Every rank writes its number into its slot of every workspace, its own included, and finds all numbers in its own."""
    workspace = build(group)
    mapped = workspace.mapped
    slot_words = mapped.layout.parity_bytes // 4 // size
    for address in mapped.addresses:
        ctypes.c_uint32.from_address(address + mapped.layout.tiles + rank * slot_words * 4).value = 100 + rank
    dist.barrier(group)
    own = mapped.addresses[rank] + mapped.layout.tiles
    found = [ctypes.c_uint32.from_address(own + other * slot_words * 4).value for other in range(size)]
    unwritten = ctypes.c_uint32.from_address(own + 4).value
    state = [ctypes.c_uint32.from_address(mapped.addresses[rank] + mapped.layout.state + i).value for i in range(0, _C.abi.kSymmetricStateBytes, 4)]
    files = glob.glob(f"/dev/shm/sgl-lowlatency-{os.getpid()}-*")
    dist.barrier(group)
    workspace.close()
    return {"found": found, "unwritten": unwritten, "state": max(state), "files": files, "rank": mapped.rank, "distinct": len(set(mapped.addresses))}


def differ(**changed):
    def run(rank, size, group):
        build(group, **(changed if rank == size - 1 else {}))

    return run


def late(rank, size, group):
    if rank == 0:
        time.sleep(LATE_S)
    build(group).close()


def never(rank, size, group):
    if rank == size - 1:
        return {"absent": True}
    build(group, deadline_s=1.0)


def foreign(rank, size, group):
    """The last rank hands out the handle of a workspace that is not the one it speaks of."""
    genuine = symmetric_workspace.shared
    if rank == size - 1:
        symmetric_workspace.shared = _Lying(genuine)
    try:
        build(group)
    finally:
        symmetric_workspace.shared = genuine


def unreadable(rank, size, group):
    """The last rank maps its peers and cannot read them."""
    memory = symmetric_workspace._FileMemory
    if rank == size - 1:
        symmetric_workspace._FileMemory = type("Unreadable", (memory,), {"read": _cannot_read})
    try:
        build(group)
    finally:
        symmetric_workspace._FileMemory = memory


def _cannot_read(*_):
    raise RuntimeError("an illegal address")


class _Lying:
    """The module of the extension's functions, but a Rendezvous is packed once for the memory and then claimed with another address."""

    def __init__(self, genuine):
        self._genuine = genuine

    def __getattr__(self, name):
        return getattr(self._genuine, name)

    def pack_rendezvous(self, address, *rest):
        pack = self._genuine.pack_rendezvous
        return _Claimed(pack(address, *rest), pack(address + 128, *rest))


class _Claimed(bytes):
    def __new__(cls, written, claimed):
        block = super().__new__(cls, written)
        block.claimed = claimed
        return block

    def hex(self):
        return self.claimed.hex()


SCENARIOS = {
    "agree": agree,
    "grid": differ(grid=64),
    "plan": differ(plan_hash="abd"),
    "widths": differ(widths=(1, 2)),
    "spec": differ(spec="llama 0.5.23", grid=1),
    "size": differ(max_rows=8),
    "late": late,
    "foreign": foreign,
    "unreadable": unreadable,
    "never": never,  # last: its group is of no use afterwards
}


def main():
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    atexit.register(dist.destroy_process_group)  # left to the interpreter's end, gloo's threads may abort the process
    groups = {name: dist.new_group(backend="gloo") for name in SCENARIOS}
    results = {}
    for name, scenario in SCENARIOS.items():
        dist.barrier()
        start_s = time.monotonic()
        try:
            outcome = scenario(rank, size, groups[name]) or {}
        except DisagreementError as error:
            outcome = {"refused": str(error)}
        results[name] = {**outcome, "seconds": time.monotonic() - start_s}
    print(json.dumps(results), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
