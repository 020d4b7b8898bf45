"""The spec of Qwen3 on AMD (monokernel.py), and what its steps may be apart from SGLang's.

Each bound is on the self-check's figure of the same name (runtime/amd_step.py): the largest ||ours - SGLang's|| / ||SGLang's|| of any row. SGLang's
layers start each from our stream, so that what right kernels are apart is one layer's rounding at any depth; from end to end 24 layers of a narrow
model moved logits by 0.19. Measured of the emulated kernels against reference/standard_path.py on the self-check's inputs, random weights of two
seeds, 2, 6, 12 and 24 layers of hidden 128 and 256, decode and verify: tests/unit/runtime/measure_amd_bounds.py. Largest of each: logits 0.0104,
K and V rows 0.0059, those of the first layer 0.0053, stream 0.0194, added 0.0218. The bounds are 2.1 to 3.1 times that. No AMD GPU has run them.
"""

from __future__ import annotations

from sgl_lowlatency.guard.family import QWEN3
from sgl_lowlatency.specs.amd.monokernel import family_spec

BOUNDS = {
    "k1.first_layer_kv.rel": 0.016,  # over the K and V rows that the step wrote, of the first layer
    "k1.kv.rel": 0.016,  # the same of any layer
    "k2.stream.rel": 0.042,  # over the stream that enters a layer, any of them
    "k2.added.rel": 0.054,  # the same beyond a rounding step, relative to what the layer before added
    "k2.logits.rel": 0.031,  # over next_token_logits: the last layer's stream, normed, by SGLang's LM head
}

QWEN3_SPEC = family_spec(QWEN3, BOUNDS)
