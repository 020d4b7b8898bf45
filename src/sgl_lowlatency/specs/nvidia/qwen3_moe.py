"""The spec of Qwen3-MoE on NVIDIA: as the dense families' (dense.py), on sm_90, with bf16 experts that are all on one GPU.

- moe_runner_backend: a server without the flag has "auto", and the layers then pick Triton; guard/moe.py checks what they picked.
- env: no permuted expert weights, no simulated routing.
- Not EAGLE3, DFLASH, DSPARK, whose drafts read inputs of layers; not FP8; not more than 128 experts, the most that the CUDA kernels have.
- Rows that a graph pads choose experts as others do, in SGLang's forward on one GPU too: what they read is time, not a result.
"""

from __future__ import annotations

from sgl_lowlatency.guard import moe
from sgl_lowlatency.guard.family import QWEN3_MOE
from sgl_lowlatency.specs.nvidia.dense import TOLERANCES, family_spec

# The self-check compares both paths on the kernel's choice of experts, and the choice by itself (runtime/self_check_moe.py).
ROUTER_LOGITS_RELATIVE_L2 = 0.12  # over a row's router logits, any layer
ROUTING_GAP = 0.3  # how far below SGLang's last choice one of ours may be on SGLang's logits, in units of the row's root mean square

QWEN3_MOE_SPEC = family_spec(
    QWEN3_MOE,
    isas=frozenset({"sm_90"}),
    server_args={"moe_runner_backend": moe.RUNNER_BACKENDS},
    env=moe.ENVIRONMENT,
    tolerances={
        **TOLERANCES,
        "routing.wrong_choices": 0.0,  # rows whose experts are not the top k of the logits that were ranked
        "router_logits.relative_l2": ROUTER_LOGITS_RELATIVE_L2,
        "routing.gap": ROUTING_GAP,
    },
)
