"""Runs what SGLang launches around a DeepSeek-V4.1 layer's attention in Triton's interpreter, which a process chooses before it imports Triton.

    python3 interpreted_attention_slices.py FOLDER    reads FOLDER/case.pt, writes FOLDER/found.pt
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from sglang.kernels.ops.attention.dsv4.dequant_k_cache import dequantize_k_cache_paged_dsv4
from sglang.kernels.ops.attention.dsv4.rope import apply_rotary_emb_triton
from sglang.kernels.ops.layernorm.hc_combine_norm import hc_combine_norm
from sglang.kernels.ops.layernorm.mhc import hc_mix_stats_sinkhorn
from sglang.kernels.ops.layernorm.mhc_post_split_h import mhc_post_split_h


def main() -> None:
    folder = Path(sys.argv[1])
    case = torch.load(folder / "case.pt")
    x, streams, y, rope = case["x"].clone(), case["streams"], case["y"], 2 * case["freqs_cis"].shape[1]
    apply_rotary_emb_triton(x[..., -rope:], case["freqs_cis"], positions=case["positions"], inverse=True)
    pre, post, comb = hc_mix_stats_sinkhorn(
        streams.flatten(1), case["mix"], case["mix_scale"], case["mix_base"], 4, case["sinkhorn_iterations"], case["mix_rms_eps"], case["mix_eps"]
    )
    next_streams = mhc_post_split_h(y, streams, post, comb)
    out = hc_combine_norm(next_streams.flatten(1), pre, case["norm"], case["norm_eps"])
    q = case["x"].clone()
    apply_rotary_emb_triton(q[..., -rope:], case["freqs_cis"], positions=case["positions"])
    kv = dequantize_k_cache_paged_dsv4(case["pages"], case["slots"], case["page_size"])[:, 0]
    found = {"kv": kv, "q": q, "x": x, "coefficients": torch.cat((pre, post, comb.flatten(1)), 1), "streams": next_streams, "out": out}
    torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main()
