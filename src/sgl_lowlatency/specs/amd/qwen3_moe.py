"""The spec of Qwen3-MoE on AMD (monokernel.py), and what its steps may be apart from SGLang's on the experts that ours chose.

Bounds as in qwen3.py, and of the routing (runtime/self_check_moe.py). Measured in the same way with 32 experts, 2, 6 and 12 layers.
Largest of each: logits 0.0128, K and V rows 0.0060, stream 0.0209, added 0.0193, router logits 0.0249 (decode 0.0153), gap 0.0159. The bounds are
2.0 to 4.4 times that, and of the router logits 1.5 times.
"""

from __future__ import annotations

from sgl_lowlatency.guard.family import QWEN3_MOE
from sgl_lowlatency.specs.amd import qwen3
from sgl_lowlatency.specs.amd.monokernel import family_spec

BOUNDS = {
    **qwen3.BOUNDS,
    "k2.router_logits.rel": 0.038,  # over a row's router logits, any layer
    "k2.routing_gap.rel": 0.07,  # how far below SGLang's last choice one of ours may be on SGLang's logits, in units of the row's root mean square
    "k2.wrong_choices.max_abs": 0.0,  # rows whose experts are not the top k of the logits that were ranked
}

QWEN3_MOE_SPEC = family_spec(QWEN3_MOE, BOUNDS)
