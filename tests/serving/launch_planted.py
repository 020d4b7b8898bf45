"""SGLang's server with a kernel that carries, in host emulation, the bug numbered PLANTED_BUG (dialect::Planted).

SGLang starts its scheduler with `spawn`, which runs the top level of this file in the scheduler as well.
"""

from __future__ import annotations

import os
import sys

from sgl_lowlatency.kernels import decode_step

PLANTED_BUG = int(os.environ["PLANTED_BUG"])
_construct = decode_step.DecodeStep.__init__


def _construct_planted(self, *args, **kwargs):
    _construct(self, *args, **kwargs, emulation=decode_step.EmulationOptions(planted=PLANTED_BUG))


decode_step.DecodeStep.__init__ = _construct_planted

if __name__ == "__main__":
    from sglang.launch_server import load_plugins, prepare_server_args, run_server

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
