"""Are two servers' greedy tokens the same wherever arithmetic decides them?

Two correct paths round differently, so they may pick different tokens where the best two logits are nearly equal, and every
token after that is another text. A difference counts against the plugin only when float32 prefers the standard path's token
by more than `bound`, in nats. By default the bound is twice the largest log-probability error of the standard path itself
against float32 on this very text: what its own rounding could have turned round.
"""

from __future__ import annotations

import dataclasses
import math

from benchmark.serve.client import Client, Reply, greedy

TOP = 5  # log-probabilities asked for, a token


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token at which a request's two texts part.

    off_margin: how much the standard path itself preferred its token, nats (None if ours is not among its best TOP).
    fp32_margin: the same preference in float32 (None without an oracle).
    """

    request: int
    position: int
    off_id: int
    on_id: int
    off_margin: float | None
    fp32_margin: float | None = None

    @property
    def margin(self) -> float:
        """The preference that decides: float32's if known, else the standard path's own, else infinite."""
        if self.fp32_margin is not None:
            return self.fp32_margin
        return float("inf") if self.off_margin is None else self.off_margin


def first_difference(off: list[int], on: list[int]) -> int | None:
    """The first index at which the two lists differ, their common length if one is a prefix, None if they are equal."""
    for index, (a, b) in enumerate(zip(off, on, strict=False)):
        if a != b:
            return index
    return None if len(off) == len(on) else min(len(off), len(on))


def difference(request: int, off: Reply, on_ids: list[int], start: int = 0) -> Difference | None:
    """Compare `off.ids[start:]` with `on_ids`. Raises ValueError if one text is shorter: that is a lost or extra step."""
    index = first_difference(off.ids[start:], on_ids)
    if index is None:
        return None
    at = start + index
    if at >= len(off.ids) or index >= len(on_ids):
        raise ValueError(
            f"request {request}: {len(off.ids) - start} tokens from the standard path, {len(on_ids)} from the plugin"
        )
    scores = {token: logprob for logprob, token in off.top[at]} if off.top else {}
    ours = scores.get(on_ids[index])
    margin = None if ours is None else scores[off.ids[at]] - ours
    return Difference(request, at, off.ids[at], on_ids[index], margin)


def path_error(off: list[Reply], on: list[Reply]) -> float:
    """Largest difference of a log-probability that both paths report before their texts part, nats."""
    worst = 0.0
    for a, b in zip(off, on, strict=True):
        agreed = first_difference(a.ids, b.ids)
        for left, right in list(zip(a.top, b.top, strict=False))[:agreed]:
            scores = {token: logprob for logprob, token in right}
            worst = max([worst, *(abs(logprob - scores[token]) for logprob, token in left if token in scores)])
    return worst


def sequences_of(prompts: list[list[int]], replies: list[Reply]) -> tuple[list[list[int]], list[int]]:
    """What an oracle is asked for replies to prompts: sequences, and the positions from which logits are wanted."""
    sequences = [prompt + reply.ids[:-1] for prompt, reply in zip(prompts, replies, strict=True)]
    return sequences, [len(prompt) - 1 for prompt in prompts]


class Fp32:
    """Float32 log-probabilities of the standard path's texts.

    oracle: `benchmark.oracle.Oracle`. prompts, off: the requests and the standard path's replies with `top`.
    """

    def __init__(self, oracle, prompts: list[list[int]], off: list[Reply]) -> None:
        logits = oracle.logits(*sequences_of(prompts, off))
        self._logprobs = [x.log_softmax(dim=-1) for x in logits]
        self.off_error = max(self._error(i, reply) for i, reply in enumerate(off))
        self.margins = [m for x in logits for m in _top_margins(x)]

    def _error(self, index: int, reply: Reply) -> float:
        table = self._logprobs[index]
        errors = [abs(logprob - table[at, token].item()) for at, best in enumerate(reply.top) for logprob, token in best]
        return max(errors, default=0.0)

    def error(self, index: int, reply: Reply, agreed: int | None) -> float:
        """Largest error of a reply's log-probabilities on its first `agreed` positions (all if None), nats."""
        return self._error(index, dataclasses.replace(reply, top=reply.top[:agreed]))

    def rms_error(self, replies: list[Reply]) -> float:
        """Root mean square error of every log-probability in `replies`, the texts this was made of, nats. Raises ValueError without any."""
        errors = [
            (logprob - table[at, token].item()) ** 2
            for table, reply in zip(self._logprobs, replies, strict=True)
            for at, best in enumerate(reply.top)
            for logprob, token in best
        ]
        if not errors:
            raise ValueError("the replies have no log-probabilities")
        return math.sqrt(sum(errors) / len(errors))

    def overruled(self, replies: list[Reply], bound: float) -> int:
        """How many tokens of `replies`, the texts this was made of, float32 would not have chosen by more than `bound` nats."""
        gaps = [table.max(dim=-1).values - table[range(len(reply.ids)), reply.ids] for table, reply in zip(self._logprobs, replies, strict=True)]
        return sum(int((gap > bound).sum()) for gap in gaps)

    def margin(self, found: Difference) -> Difference:
        """The difference with its float32 margin filled in."""
        row = self._logprobs[found.request][found.position]
        return dataclasses.replace(found, fp32_margin=(row[found.off_id] - row[found.on_id]).item())


def _top_margins(logits) -> list[float]:
    best = logits.topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).tolist()


@dataclasses.dataclass
class Verdict:
    """The outcome of a comparison: `wrong` are differences whose margin exceeds the bound."""

    compared: int
    differences: list[Difference]
    bound: float
    on_error: float
    off_error: float | None
    decided: int | None  # positions whose float32 top-2 margin exceeds the bound

    @property
    def wrong(self) -> list[Difference]:
        return [d for d in self.differences if d.margin > self.bound]

    def summary(self) -> dict:
        """JSON fields of a results row."""
        fields = {"tokens_compared": self.compared, "differences": len(self.differences), "wrong": len(self.wrong)}
        fields |= {"bound_nats": round(self.bound, 4), "on_error_nats": round(self.on_error, 4)}
        if self.off_error is not None:
            fields |= {"off_error_nats": round(self.off_error, 4), "decided_positions": self.decided}
        return fields | {"worst_margin_nats": round(max((d.margin for d in self.differences), default=0.0), 4)}


def judge(
    prompts,
    off: list[Reply],
    on: list[Reply],
    *,
    oracle=None,
    bound: float | None = None,
    client: Client | None = None,
    rounds: int = 8,
    longest_prompt: int | None = None,
) -> Verdict:
    """Compare the replies of one list of requests.

    With `client` (the plugin's server) a text that parted is taken up again behind the standard path's token, up to
    `rounds` times and while prompt and text fit `longest_prompt`, so that the rest of it is compared too. Without an
    oracle the standard path's own margins decide and the bound defaults to twice the largest log-probability difference
    of the two paths.
    """
    fp32 = Fp32(oracle, prompts, off) if oracle is not None else None
    error = path_error(off, on)
    found, compared, pending = [], 0, []
    for index, (a, b) in enumerate(zip(off, on, strict=True)):
        pending.append((index, 0, b.ids, a))
    for turn in range(rounds + 1):
        again = []
        for index, start, ids, reply in pending:
            parted = difference(index, reply, ids, start)
            end = len(reply.ids) if parted is None else parted.position + 1
            compared += end - start
            if parted is not None:
                found.append(fp32.margin(parted) if fp32 else parted)
                fits = longest_prompt is None or len(prompts[index]) + end <= longest_prompt
                if end < len(reply.ids) and fits:
                    again.append((index, end, reply))
        if not again or client is None or turn == rounds:
            break
        resumed = [prompts[i] + reply.ids[:end] for i, end, reply in again]
        params = [greedy(len(reply.ids) - end) for _, end, reply in again]
        replies = client.generate(resumed, params)
        pending = [(i, end, new.ids, reply) for (i, end, reply), new in zip(again, replies, strict=True)]
    if fp32:
        on_error = max(fp32.error(i, b, first_difference(a.ids, b.ids)) for i, (a, b) in enumerate(zip(off, on, strict=True)))
        limit = 2 * fp32.off_error if bound is None else bound
        return Verdict(compared, found, limit, on_error, fp32.off_error, sum(m > limit for m in fp32.margins))
    return Verdict(compared, found, 2 * error if bound is None else bound, error, None, None)
