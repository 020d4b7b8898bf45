"""Oracle of draft_sampler: the proposal of a DSpark draft as SGLang 0.5.23 makes it, in torch.

Products are float64; what SGLang rounds to bf16 is rounded. Keys are float32, operation by operation, because the choice must be SGLang's on
the same logits: kernels/ops/speculative/dspark/markov_sample.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32_10(key: int, c0, c1, c2, c3) -> np.ndarray:
    """Four words, uint32 [4, ...], of Philox4x32 with ten rounds. key: 64 bits. c0 .. c3: counters, arrays that broadcast, of which 32 bits count."""
    counters = [np.asarray(c).astype(np.uint64) & np.uint64(_MASK) for c in np.broadcast_arrays(c0, c1, c2, c3)]
    keys = [key & _MASK, key >> 32 & _MASK]
    for _ in range(_ROUNDS):
        a, b = (counters[2 * i] * np.uint64(_MULTIPLIERS[i]) for i in range(2))
        high, low = (lambda x: x >> np.uint64(32)), (lambda x: x & np.uint64(_MASK))
        counters = [high(b) ^ counters[1] ^ np.uint64(keys[0]), low(b), high(a) ^ counters[3] ^ np.uint64(keys[1]), low(a)]
        keys = [(k + step) & _MASK for k, step in zip(keys, _KEY_STEPS)]
    return np.stack(counters).astype(np.uint32)


def exponential_noise(key: int, offset: int, step: int, rows: int, vocab: int) -> torch.Tensor:
    """float32 [rows, vocab]: -log1p(-u) of a uniform u in (0, 1]; token id has word id % 4 of quad id // 4, row is the batch row."""
    words = philox4x32_10(key, np.arange(-(-vocab // 4))[None, :], np.arange(rows)[:, None], step, offset)
    bits = torch.from_numpy(np.moveaxis(words, 0, -1).reshape(rows, -1)[:, :vocab].astype(np.int64))
    uniform = (bits.float() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform)


def keys(values: torch.Tensor, temperatures: torch.Tensor, key: int, offset: int, step: int) -> torch.Tensor:
    """float32 [rows, vocab] by which tokens are chosen. values: float32 [rows, vocab]. temperatures: float32 [rows], 0: the value itself."""
    noise = exponential_noise(key, offset, step, *values.shape)
    noised = values / torch.where(temperatures == 0, 1.0, temperatures)[:, None] - torch.log(noise)
    return torch.where((temperatures == 0)[:, None], values, noised)


def choose(keys: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the lowest id among the NaNs of a row, where it has any, else among its maxima."""
    nan = keys.isnan()
    maximum = torch.where(nan, -torch.inf, keys).amax(1, keepdim=True)
    wins = torch.where(nan.any(1, keepdim=True), nan, keys == maximum)
    return wins.to(torch.int8).argmax(1)  # the first


def normed(hidden: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
    """float64 [rows, hidden]: what the LM head multiplies; rounded to bf16, as SGLang's norm does. norm None: hidden itself."""
    x = hidden.double()
    if norm is None:
        return x
    return (x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * norm.double()).bfloat16().double()


def base_logits(hidden: torch.Tensor, norm: torch.Tensor | None, eps: float, head: torch.Tensor) -> torch.Tensor:
    """float64 [rows, vocab], not rounded. hidden: [batch * gamma, hidden] bf16. head: [vocab, hidden] bf16."""
    return normed(hidden, norm, eps) @ head.double().T


@dataclasses.dataclass(frozen=True)
class Proposal:
    """tokens: int64 [batch, gamma]. step_logits: float32 or bf16 [batch, gamma, vocab]. keys: float32 of that shape."""

    tokens: torch.Tensor
    step_logits: torch.Tensor
    keys: torch.Tensor

    @property
    def margins(self) -> torch.Tensor:
        """float32 [batch, gamma]: how far the winning key leads the next one; 0 for a tie, NaN where infinities or NaN take part."""
        first, second = self.keys.topk(2, dim=-1).values.unbind(-1)
        return first - second


def propose(
    base: torch.Tensor,
    anchors: torch.Tensor,
    markov_w1: torch.Tensor,
    markov_w2: torch.Tensor,
    temperatures: torch.Tensor,
    key: int = 0,
    offset: int = 0,
    step_dtype: torch.dtype = torch.float32,
    rounds_bias: bool = True,
) -> Proposal:
    """The gamma steps behind given base logits.

    base: bf16 [batch, gamma, vocab]. anchors: int64 [batch]. markov_w1, markov_w2: [vocab, rank] bf16. temperatures: float32 [batch], 0 for arg-max;
    all 0 is a greedy draft. step_dtype: float32, or bfloat16: base plus bias are rounded to it before the choice. rounds_bias: to bf16, as products
    of SGLang's are; else to float32, as in its fused greedy step (MarkovGreedyStep).
    """
    previous, tokens, logits, all_keys = anchors, [], [], []
    for step in range(base.shape[1]):
        bias = (markov_w1[previous].double() @ markov_w2.double().T).to(torch.bfloat16 if rounds_bias else torch.float32)
        value = (base[:, step].float() + bias.float()).to(step_dtype)
        all_keys.append(keys(value.float(), temperatures, key, offset, step))
        previous = choose(all_keys[-1])
        tokens.append(previous)
        logits.append(value)
    return Proposal(torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(all_keys, 1))
