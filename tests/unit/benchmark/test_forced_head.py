"""Heads of DeepSeek-V4.1's checkpoints that force a text: which tensors are replaced, what they then choose, what is refused."""

import pytest
import torch

from benchmark import forced_head, forced_text
from benchmark.random_weights import LOGIT_STD

VOCAB, HIDDEN, RANK, PERIOD = 40, 512, 64, 8
MARKOV = "mtp.2.markov_head."


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


def successors():
    return [forced_text.successor(token, vocab=VOCAB, period=PERIOD) for token in range(VOCAB)]


def test_the_targets_head_forces_the_text():
    embedding, engram = drawn(VOCAB, HIDDEN), drawn(3, 4)
    given = [("embed.weight", embedding), ("norm.weight", drawn(HIDDEN)), ("head.weight", drawn(VOCAB, HIDDEN)), ("layers.1.engram.embed.weight", engram)]
    found = dict(forced_head.with_forced_heads(given, PERIOD))
    assert list(found) == [name for name, _ in given] and all(found[name] is tensor for name, tensor in given if name != "head.weight")
    noise = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))
    states = (0.5 * embedding + noise) / 1.25**0.5  # normed, a part of it the last token's embedding
    logits = states @ found["head.weight"].T
    assert logits.argmax(1).tolist() == successors()
    others = logits[~torch.eye(VOCAB, dtype=torch.bool)[successors()]]
    assert 0.9 * LOGIT_STD < others.std() < 1.1 * LOGIT_STD


def test_the_drafts_markov_head_foresees_it():
    embedding = drawn(VOCAB, RANK)
    given = [("mtp.0.hc_attn_fn", drawn(2)), (MARKOV + "embed.weight", embedding), (MARKOV + "head.weight", drawn(VOCAB, RANK))]
    found = dict(forced_head.with_forced_heads(given, PERIOD))
    assert (embedding @ found[MARKOV + "head.weight"].T).argmax(1).tolist() == successors()
    assert found["mtp.0.hc_attn_fn"] is given[0][1]


def test_a_head_without_an_embedding_is_refused():
    with pytest.raises(RuntimeError, match="head.weight in front of its embedding"):
        list(forced_head.with_forced_heads([("head.weight", drawn(4, 4)), ("embed.weight", drawn(4, 4))], 2))
    with pytest.raises(RuntimeError, match="neither head.weight nor a markov_head.head.weight"):
        list(forced_head.with_forced_heads([("embed.weight", drawn(4, 4)), ("x", drawn(2))], 2))


def test_sglangs_loader_is_wrapped(monkeypatch):
    loader = pytest.importorskip("sglang.srt.model_loader.loader").DefaultModelLoader
    taken = {}
    monkeypatch.setattr(loader, "load_weights_only", staticmethod(lambda model, weights, device: taken.update(weights)))
    monkeypatch.setenv(forced_head.PERIOD, str(PERIOD))
    forced_head.register()
    given = [("embed.weight", drawn(VOCAB, HIDDEN)), ("head.weight", drawn(VOCAB, HIDDEN))]
    loader.load_weights_only(None, given, "cpu")
    assert torch.equal(taken["head.weight"], dict(forced_head.with_forced_heads(given, PERIOD))["head.weight"])
