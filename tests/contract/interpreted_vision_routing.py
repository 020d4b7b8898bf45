"""Runs SGLang's router of DeepSeek-V4.1 in Triton's interpreter, which a process chooses before it imports Triton.

    python3 interpreted_vision_routing.py FOLDER    reads FOLDER/cases.pt, writes FOLDER/routed.pt
"""

import os
import sys
import types
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from sglang.kernels.ops.moe import moe_fused_gate
from triton.runtime.interpreter import TensorHandle

warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, where infinities and NaN meet
moe_fused_gate.is_arch_support_pdl = lambda: False


def by_numpy(function):
    """A function of libdevice, which the interpreter lacks, in float32."""
    return lambda x: tl.core.tensor(TensorHandle(function(x.handle.data.astype(np.float32)).astype(np.float32), x.handle.dtype), x.type)


moe_fused_gate.libdevice = types.SimpleNamespace(exp=by_numpy(np.exp), log1p=by_numpy(np.log1p), sqrt=by_numpy(np.sqrt))


def main() -> None:
    folder, routed = Path(sys.argv[1]), {}
    for name, case in torch.load(folder / "cases.pt").items():
        logits, bias, bias_alt, token_ids, alt, top_k, live = case
        weights, ids = moe_fused_gate.moe_fused_gate(
            logits, bias, topk=top_k, scoring_func="sqrtsoftplus", bias_alt=bias_alt, input_ids=token_ids, bias_alt_token_id=alt,
            renormalize=top_k > 1, renormalize_epsilon=1e-20, routed_scaling_factor=1.5, apply_routed_scaling_factor_on_output=True,
            num_token_non_padded=live, sqrtsoftplus_log1p=True,
        )  # fmt: skip
        routed[name] = ids, weights
    torch.save(routed, folder / "routed.pt")


if __name__ == "__main__":
    main()
