"""What NGRAM drafts from, as benchmark/serve/ngram_ab.py relies on it: the generated text since the last flush, and nothing else.

Oracle: SGLang's own corpus, asked and fed as its worker does (NGRAMWorker._prepare_draft_tokens, _update_ngram_corpus).
"""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark import forced_text  # noqa: E402

DRAFTS, DEPTH, VOCAB, PERIOD = 4, 18, 4096, 64


@pytest.fixture
def corpus():
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    return NgramCorpus(max_trie_depth=DEPTH, min_bfs_breadth=1, max_bfs_breadth=1, draft_token_num=DRAFTS)


def verify_steps(corpus, name, prompt, count):
    """Verify steps until `count` tokens of the forced text are there; prefill gives the first."""
    text, steps = [*prompt, forced_text.successor(prompt[-1], vocab=VOCAB, period=PERIOD)], 0
    while len(text) < len(prompt) + count:
        corpus.synchronize()
        drafts, _ = corpus.batch_get([name], [text[-DEPTH:]], [len(text)])
        corpus.batch_put([text[-DEPTH:]])
        accepted = 1
        while accepted < DRAFTS and drafts[accepted] == forced_text.successor(int(drafts[accepted - 1]), vocab=VOCAB, period=PERIOD):
            accepted += 1
        text += forced_text.text(text[-1], accepted, vocab=VOCAB, period=PERIOD)
        steps += 1
    corpus.synchronize()  # a thread of the corpus inserts what was put: one that is late would fill it again behind a reset
    corpus.erase_match_state([name])
    return steps


def test_drafts_are_accepted_from_the_second_period_on(corpus):
    steps = verify_steps(corpus, "a", [3000, 77, 64], 272)
    assert PERIOD + (272 - PERIOD) / DRAFTS <= steps + 2 <= PERIOD + (272 - PERIOD) / DRAFTS + 4


def test_a_flush_makes_the_second_generation_the_first_again(corpus):
    first = verify_steps(corpus, "a", [3000, 77, 64], 272)
    assert verify_steps(corpus, "b", [3000, 77, 64], 272) < first - 40, "what was seen is drafted from the first token on"
    corpus.reset()
    assert verify_steps(corpus, "c", [3000, 77, 64], 272) == first


def test_another_text_changes_nothing(corpus):
    alone = verify_steps(corpus, "a", [3000, 77, 64], 272)
    assert verify_steps(corpus, "b", [9, 10, 128], 272) == alone


def method(path, name):
    """The source of the one method called `name` in a file of SGLang, which may not be importable without a GPU."""
    source = (Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / path).read_text()
    (found,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name]
    return ast.get_source_segment(source, found)


def test_a_flush_of_the_server_resets_the_corpus():
    assert "self.draft_worker.clear_cache_pool()" in method("srt/managers/scheduler.py", "flush_cache")
    assert "self.ngram_corpus.reset()" in method("srt/speculative/ngram_worker.py", "clear_cache_pool")
