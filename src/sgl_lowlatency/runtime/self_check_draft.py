"""draft_sampler against SGLang's own functions on the weights that are served, before the first proposal.

Base logits within rounding; step logits within the rounding of a bias, each behind the token that the kernel drafted before; of requests that sample,
the very tokens that SGLang's sampling kernel takes from the kernel's step logits; of others, tokens whose logit is the largest but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sgl_lowlatency.kernels.draft_sampler import DraftSampler

# Relative L2 of a row. Two roundings to bf16 are 0.003 apart; a row of another token's bias, or of a wrong part of the vocabulary, is 0.1 and more.
RELATIVE_L2 = 0.01
GREEDY_GAP = 2.0**-6  # of the largest magnitude of a row's logits: what roundings of bias and sum may put between equals
TEMPERATURES = (0.8, 0.0, 1.3)  # of a draft that samples, in turn


class DraftCheck:
    """Runs proposals on inputs of its own, and leaves SGLang's buffers as it found them."""

    def __init__(
        self, sampler: DraftSampler, model: Any, noise: Any, draft_tokens: torch.Tensor, step_logits: torch.Tensor | None, temperatures: torch.Tensor
    ):
        self._sampler, self._model, self._noise, self._tokens = sampler, model, noise, draft_tokens
        self._logits, self._temperatures = step_logits, temperatures

    def run(self) -> None:
        """Raises RuntimeError with every figure that misses its bound."""
        kept = [(buffer, buffer.clone()) for buffer in (self._tokens, self._noise.offset, self._temperatures)]
        misses: list[str] = []
        try:
            with torch.no_grad():
                for batch in range(1, self._sampler.max_batch + 1):  # an instance of the kernel serves one or a few of them
                    misses += [f"{batch} requests: {miss}" for miss in self._misses(batch)]
        finally:
            for buffer, values in kept:
                buffer.copy_(values)
            if self._logits is not None:
                self._logits.zero_()  # as SGLang made it
        if misses:
            raise RuntimeError("draft_sampler self-check failed, the server is refused:\n  - " + "\n  - ".join(misses))

    def _misses(self, batch: int) -> Iterator[str]:
        sampler, gamma = self._sampler, self._sampler.gamma
        generator = torch.Generator().manual_seed(batch)
        hidden = torch.randn(batch * gamma, sampler.hidden, generator=generator).bfloat16().to(sampler.device)
        anchors = torch.randint(0, sampler.vocab, (batch,), generator=generator).to(sampler.device)
        at = torch.tensor([0.0 if self._logits is None else TEMPERATURES[row % len(TEMPERATURES)] for row in range(batch)], device=sampler.device)
        self._temperatures[:batch] = at
        self._tokens.fill_(-1)
        offset = self._noise.offset.clone()
        stream = torch.cuda.current_stream().cuda_stream if sampler.device.type == "cuda" else 0
        sampler.launch(batch, hidden, anchors, self._temperatures, stream)
        tokens, base = self._tokens[: batch * gamma].view(batch, gamma), sampler.base_logits(batch)
        if bool(((tokens < 0) | (tokens >= sampler.vocab)).any()):
            yield f"tokens {tokens.tolist()} are not all in the vocabulary"
            return
        standard, _ = self._model.compute_base_logits(hidden)
        yield from _distance("base logits", base.flatten(0, 1), standard)
        for step in range(gamma):
            previous = anchors if step == 0 else tokens[:, step - 1]
            bias, _ = self._model.markov_head.step_bias(previous, hidden_states=None, state=None)
            yield from self._step_misses(step, base[:, step].float() + bias.float(), tokens[:, step], at, offset)
        moved = int(self._noise.offset - offset)
        if moved != (0 if self._logits is None else 1):
            yield f"the noise offset moved on by {moved}"

    def _step_misses(self, step: int, wanted: torch.Tensor, tokens: torch.Tensor, at: torch.Tensor, offset: torch.Tensor) -> Iterator[str]:
        """wanted: float32 [batch, vocab], base plus bias as SGLang adds them behind the kernel's tokens, not rounded."""
        gap = wanted.amax(1) - wanted.gather(1, tokens[:, None])[:, 0]
        limit = GREEDY_GAP * wanted.abs().amax(1)
        for row in (at == 0).nonzero().flatten().tolist():
            if not gap[row] <= limit[row]:
                yield f"step {step}: the token of request {row} is {gap[row]:.4g} below the largest logit, bound {limit[row]:.4g}"
        samples = (at != 0).nonzero().flatten()
        if self._logits is None or not len(samples):
            return
        logits = self._logits[: len(at), step]
        yield from _distance(f"step {step}: step logits", logits[samples], wanted[samples])
        chosen = self._choose(torch.where((at != 0)[:, None], logits, wanted.to(logits.dtype)), at, offset, step)
        for row in samples.tolist():
            if chosen[row] != tokens[row]:
                yield f"step {step}: request {row} drew token {int(tokens[row])}, SGLang draws {int(chosen[row])} from the same logits"

    def _choose(self, logits: torch.Tensor, at: torch.Tensor, offset: torch.Tensor, step: int) -> torch.Tensor:
        from sglang.kernels.ops.speculative.dspark.markov_sample import MarkovSampleStep

        logits = logits.contiguous()
        return MarkovSampleStep.execute(
            base_logits=logits, bias=torch.zeros_like(logits), temperatures=at, key=self._noise.key, offset=offset, step=step,
            step_dtype=logits.dtype, logits_out=torch.empty_like(logits),
        )  # fmt: skip


def _distance(what: str, ours: torch.Tensor, standard: torch.Tensor) -> Iterator[str]:
    """Of [rows, vocab]: the row that is furthest off, where that is beyond the bound. NaN never passes."""
    ours, standard = ours.float(), standard.float()
    relative = (ours - standard).norm(dim=1) / standard.norm(dim=1)
    if not bool((relative <= RELATIVE_L2).all()):
        row = int(relative.nan_to_num(float("inf")).argmax())
        yield f"{what}: row {row} is {float(relative[row]):.4g} of SGLang's away (relative L2), bound {RELATIVE_L2}"
