"""What SGLang gives the ranks of a speculative server to verify, at tp_size 2: the same drafts, each rank's or rank 0's (guard/parallel.py), and where
the auxiliary hidden states of several ranks come from.

Oracle: the wheel's own code.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.speculative import dflash_worker_v2
from sglang.srt.speculative.dspark_components import dspark_draft
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite

from sgl_lowlatency.guard import parallel

DRAFTS = 4


class Group:
    """Rank 1 of a tensor-parallel group of two: what rank 0 broadcasts is 7 everywhere."""

    world_size, rank_in_group = 2, 1

    def __init__(self):
        self.broadcasts = 0

    def broadcast(self, values, src):
        assert src == 0
        values.fill_(7)
        self.broadcasts += 1


@pytest.fixture
def corpora():
    """corpora(**settings) -> two of NGRAM's, as two ranks have them."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    def make(**settings):
        return [NgramCorpus(max_trie_depth=8, min_bfs_breadth=1, max_bfs_breadth=1, draft_token_num=DRAFTS, **settings) for _ in range(2)]

    return make


def drafts_of(corpus, contexts):
    """(tokens, masks) for requests by name."""
    corpus.synchronize()
    tokens, masks = corpus.batch_get(list(contexts), [text[-8:] for text in contexts.values()], [len(text) for text in contexts.values()])
    return tokens.tolist(), masks.tolist()


def test_ngram_drafts_are_a_function_of_the_requests(corpora):
    """Requests come, grow and leave, in a corpus that has to forget: equal counts, matches that part, nodes used again. What follows is the same in
    either corpus, each with a thread and memory of its own."""
    two, texts = corpora(capacity=300), random.Random(1)
    requests, matched = {}, 0
    for step in range(150):
        if step % 10 == 0:
            requests[f"request {step}"] = [texts.randrange(6) for _ in range(9)]
        if len(requests) > 3:
            gone = next(iter(requests))
            del requests[gone]
            for corpus in two:
                corpus.erase_match_state([gone])
        found = [drafts_of(corpus, requests) for corpus in two]
        assert found[0] == found[1], f"step {step}"
        matched += sum(token != 0 for token in found[0][0])
        for text in requests.values():
            text += [texts.randrange(6) for _ in range(texts.randrange(1, DRAFTS))]
        for corpus in two:
            corpus.batch_put([text[-8:] for text in requests.values()])
    assert matched > 400, "drafts of nothing but filling would be equal whatever happens"


@pytest.mark.parametrize("budget", [0, DRAFTS - 1])
def test_a_corpus_that_one_rank_has_first_changes_its_drafts_where_there_is_a_budget(corpora, budget):
    """Why --speculative-ngram-external-sam-budget is refused on several GPUs: each rank loads what is added in a thread of its own."""
    first, second = corpora(external_sam_budget=budget)
    first.load_external_corpus_named("added", [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    contexts = {"request": [1, 2, 3, 4]}
    assert (drafts_of(first, contexts) == drafts_of(second, contexts)) == (budget == 0)
    assert dict((name, served) for name, served, _ in parallel.DRAFTS)["speculative_ngram_external_sam_budget"][0] == 0


@pytest.mark.parametrize(("sites", "follows"), [("all", True), ("init", False), ("rng", False), ("off", False)])
def test_dsparks_ranks_verify_the_tokens_of_rank_0(sites, follows, monkeypatch):
    """Unless SGLANG_SPEC_TP_SYNC takes the broadcast away, which is refused then."""
    monkeypatch.setattr(dspark_draft, "_draft_step", lambda head, tokens, *args, state, **more: (tokens + 1, state))
    group = Group()
    with envs.SGLANG_SPEC_TP_SYNC.override(sites):
        sync = SpecTpSync(group)
    tokens, _ = dspark_draft.draft_markov_block(
        markov_head=SimpleNamespace(init_state=lambda hidden: None), base_logits=torch.zeros(2, 3, 8), anchor_tokens=torch.tensor([1, 2]),
        draft_hidden=None, step_temperatures=torch.zeros(2), noise=None, tp_sync=sync, greedy_draft=True,
    )  # fmt: skip
    assert (tokens == 7).all() == follows and group.broadcasts == (3 if follows else 0)
    cfg = SimpleNamespace(tp_size=2, speculative_algorithm="DSPARK")
    assert (parallel.synchronisation_reasons(cfg, sites) == []) == (sites == "all")


@pytest.mark.parametrize(("sites", "follows"), [("all", True), ("off", False)])
def test_dflashs_ranks_accept_what_rank_0_does(sites, follows, monkeypatch):
    seen = []

    def correct_drafts(*, candidates, target_predict):
        seen.append(target_predict.clone())
        return torch.zeros(len(candidates), dtype=torch.int32), target_predict[:, 0]

    monkeypatch.setattr(dflash_worker_v2, "compute_dflash_correct_drafts_and_bonus", correct_drafts)
    group = Group()
    with envs.SGLANG_SPEC_TP_SYNC.override(sites):
        sync = SpecTpSync(group)
    worker = SimpleNamespace(_selector_sample=None, _tp_sync=sync, block_size=DRAFTS, _use_triton_accept_bonus=False)
    dflash_worker_v2.DFlashWorkerV2._accept_block(
        worker, candidates=torch.zeros(1, DRAFTS, dtype=torch.int64), next_token_logits=torch.eye(DRAFTS, 16), sampling_info=None, draft_input=None,
        prefix_lens=torch.tensor([5]), bs=1,
    )  # fmt: skip
    assert seen[0].tolist() == ([[7] * DRAFTS] if follows else [[0, 1, 2, 3]])


def test_a_servers_ranks_broadcast_at_every_site_by_default():
    sync = SpecTpSync(Group())
    assert envs.SGLANG_SPEC_TP_SYNC.get() == "all" and all(sync.enabled(site) for site in SpecTpSyncSite)


def test_what_a_draft_reads_is_the_whole_stream():
    """SGLang may leave a layer's sum over ranks to the next norm. The stream that it captures has it all the same, made on a copy: what every rank of
    decode_step has whole."""
    from sglang.srt.layers.layer_boundary.layout import SumGroup
    from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
    from sglang.srt.layers.layer_boundary.residual.stream import DeclaredSum, ResidualStream

    partial, others, residual = torch.full((2, 4), 3.0), 10.0, torch.full((2, 4), 0.5)
    stream = ResidualStream(residual)
    owed = DeclaredSum(next(iter(SumGroup)), lambda value: value.add_(others))
    handle = stream.record(partial, PLAIN_ADD, declared_sum=owed)
    assert torch.equal(stream.snapshot(handle), partial + others + residual)
    assert (partial == 3.0).all() and stream.pending.owed is owed, "the layer behind still makes its own sum"
