"""Runs SGLang's router and alignment kernels in Triton's interpreter, which a process chooses before it imports Triton.

    python3 interpreted_routing.py FOLDER BLOCK_SIZE    reads FOLDER/cases.pt, writes FOLDER/routed.pt
"""

import os
import sys
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from sglang.kernels.ops.moe import moe_align_small_numel, moe_fused_gate

warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, where infinities and NaN meet
for module in (moe_fused_gate, moe_align_small_numel):
    module.is_arch_support_pdl = lambda: False


def align(ids: torch.Tensor, num_experts: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(sorted_token_ids up to the padded total, expert_ids of its blocks)."""
    tokens = torch.full((ids.numel() * block_size,), -7, dtype=torch.int32)
    blocks, total = torch.full((ids.numel(),), -7, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    moe_align_small_numel.moe_align_small_numel(ids, num_experts + 1, block_size, tokens, blocks, total)
    return tokens[: total.item()], blocks[: total.item() // block_size]


def main() -> None:
    folder, block_size = Path(sys.argv[1]), int(sys.argv[2])
    routed = {}
    for name, (logits, top_k, renormalizes) in torch.load(folder / "cases.pt").items():
        weights, ids = moe_fused_gate.moe_fused_gate(logits, None, top_k, scoring_func="softmax", renormalize=renormalizes)
        few = ids[: moe_align_small_numel.SMALL_NUMEL_LIMIT // top_k]
        routed[name] = (ids, weights, *align(few, logits.shape[1], block_size))
    torch.save(routed, folder / "routed.pt")


if __name__ == "__main__":
    main()
