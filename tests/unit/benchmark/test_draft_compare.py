"""What is said of two servers' drafts and texts, and of one server's acceptance: cases written by hand, and what the right answer to each is."""

import dataclasses

import pytest

from benchmark.serve import draft_compare
from benchmark.serve.client import Reply
from benchmark.serve.draft_compare import Answer
from benchmark.serve.draft_record import Block

PROMPT = 10
TEXT = [50, 51, 52, 53, 54, 55]
# The prefill makes 50; the first step accepts 51 and 52 and adds 53, the second accepts nothing and adds 54, the third nothing and 55.
BLOCKS = [(0, 50, (51, 52, 7)), (3, 53, (8, 55, 56)), (4, 54, (9, 9, 9))]
BEST = ((4.0, 3.0), (4.0, 3.99), (4.0, 1.0))


def reply(ids=TEXT, steps=3):
    return Reply(ids=list(ids), logprobs=[], top=[], finish="length", cached=0, verify_steps=steps)


def answer(blocks=BLOCKS, ids=TEXT, row=0):
    made = [Block(step, row, 2, PROMPT + at, anchor, drafts, BEST, "sglang") for step, (at, anchor, drafts) in enumerate(blocks)]
    return Answer(PROMPT, reply(ids, len(made)), made)


def changed(step, drafts, best=BEST):
    found = answer()
    found.blocks[step] = dataclasses.replace(found.blocks[step], drafts=drafts, best=best)
    return found


def test_acceptance_that_follows_from_drafts_and_text():
    assert answer().accepted == [2, 0, 0]
    assert list(draft_compare.accept_problems([answer()], greedy=True)) == []
    assert draft_compare.accept_length([answer()]) == pytest.approx(5 / 3)
    assert draft_compare.makers([answer(), answer()]) == {"sglang": 6}


@pytest.mark.parametrize(("blocks", "problem"), [
    ([(0, 50, (51, 99, 7)), *BLOCKS[1:]], "request 0, step 0: drafts (51, 99) were accepted, the text has [51, 52]"),
    ([BLOCKS[0], (3, 53, (54, 55, 56)), BLOCKS[2]], "request 0, step 1: draft 0 is the text's token 54 and was refused"),
    ([(0, 49, (51, 52, 7)), *BLOCKS[1:]], "request 0, step 0: the anchor is 49, the text has 50"),
    ([BLOCKS[0], (3, 53, (8, 8, 8)), (3, 53, (8, 8, 8)), BLOCKS[2]], "request 0, step 1: drafted behind 13 tokens, which leaves -1 accepted drafts"),
    ([(0, 50, (51, 52, 7)), (6, 56, (1, 1, 1))], "request 0, step 0: drafted behind 10 tokens, which leaves 5 accepted drafts"),
])  # fmt: skip
def test_acceptance_that_does_not_follow_is_named(blocks, problem):
    assert list(draft_compare.accept_problems([answer(blocks)], greedy=True))[0] == problem


def test_a_sampled_request_may_refuse_the_texts_token():
    blocks = [BLOCKS[0], (3, 53, (54, 55, 56)), BLOCKS[2]]
    assert list(draft_compare.accept_problems([answer(blocks)], greedy=False)) == []


def test_a_block_that_was_not_recorded_is_named():
    short = dataclasses.replace(answer(), blocks=answer().blocks[:2])
    assert list(draft_compare.accept_problems([short], greedy=True)) == ["request 0: 3 verify steps counted, 2 draft blocks recorded"]


def test_equal_answers():
    found = draft_compare.compare([answer(), answer(row=1)], [answer(), answer(row=1)], greedy=True)
    assert (found.tokens, found.drafts, found.blocks, found.differences, list(found.problems())) == (12, 18, 6, [], [])
    assert found.summary() == {
        "tokens_compared": 12, "drafts_compared": 18, "blocks_compared": 6, "texts_part_at": [], "draft_differences": [], "wrong_drafts": 0,
    }  # fmt: skip


def test_a_draft_that_differs_is_named_by_request_step_row_and_draft():
    pytest.importorskip("sgl_lowlatency._C")  # the bound is the self-check's
    found = draft_compare.compare([answer(row=1)], [dataclasses.replace(changed(0, (77, 52, 7)), blocks=[
        dataclasses.replace(block, row=1) for block in changed(0, (77, 52, 7)).blocks])], greedy=True)  # fmt: skip
    (problem,) = found.problems()
    assert problem == "drafts differ: request 0, step 0 (row 1 of the batch), draft 0: 51 off, 77 on, best logits 1 apart, rounding explains 0.0625"
    assert found.drafts == 1 + 3 + 3, "what follows a differing draft in its block is not compared"


def test_a_near_tie_of_greedy_logits_is_rounding_and_of_sampled_ones_nothing_is_known():
    pytest.importorskip("sgl_lowlatency._C")
    found = draft_compare.compare([answer()], [changed(1, (8, 44, 56))], greedy=True)
    assert len(found.differences) == 1 and found.wrong == [] and list(found.problems()) == []
    found = draft_compare.compare([answer()], [changed(1, (8, 44, 56))], greedy=False)
    assert [str(wrong) for wrong in found.wrong] == ["request 0, step 1 (row 0 of the batch), draft 1: 55 off, 44 on"]


def test_texts_that_part_are_named_and_blocks_behind_other_tokens_not_compared():
    other = answer([BLOCKS[0], (3, 60, (1, 2, 3)), (4, 61, (9, 9, 9))], [50, 51, 52, 60, 61, 62])
    found = draft_compare.compare([answer()], [other], greedy=True)
    assert list(found.problems()) == ["the served texts part: request 0 at token 3"]
    where = [f"prefix 13, anchor {anchor}, row 0 of 2 {arm}" for anchor, arm in ((53, "off"), (60, "on"))]
    assert (found.blocks, found.uneven) == (1, f"request 0, step 1: drafted behind {', '.join(where)}")


def test_batches_composed_otherwise_are_a_problem_of_their_own():
    found = draft_compare.compare([answer()], [answer(row=1)], greedy=True)
    assert found.blocks == 0 and list(found.problems()) == [
        "request 0, step 0: drafted behind prefix 10, anchor 50, row 0 of 2 off, prefix 10, anchor 50, row 1 of 2 on"
    ]
