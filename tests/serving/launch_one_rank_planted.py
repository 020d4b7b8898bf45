"""launch_planted.py's server of several ranks, of which the last one alone carries the bug numbered PLANTED_BUG."""

from __future__ import annotations

import os
import sys

from sgl_lowlatency.kernels import decode_step

PLANTED_BUG = int(os.environ["PLANTED_BUG"])
_construct = decode_step.DecodeStep.__init__


def _construct_planted(self, *args, group=None, **kwargs):
    is_last = group is not None and group.rank == group.workspaces.layout.num_ranks - 1
    emulation = decode_step.EmulationOptions(planted=PLANTED_BUG) if is_last else None
    _construct(self, *args, **kwargs, group=group, emulation=emulation)


decode_step.DecodeStep.__init__ = _construct_planted

if __name__ == "__main__":
    from sglang.launch_server import load_plugins, prepare_server_args, run_server

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
