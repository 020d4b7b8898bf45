"""What recorded draft blocks (draft_record.py) and the served texts say: does one server's acceptance follow from its drafts and its text, and are
two servers' drafts and texts the same?

A draft that differs counts as rounding where the standard path's own two best step logits lie closer than the self-check allows (GREEDY_GAP of the
larger one's magnitude); the rest of its block then follows from another token and is not compared. Of a request that samples nothing of the kind is
known, so any difference counts. Blocks are compared as long as both servers drafted behind the same text, in batches composed alike.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from benchmark.serve.client import Reply
from benchmark.serve.draft_record import Block
from benchmark.serve.tokens import first_difference


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request of a recorded run. prompt: its tokens, by number."""

    prompt: int
    reply: Reply
    blocks: Sequence[Block]

    @property
    def accepted(self) -> list[int]:
        """Drafts that the target accepted, by step. The last step's are those that the text still had room for."""
        ends = [block.prefix for block in self.blocks[1:]] + [self.prompt + len(self.reply.ids) - 1]
        return [end - block.prefix - 1 for block, end in zip(self.blocks, ends, strict=True)]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first draft of a block that differs. step: of the request. logit_gap, bound: of the standard path, None of requests that sample."""

    request: int
    step: int
    row: int
    draft: int
    off_id: int
    on_id: int
    logit_gap: float | None
    bound: float | None

    @property
    def is_rounding(self) -> bool:
        return self.logit_gap is not None and self.logit_gap <= self.bound

    def __str__(self) -> str:
        where = f"request {self.request}, step {self.step} (row {self.row} of the batch), draft {self.draft}"
        known = "" if self.logit_gap is None else f", best logits {self.logit_gap:.4g} apart, rounding explains {self.bound:.4g}"
        return f"{where}: {self.off_id} off, {self.on_id} on{known}"


def accept_problems(answers: Sequence[Answer], *, greedy: bool) -> Iterator[str]:
    """Where one server's text is not what its acceptance has to make of its drafts: accepted drafts are the text, anchors are the token before them,
    a greedy request's first refused draft is another token than the text's, and SGLang counted as many verify steps."""
    for request, answer in enumerate(answers):
        ids, steps = answer.reply.ids, answer.reply.verify_steps
        if steps != len(answer.blocks) or not steps:
            yield f"request {request}: {steps} verify steps counted, {len(answer.blocks)} draft blocks recorded"
            continue
        for step, (block, accepted) in enumerate(zip(answer.blocks, answer.accepted)):
            at = block.prefix - answer.prompt
            where, last = f"request {request}, step {step}", step == steps - 1  # whose drafts beyond the text's end are not seen
            if not 0 <= at < len(ids) or not 0 <= accepted <= len(block.drafts):
                yield f"{where}: drafted behind {block.prefix} tokens, which leaves {accepted} accepted drafts"
            elif ids[at] != block.anchor:
                yield f"{where}: the anchor is {block.anchor}, the text has {ids[at]}"
            elif tuple(ids[at + 1 : at + 1 + accepted]) != block.drafts[:accepted]:
                yield f"{where}: drafts {block.drafts[:accepted]} were accepted, the text has {ids[at + 1 : at + 1 + accepted]}"
            elif greedy and not last and accepted < len(block.drafts) and ids[at + 1 + accepted] == block.drafts[accepted]:
                yield f"{where}: draft {accepted} is the text's token {block.drafts[accepted]} and was refused"


def accept_length(answers: Sequence[Answer]) -> float:
    """Tokens a verify step of a request; each text's first token is its prefill's."""
    return sum(len(answer.reply.ids) - 1 for answer in answers) / max(sum(answer.reply.verify_steps for answer in answers), 1)


@dataclasses.dataclass
class Comparison:
    """Of two servers' answers to the same run. tokens, drafts, blocks: compared. texts: (request, token) where served texts part first. uneven: why
    blocks were not compared to the end, None where they were."""

    tokens: int
    drafts: int
    blocks: int
    texts: list[tuple[int, int]]
    differences: list[Difference]
    uneven: str | None

    @property
    def wrong(self) -> list[Difference]:
        return [found for found in self.differences if not found.is_rounding]

    def summary(self) -> dict:
        """JSON fields."""
        fields = {"tokens_compared": self.tokens, "drafts_compared": self.drafts, "blocks_compared": self.blocks}
        fields |= {"texts_part_at": self.texts, "draft_differences": [dataclasses.asdict(found) for found in self.differences]}
        return fields | {"wrong_drafts": len(self.wrong)} | ({} if self.uneven is None else {"uneven": self.uneven})

    def problems(self) -> Iterator[str]:
        for request, token in self.texts:
            yield f"the served texts part: request {request} at token {token}"
        for found in self.wrong[:5]:
            yield f"drafts differ: {found}"
        if len(self.wrong) > 5:
            yield f"drafts differ in {len(self.wrong) - 5} more blocks"
        if self.uneven is not None and not self.texts and not self.wrong:
            yield self.uneven


def compare(off: Sequence[Answer], on: Sequence[Answer], *, greedy: bool) -> Comparison:
    """Text by text, and block by block as long as both servers drafted behind the same tokens."""
    made, uneven = Comparison(0, 0, 0, [], [], None), None
    for request, (ours, theirs) in enumerate(zip(on, off, strict=True)):
        parted = first_difference(theirs.reply.ids, ours.reply.ids)
        made.tokens += len(theirs.reply.ids) if parted is None else parted + 1
        if parted is not None:
            made.texts.append((request, parted))
        for step, (a, b) in enumerate(zip(theirs.blocks, ours.blocks)):
            if (a.prefix, a.anchor, a.row, a.batch) != (b.prefix, b.anchor, b.row, b.batch):
                what = [f"prefix {x.prefix}, anchor {x.anchor}, row {x.row} of {x.batch}" for x in (a, b)]
                uneven = uneven or f"request {request}, step {step}: drafted behind {what[0]} off, {what[1]} on"
                break
            made.blocks += 1
            at = first_difference(list(a.drafts), list(b.drafts))
            made.drafts += len(a.drafts) if at is None else at + 1
            if at is not None:
                known = _margin(a.best[at]) if greedy and a.best else (None, None)
                made.differences.append(Difference(request, step, a.row, at, a.drafts[at], b.drafts[at], *known))
        else:
            if len(theirs.blocks) != len(ours.blocks):
                uneven = uneven or f"request {request}: {len(theirs.blocks)} draft blocks off, {len(ours.blocks)} on"
    made.uneven = uneven
    return made


def _margin(best: tuple[float, float]) -> tuple[float, float]:
    """(how far apart two step logits are, what rounding explains of it)."""
    from sgl_lowlatency.runtime.self_check_draft import GREEDY_GAP  # here: it loads the extension, which texts and equal drafts do not need

    return best[0] - best[1], GREEDY_GAP * max(map(abs, best))


def makers(answers: Sequence[Answer]) -> dict[str, int]:
    """Blocks by who made them."""
    return dict(collections.Counter(block.made_by for answer in answers for block in answer.blocks))
