"""The spec of Qwen3 on AMD (monokernel.py), and what its steps may be apart from SGLang's.

Bounds: the largest ||ours - SGLang's|| / ||SGLang's|| of any row. Measured of the emulated kernels against reference/standard_path.py with random
weights of two seeds, one rank and two: 2, 6, 12 and 24 layers of hidden 128 and 256, and 2 of hidden 1024, 3 to 5 rows of 1 to 1000 tokens. The
largest of each: K and V rows of the first layer 0.0057, of any layer 0.0152 after 6 layers and 0.0651 after 24, the normed stream 0.0551. Each bound
is twice that. No AMD GPU has run them.
"""

from __future__ import annotations

from sgl_lowlatency.guard.family import QWEN3
from sgl_lowlatency.specs.amd.monokernel import family_spec

BOUNDS = {
    "k1.first_layer_kv.rel": 0.012,  # over the K and V rows that the step wrote, of the first layer
    "k1.kv.rel": 0.13,  # the same of any layer
    "k2.logits.rel": 0.11,  # over next_token_logits
}

QWEN3_SPEC = family_spec(QWEN3, BOUNDS)
