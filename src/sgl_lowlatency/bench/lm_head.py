"""The LM head behind the step, as SGLang runs one that the step does not have: one bf16 matrix product by torch, that is cuBLAS."""

from __future__ import annotations

import torch

CHECKED = 256  # vocabulary rows compared with float32
TOLERANCE = 0.02  # relative norm; bf16 logits of bf16 inputs are within 0.004


def logits_problems(logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> list[str]:
    """What is wrong with logits [rows, vocab] of hidden [rows, hidden] and weight [vocab, hidden]: compared with float32 at both ends of
    the vocabulary."""
    ends = torch.arange(weight.shape[0], device=weight.device)
    ends = torch.cat((ends[:CHECKED], ends[-CHECKED:]))
    want = hidden.float() @ weight[ends].float().T
    error = (logits[:, ends].float() - want).norm() / want.norm()
    return [] if error <= TOLERANCE else [f"logits of the LM head are off by {error.item():.3g} of their norm"]  # NaN is off too


class LmHead:
    """logits [rows, vocab] = hidden [rows, hidden] x weight [vocab, hidden] transposed, all bf16."""

    def __init__(self, weight: torch.Tensor, max_rows: int) -> None:
        self.weight = weight
        self._logits = torch.empty((max_rows, weight.shape[0]), dtype=torch.bfloat16, device=weight.device)

    def launch(self, hidden: torch.Tensor) -> None:
        torch.matmul(hidden, self.weight.T, out=self._logits[: hidden.shape[0]])

    def problems(self, hidden: torch.Tensor) -> list[str]:
        """What is wrong with the logits of the last launch, which read `hidden`."""
        return logits_problems(self._logits[: hidden.shape[0]], hidden, self.weight)
