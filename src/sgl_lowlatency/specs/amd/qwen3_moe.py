"""The spec of Qwen3-MoE on AMD (monokernel.py), and what its steps may be apart from SGLang's on the experts that ours chose.

Bounds as in qwen3.py. Measured with our choices handed to reference/moe_step.py: 2, 6 and 12 layers of hidden 128 and 256, 32 and 64 experts, 3 and 5
rows, two seeds. The largest of each: K and V rows of the first layer 0.0049, of any layer 0.0227, the normed stream 0.0208, router logits 0.0239.
Bounds are those of the dense model, which was measured twice as deep; the router's is three times what was measured.
"""

from __future__ import annotations

from sgl_lowlatency.guard.family import QWEN3_MOE
from sgl_lowlatency.specs.amd import qwen3
from sgl_lowlatency.specs.amd.monokernel import family_spec

BOUNDS = {**qwen3.BOUNDS, "k2.router_logits.rel": 0.072}  # over a row's router logits, any layer

QWEN3_MOE_SPEC = family_spec(QWEN3_MOE, BOUNDS)
