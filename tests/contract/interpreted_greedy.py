"""Runs SGLang's fused greedy Markov step in Triton's interpreter, which a process chooses before it imports Triton.

    python3 interpreted_greedy.py FOLDER    reads FOLDER/cases.pt: (base [gamma, vocab], anchor, w1, w2) each; writes FOLDER/tokens.pt
"""

import os
import sys
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from sglang.kernels.ops.speculative.dspark.dspark_draft_model import MarkovGreedyStep

warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, at infinities


def main() -> None:
    folder = Path(sys.argv[1])
    chosen = []
    for base, anchor, w1, w2 in torch.load(folder / "cases.pt"):
        tokens, previous = [], torch.tensor([anchor])
        for logits in base:
            previous = MarkovGreedyStep.triton(base_logits=logits[None], prev_embeds=w1[previous], w2_weight=w2)
            tokens.append(previous)
        chosen.append(torch.cat(tokens))
    torch.save(torch.stack(chosen), folder / "tokens.pt")


if __name__ == "__main__":
    main()
