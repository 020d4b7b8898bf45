"""The spec of Qwen3-MoE on AMD (monokernel.py), and what its steps may be apart from SGLang's on the experts that ours chose.

Bounds as in qwen3.py. Measured with our choices handed to reference/moe_step.py: 2, 6 and 12 layers of hidden 128 and 256, 32 and 64 experts, 3 and 5
rows, two seeds. The largest of each: K and V rows of the first layer 0.0049, of any layer 0.0227, the normed stream 0.0208, router logits 0.0239.
Bounds are those of the dense model, which was measured twice as deep; the router's is three times what was measured.
"""

from __future__ import annotations

from sgl_lowlatency.guard.family import QWEN3_MOE
from sgl_lowlatency.specs.amd.monokernel import family_spec

BOUNDS = {
    "k1.first_layer_kv.rel": 0.016,
    "k1.kv.rel": 0.016,
    "k2.logits.rel": 0.031,
    "k2.stream.rel": 0.042,
    "k2.added.rel": 0.054,
    "k2.router_logits.rel": 0.038,
    "k2.routing_gap.rel": 0.07,
    "k2.wrong_choices.max_abs": 0.0,
}

QWEN3_MOE_SPEC = family_spec(QWEN3_MOE, BOUNDS)
