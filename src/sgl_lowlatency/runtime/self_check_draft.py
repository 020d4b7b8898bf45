"""draft_sampler against SGLang's own functions on the weights that are served, before the first proposal.

Base logits within rounding; step logits within the rounding of a bias, each behind the token that the kernel drafted before; of requests that sample,
the very tokens that SGLang's sampling kernel takes from the kernel's step logits; of others, tokens whose logit is the largest but for rounding.
Of several ranks each compares its own columns of the vocabulary, and all have the same tokens and the same step logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sgl_lowlatency.kernels.draft_sampler import DraftSampler

# Relative L2 of a row. Two roundings to bf16 are 0.003 apart; a row of another token's bias, or of a wrong part of the vocabulary, is 0.1 and more.
RELATIVE_L2 = 0.01
GREEDY_GAP = 2.0**-6  # of the largest magnitude of a row's logits: what roundings of bias and sum may put between equals
TEMPERATURES = (0.8, 0.0, 1.3)  # of a draft that samples, in turn
MOST_TOLD, LONGEST_TOLD = 20, 300  # misses that a rank tells the others of, and characters of each


@dataclasses.dataclass(frozen=True)
class _Proposal:
    """What the kernel made of a batch. tokens: int64 [batch, gamma], in the vocabulary. wanted: float32 [gamma, batch, columns of the rank], base
    plus bias as SGLang adds them behind the kernel's tokens, not rounded. at: float32 [batch]. offset: of the noise."""

    tokens: torch.Tensor
    wanted: torch.Tensor
    at: torch.Tensor
    offset: torch.Tensor


class DraftCheck:
    """Runs proposals on inputs of its own, and leaves SGLang's buffers as it found them. exchange: sends JSON values to all ranks that share the
    draft and returns theirs, in rank order; None: there is one."""

    def __init__(
        self, sampler: DraftSampler, model: Any, noise: Any, draft_tokens: torch.Tensor, step_logits: torch.Tensor | None, temperatures: torch.Tensor,
        exchange: Callable[[Mapping[str, Any]], list[dict]] | None = None,
    ):  # fmt: skip
        self._sampler, self._model, self._noise, self._tokens = sampler, model, noise, draft_tokens
        self._logits, self._temperatures, self._exchange = step_logits, temperatures, exchange

    def run(self) -> None:
        """Raises RuntimeError with every figure that misses its bound; of several ranks on all, as soon as one of them has any."""
        kept = [(buffer, buffer.clone()) for buffer in (self._tokens, self._noise.offset, self._temperatures)]
        misses: list[str] = []
        try:
            with torch.no_grad():
                for batch in range(1, self._sampler.max_batch + 1):  # an instance of the kernel serves one or a few of them
                    misses += [f"{batch} requests: {miss}" for miss in self._misses(batch)]
                if self._exchange is not None:  # also so that no rank proposes before all have read what the others stored here
                    told = self._exchange({"misses": [miss[:LONGEST_TOLD] for miss in misses[:MOST_TOLD]]})
                    misses = [f"rank {rank}: {miss}" for rank, one in enumerate(told) for miss in one["misses"]]
        finally:
            for buffer, values in kept:
                buffer.copy_(values)
            if self._logits is not None:
                self._logits.zero_()  # as SGLang made it
        if misses:
            raise RuntimeError("draft_sampler self-check failed, the server is refused:\n  - " + "\n  - ".join(misses))
        if self._exchange is not None:  # nobody proposes before all have cleared
            self._synchronize()
            self._exchange({})

    def _synchronize(self) -> None:
        if self._sampler.device.type == "cuda":
            torch.cuda.synchronize(self._sampler.device)

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
            if self._exchange is None:
                return
            tokens = tokens.clamp(0, sampler.vocab - 1)  # other ranks come to the calls below, which ranks make together
        standard, _ = self._model.compute_base_logits(hidden)
        yield from _distance("base logits", base.flatten(0, 1), self._columns(standard))
        proposal = _Proposal(tokens, self._wanted(base, anchors, tokens), at, offset)
        for step in range(gamma):
            yield from self._sampled_misses(step, proposal)
        moved = int(self._noise.offset - offset)
        if moved != (0 if self._logits is None else 1):
            yield f"the noise offset moved on by {moved}"
        yield from self._greedy_misses(proposal)  # last: once the ranks have met there, another one's next launch stores here

    def _columns(self, values: torch.Tensor) -> torch.Tensor:
        """The rank's columns of what SGLang computes, of the whole vocabulary or of the rank's part and its padding."""
        begin, count = self._sampler.columns
        return values[..., begin : begin + count] if values.shape[-1] >= self._sampler.vocab else values[..., :count]

    def _wanted(self, base: torch.Tensor, anchors: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        wanted = []
        for step in range(base.shape[1]):
            previous = anchors if step == 0 else tokens[:, step - 1]
            bias, _ = self._model.markov_head.step_bias(previous, hidden_states=None, state=None)
            wanted.append(base[:, step].float() + self._columns(bias).float())
        return torch.stack(wanted)

    def _greedy_misses(self, of: _Proposal) -> Iterator[str]:
        """Also compares what the ranks have: each knows its own columns alone."""
        begin, count = self._sampler.columns
        place = of.tokens.T - begin  # [gamma, batch]
        is_own = (place >= 0) & (place < count)
        chosen = of.wanted.gather(2, place.clamp(0, count - 1)[..., None])[..., 0].where(is_own, -torch.inf)
        figures = torch.stack([of.wanted.amax(2), chosen, of.wanted.abs().amax(2)])  # [3, gamma, batch]
        if self._exchange is not None:
            told = self._exchange({"tokens": of.tokens.tolist(), "step logits": self._fingerprint(of), "figures": figures.tolist()})
            for what in ("tokens", "step logits"):
                if others := [rank for rank, one in enumerate(told) if one[what] != told[0][what]]:
                    yield f"ranks {others} have other {what} than rank 0"
            figures = torch.tensor([one["figures"] for one in told], device=figures.device).amax(0)  # NaN stays NaN
        largest, chosen, magnitude = figures
        for step, row in ((of.at == 0) & ~(largest - chosen <= GREEDY_GAP * magnitude)).nonzero().tolist():
            gap, limit = float((largest - chosen)[step, row]), float(GREEDY_GAP * magnitude[step, row])
            yield f"step {step}: the token of request {row} is {gap:.4g} below the largest logit, bound {limit:.4g}"

    def _fingerprint(self, of: _Proposal) -> int:
        """Of the step logits of requests that sample: another one for almost any other bits."""
        if self._logits is None:
            return 0
        logits = self._logits[: len(of.at)][of.at != 0]
        bits = logits.contiguous().view(torch.int16 if logits.element_size() == 2 else torch.int32).flatten().long()
        return int((bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum())

    def _sampled_misses(self, step: int, of: _Proposal) -> Iterator[str]:
        samples = (of.at != 0).nonzero().flatten()
        if self._logits is None or not len(samples):
            return
        logits = self._logits[: len(of.at), step]
        yield from _distance(f"step {step}: step logits", self._columns(logits)[samples], of.wanted[step, samples])
        chosen = self._choose(logits.where((of.at != 0)[:, None], 0), of.at, of.offset, step)
        for row in samples.tolist():
            if chosen[row] != of.tokens[row, step]:
                yield f"step {step}: request {row} drew token {int(of.tokens[row, step])}, SGLang draws {int(chosen[row])} from the same logits"

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
