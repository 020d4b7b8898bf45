"""An LM head that leaves the next token no choice: every token has one successor, so a greedy text is known from its last prompt token.

The row of a token is its predecessor's embedding, of which the residual stream behind the last layer still holds a part: after 36 layers
of these weights the two correlate by 0.19. The successor's logit is then near 0.19 * 3 * sqrt(hidden), 36 in Qwen3-8B, where the best of
152k others reaches 13 to 16. Two servers that round differently generate the same text; with few hidden channels they need not. Nothing
else of the model changes, and neither do its shapes.
"""

from __future__ import annotations

import math


def successor(token: int, *, vocab: int, period: int) -> int:
    """The token that follows: the next one of its group of `period` ids, of the last the first. The vocabulary's last group may be
    shorter."""
    first = token - token % period
    return first + (token - first + 1) % min(period, vocab - first)


def text(token: int, length: int, *, vocab: int, period: int) -> list[int]:
    """The `length` tokens that follow `token`."""
    found = []
    for _ in range(length):
        token = successor(token, vocab=vocab, period=period)
        found.append(token)
    return found


def head(embedding, period: int, gain: float):
    """The LM head [vocab, hidden] of these successors, in `embedding`'s dtype. gain: standard deviation of a logit of another token,
    times the embedding's."""
    import torch

    vocab, hidden = embedding.shape
    rows = torch.empty_like(embedding)
    following = torch.tensor([successor(token, vocab=vocab, period=period) for token in range(vocab)], device=embedding.device)
    rows[following] = embedding * (gain / math.sqrt(hidden))
    return rows
