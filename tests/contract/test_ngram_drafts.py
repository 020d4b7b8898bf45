"""NGRAM's drafts at breadth 1 are no chain where matches part or end: why its mask must not be read (guard/speculation.py).

Oracle: SGLang's own corpus, which it compiles at first use.
"""

import numpy as np
import pytest

DRAFTS = 4  # the last accepted token and three that follow it


@pytest.fixture
def drafts():
    """drafts(texts, context) -> (tokens [DRAFTS], mask [DRAFTS, DRAFTS]: what each sees of the others)."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    def match(texts, context):
        corpus = NgramCorpus(max_trie_depth=18, min_bfs_breadth=1, max_bfs_breadth=1, draft_token_num=DRAFTS)
        for text in texts:
            corpus.batch_put([text])
        corpus.synchronize()
        tokens, mask = corpus.batch_get(["request"], [context], [len(context)])
        return tokens.tolist(), np.asarray(mask).reshape(DRAFTS, DRAFTS).tolist()

    return match


def test_one_long_match_is_a_chain(drafts):
    assert drafts([[1, 2, 3, 4, 5, 6]], [1, 2, 3]) == ([3, 4, 5, 6], np.tri(DRAFTS, dtype=int).tolist())


def test_a_match_that_ends_is_filled_up_with_a_token_that_follows_the_first(drafts):
    tokens, mask = drafts([[1, 2, 3, 4, 5]], [1, 2, 3])
    assert tokens == [3, 4, 5, 0]
    assert mask[3] == [1, 0, 0, 1], "its position is the second token's"


def test_matches_that_part_are_branches(drafts):
    tokens, mask = drafts([[1, 2, 3, 4], [5, 3, 7, 8]], [1, 2, 3])
    assert sorted(tokens[1:3]) == [4, 7], "the longer match says 4, the shorter one 7"
    assert mask[1] == [1, 1, 0, 0] and mask[2] == [1, 0, 1, 0], "both follow the first token"
