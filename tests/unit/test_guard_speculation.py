"""What speculative decoding is refused for, in the words an operator reads. Oracle: the exact text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_lowlatency.guard.speculation import speculation_reasons

NGRAM = {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1, "speculative_num_draft_tokens": 4}
STANDALONE = {"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
EAGLE3, DFLASH, DSPARK = (STANDALONE | {"speculative_algorithm": name} for name in ("EAGLE3", "DFLASH", "DSPARK"))
ONLY = "; served are NGRAM, STANDALONE, EAGLE, EAGLE3, DFLASH, DSPARK"


def reasons(max_rows=16, **fields):
    defaults = dict(
        speculative_algorithm=None, speculative_ngram_max_bfs_breadth=10, speculative_eagle_topk=None, speculative_adaptive=False,
        enable_multi_layer_eagle=False, speculative_num_draft_tokens=None, attention_backend="fa3", decode_attention_backend=None,
    )
    return speculation_reasons(SimpleNamespace(**defaults | fields), max_rows=max_rows)


@pytest.mark.parametrize("backend", ["fa3", "fa4", "trtllm_mha"])
@pytest.mark.parametrize("algorithm", [NGRAM, STANDALONE, STANDALONE | {"speculative_algorithm": "EAGLE"}, EAGLE3, DFLASH, DSPARK])
def test_chains_are_served(algorithm, backend):
    assert reasons(**algorithm, attention_backend=backend) == []


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
@pytest.mark.parametrize("algorithm", [STANDALONE, EAGLE3, DFLASH, DSPARK])
def test_a_chain_that_is_one_is_served_where_the_mask_is_read(algorithm, backend):
    assert reasons(**algorithm, attention_backend=backend) == []


def test_without_speculation_nothing_is_asked():
    assert reasons(speculative_num_draft_tokens=99, attention_backend="torch_native") == []


@pytest.mark.parametrize("algorithm", ["UNO", "FROZEN_KV_MTP", "SOMETHING_REGISTERED"])
def test_other_algorithms_are_refused_by_name(algorithm):
    expected = [f"--speculative-algorithm {algorithm} is not served: its verify steps have not been tested{ONLY}"]
    assert reasons(speculative_algorithm=algorithm, speculative_num_draft_tokens=4) == expected


TREE = "drafts would form a tree, and the kernel verifies a chain"
WIDTH = "is not served: a verify step has 2 to 16 tokens a request, and at most 16 in all"
CASES = {
    "breadth": (NGRAM | {"speculative_ngram_max_bfs_breadth": 10}, f"--speculative-ngram-max-bfs-breadth 10 is not 1: {TREE}"),
    "EAGLE3's topk": (EAGLE3 | {"speculative_eagle_topk": 8}, f"--speculative-eagle-topk 8 is not 1: {TREE}"),
    "DFLASH's block": (DFLASH | {"speculative_num_draft_tokens": 32}, f"--speculative-num-draft-tokens 32 {WIDTH}"),
    "DSPARK's adaptive": (
        DSPARK | {"speculative_adaptive": True},
        "--speculative-adaptive is not served: the number of draft tokens would change while the server runs",
    ),
    "topk": (STANDALONE | {"speculative_eagle_topk": 4}, f"--speculative-eagle-topk 4 is not 1: {TREE}"),
    "adaptive": (
        STANDALONE | {"speculative_adaptive": True},
        "--speculative-adaptive is not served: the number of draft tokens would change while the server runs",
    ),
    "multi-layer": (
        STANDALONE | {"enable_multi_layer_eagle": True},
        "--enable-multi-layer-eagle is not served: its verify steps have not been tested",
    ),
    "one draft token": (NGRAM | {"speculative_num_draft_tokens": 1}, f"--speculative-num-draft-tokens 1 {WIDTH}"),
    "too many": (NGRAM | {"speculative_num_draft_tokens": 17}, f"--speculative-num-draft-tokens 17 {WIDTH}"),
    "unknown": (NGRAM | {"speculative_num_draft_tokens": None}, f"--speculative-num-draft-tokens None {WIDTH}"),
    "no verify": (
        STANDALONE | {"attention_backend": "torch_native"},
        "--attention-backend torch_native is not served with speculative decoding, only fa3, fa4, flashinfer, triton, trtllm_mha",
    ),
    "a tree's mask": (
        NGRAM | {"decode_attention_backend": "triton"},
        "--attention-backend triton is not served with NGRAM: it verifies a tree where the drafts' matches part; fa3, fa4, "
        "trtllm_mha verify a chain, as the kernel does",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_unserved_setting_is_one_line(case):
    fields, line = CASES[case]
    assert reasons(**fields) == [line]


def test_all_reasons_come_together():
    fields = STANDALONE | {
        "speculative_eagle_topk": 2, "speculative_adaptive": True, "speculative_num_draft_tokens": 99, "attention_backend": "torch_native"
    }
    assert len(reasons(**fields)) == 4


def test_an_argument_this_sglang_lacks_is_a_reason():
    (reason,) = speculation_reasons(SimpleNamespace(), max_rows=16)
    assert reason.startswith("this SGLang has no server argument 'speculative_algorithm' to check; ")


def test_the_rows_that_are_served_decide_the_draft_tokens():
    assert reasons(**NGRAM | {"speculative_num_draft_tokens": 32}, max_rows=32) == []
    assert "2 to 32 tokens a request" in reasons(**NGRAM | {"speculative_num_draft_tokens": 33}, max_rows=32)[0]
