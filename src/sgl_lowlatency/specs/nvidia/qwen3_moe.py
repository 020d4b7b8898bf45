"""The spec of Qwen3-MoE on NVIDIA: as the dense families' (dense.py), on sm_90, with bf16 or FP8 experts that every rank has all of.

- moe_runner_backend: a server without the flag has "auto", and the layers then pick Triton; guard/moe.py checks what they picked.
- env: no permuted expert weights, no simulated routing.
- FP8 of a checkpoint with scales of blocks: the check compares with SGLang's forward of exact products, so the bounds are those of bf16.
- Not EAGLE3, DFLASH, DSPARK, whose drafts read inputs of layers; in FP8 and on several GPUs not more than 128 experts.
- Several ranks have a share of every expert's channels, in bf16 alone (guard/moe.py).
- Rows that a graph pads, of KV slot 0, choose no experts; SGLang's forward without expert parallelism lets them. Nobody reads what becomes of them.
"""

from __future__ import annotations

from sgl_lowlatency.guard import moe
from sgl_lowlatency.guard.family import QWEN3_MOE
from sgl_lowlatency.specs.nvidia.dense import SGLANG_FP8_RELATIVE_L2, family_spec

# The self-check compares layer by layer, each from the kernel's own stream and on its choice of experts, and stream and choice by themselves
# (runtime/self_check_moe.py). What right kernels are apart is then one layer's rounding at any depth. Measured: the emulated kernel against
# reference/moe_standard_path.py on the self-check's inputs, random weights of four seeds, 2, 6, 12 and 24 layers of hidden 128 and 256, 32 and 64
# experts, 3, 5 and 16 rows. Largest of each: logits 0.0104, K and V rows 0.0054, stream 0.0139, added 0.0180, router logits 0.0127, gap 0.0232.
# At Qwen3-30B-A3B's own widths, 2 and 6 layers, 3 rows: 0.0075, 0.0046, 0.0076, 0.0082, 0.0083, 0.0083. Each bound is three times the larger of
# the two, for weights that nobody has tried; 48 layers of that shape on an H200 stay under 0.29 of every bound. A wrong page, mask, head, norm,
# angle, expert or weight of one exceeds some bound at least twice (tests/unit/runtime/test_self_check_moe.py).
TOLERANCES = {
    "logits.relative_l2": 0.031,
    "kv.relative_l2": 0.016,  # over the K and V rows that the step wrote, any layer
    "first_layer_kv.relative_l2": 0.016,
    "stream.relative_l2": 0.042,  # over the stream that enters a layer, any of them
    "added.relative_l2": 0.054,  # the same beyond a rounding step, relative to what the layer before added
    "router_logits.relative_l2": 0.038,  # over a row's router logits, any layer
    "routing.gap": 0.07,  # how far below SGLang's last choice one of ours may be on SGLang's logits, in units of the row's root mean square
    "sglang_fp8.first_layers_kv.relative_l2": SGLANG_FP8_RELATIVE_L2,
    "routing.wrong_choices": 0.0,  # rows whose experts are not the top k of the logits that were ranked
}

QWEN3_MOE_SPEC = family_spec(
    QWEN3_MOE,
    isas=frozenset({"sm_90"}),
    server_args={"moe_runner_backend": moe.RUNNER_BACKENDS},
    env=moe.ENVIRONMENT,
    tolerances=TOLERANCES,
)
