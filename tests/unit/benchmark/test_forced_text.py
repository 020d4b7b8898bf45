"""Texts that the LM head leaves no choice of: the successors, and that a model with such a head follows them by far."""

import dataclasses

import pytest

from benchmark import forced_text, models, oracle, random_weights

torch = pytest.importorskip("torch")
SHAPE = models.Shape(3, 128, 4, 2, 32, 192, 300, 128, 1e-6, False)


def test_every_token_has_one_predecessor_and_texts_repeat():
    following = [forced_text.successor(token, vocab=300, period=16) for token in range(300)]
    assert sorted(following) == list(range(300))
    assert forced_text.text(32, 17, vocab=300, period=16) == [*range(33, 48), 32, 33]
    assert forced_text.text(299, 2, vocab=300, period=16) == [288, 289], "the last group is shorter"


def test_the_head_is_the_predecessors_embedding():
    embedding = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    head = forced_text.head(embedding, 16, gain=3.0)
    assert head.dtype == torch.bfloat16
    torch.testing.assert_close(head[33], embedding[32] * (3.0 / 8))
    torch.testing.assert_close(head[32], embedding[47] * (3.0 / 8))


def test_float32_decides_every_token_of_the_text(tmp_path):
    directory = models.write_model(tmp_path, SHAPE, period=16)
    prompt = [5, 250, 17, 32]
    sequence = prompt + forced_text.text(32, 20, vocab=300, period=16)
    logits = oracle.Oracle(directory, "cpu").logits([sequence[:-1]], [len(prompt) - 1])[0]
    best, second = logits.topk(2, dim=-1).values.T
    assert logits.argmax(dim=-1).tolist() == sequence[len(prompt) :]
    assert (best - second).min() > 5


def test_only_the_head_differs_from_the_plain_model(tmp_path):
    plain, forced = (dict(random_weights.all_weights(models.write_model(tmp_path / str(p), SHAPE, period=p), "cpu")) for p in (None, 16))
    assert [name for name in plain if not torch.equal(plain[name], forced[name])] == ["lm_head.weight"]


def test_a_tied_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tied to the embedding"):
        models.write_model(tmp_path, dataclasses.replace(SHAPE, tied_head=True), period=16)
