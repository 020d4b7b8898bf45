"""launch_planted.py's server of AMD's kernels: k1 and k2 carry, in host emulation, the bug numbered PLANTED_BUG (dialect::Planted)."""

from __future__ import annotations

import os
import sys

from sgl_lowlatency.kernels import monokernel
from sgl_lowlatency.kernels.decode_step import EmulationOptions

PLANTED_BUG = int(os.environ["PLANTED_BUG"])
_construct = monokernel.Monokernels.__init__


def _construct_planted(self, *args, **kwargs):
    _construct(self, *args, **kwargs, emulation=EmulationOptions(planted=PLANTED_BUG))


monokernel.Monokernels.__init__ = _construct_planted

if __name__ == "__main__":
    from sglang.launch_server import load_plugins, prepare_server_args, run_server

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
