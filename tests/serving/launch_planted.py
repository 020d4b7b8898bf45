"""SGLang's server with a kernel that, in host emulation, leaves out the oldest token (dialect::Planted::kMaskOffByOne).

SGLang starts its scheduler with `spawn`, which runs the top level of this file in the scheduler as well.
"""

from __future__ import annotations

import sys

from sgl_lowlatency.kernels import decode_step

MASK_OFF_BY_ONE = 8
_construct = decode_step.DecodeStep.__init__


def _construct_planted(self, *args, **kwargs):
    _construct(self, *args, **kwargs, emulation=decode_step.EmulationOptions(planted=MASK_OFF_BY_ONE))


decode_step.DecodeStep.__init__ = _construct_planted

if __name__ == "__main__":
    from sglang.launch_server import load_plugins, prepare_server_args, run_server

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
