"""The oracle of draft_sampler is SGLang's own proposal: noise, keys and choice bit by bit, and whole blocks of both kinds of Markov head.

Oracles: kernels/ops/speculative/dspark/markov_sample.py in its torch form, and draft_markov_block with SGLang's heads.
"""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")
from draft_cases import hard_values, random_values, temperatures  # noqa: E402
from sglang.kernels.ops.speculative.dspark import markov_sample  # noqa: E402
from sglang.srt.models.deepseek_v4_dspark import DSparkV4MarkovHead  # noqa: E402
from sglang.srt.models.dspark import VanillaMarkov  # noqa: E402
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_markov_block, draft_noise_key  # noqa: E402

from sgl_lowlatency.reference import draft_sampler as oracle  # noqa: E402

KEY = draft_noise_key(42)


def sglangs_choice(values, at, key, offset, step, step_dtype=torch.float32):
    """(tokens, step logits)."""
    logits = torch.empty(values.shape, dtype=step_dtype)
    tokens = markov_sample.MarkovSampleStep.torch(
        base_logits=values, bias=torch.zeros_like(values), temperatures=at, key=key, offset=torch.tensor([offset]), step=step,
        step_dtype=step_dtype, logits_out=logits,
    )  # fmt: skip
    return tokens, logits


@pytest.mark.parametrize("key", [0, 1, KEY, 2**63 - 1, 0xDEADBEEF])
def test_philox_words(key):
    generator = torch.Generator().manual_seed(key % 1000)
    counters = [torch.randint(0, 2**32, (4096,), generator=generator) for _ in range(4)]
    words = markov_sample._philox(key, *counters)
    assert torch.equal(torch.stack(words), torch.from_numpy(oracle.philox4x32_10(key, *(c.numpy() for c in counters)).astype("int64")))


def test_a_hundred_thousand_random_selections():
    """Of 96 and 133 tokens; most greedy ones tie."""
    checked = 0
    for call in range(52):
        rows, vocab = 2000, (96, 133)[call % 2]
        values, at = random_values(rows, vocab, call), temperatures(rows)
        offset = (0, 1, 2**32 - 1, 2**32, 2**40 + 7)[call % 5]
        tokens, _ = sglangs_choice(values, at, KEY + call, offset, call % 7)
        assert torch.equal(oracle.choose(oracle.keys(values.float(), at, KEY + call, offset, call % 7)), tokens), call
        checked += rows
    assert checked >= 100_000


@pytest.mark.parametrize("vocab", [129280, 32000 + 17, 1000, 36])
def test_ties_infinities_and_nan(vocab):
    names, values = hard_values(vocab)
    for temperature in (0.0, 1e-5, 0.7, 2.0):
        at = torch.full((len(names),), temperature)
        tokens, logits = sglangs_choice(values, at, KEY, 3, 2)
        ours = oracle.choose(oracle.keys(values.float(), at, KEY, 3, 2))
        assert dict(zip(names, ours.tolist())) == dict(zip(names, tokens.tolist()))
        assert torch.equal(logits, values.float()) or bool(values.isnan().any())


def vanilla(vocab, rank):
    torch.manual_seed(3)
    head = VanillaMarkov(vocab_size=vocab, markov_rank=rank).bfloat16()
    return head, head.markov_w1.weight.data, head.markov_w2.weight.data


def deepseek(vocab, rank):
    torch.manual_seed(4)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        head = DSparkV4MarkovHead(vocab_size=vocab, markov_rank=rank, is_dsv41=True)
    finally:
        torch.set_default_dtype(before)
    head.markov_w1 = torch.nn.Embedding(vocab, rank, dtype=torch.bfloat16)  # the same look-up, without a parallel group
    head.markov_w2.weight.data = torch.randn(vocab, rank).bfloat16()
    return head, head.markov_w1.weight.data, head.markov_w2.weight.data


def test_a_greedy_request_alone_of_a_dense_draft(tmp_path):
    """On a GPU SGLang takes a kernel of its own there (MarkovGreedyStep), with bias and sum in fp32: run in Triton's interpreter."""
    vocab, gamma = 600, 3
    _, w1, w2 = vanilla(vocab, 256)
    for weight in (w1, w2):
        weight.copy_(weight.float().mul(8 / weight.float().abs().max()).round().div(16).bfloat16())
    cases = [(random_values(gamma, vocab, seed) / 8 + 8, seed * 7, w1, w2) for seed in range(16)]
    torch.save(cases, tmp_path / "cases.pt")
    done = subprocess.run([sys.executable, Path(__file__).with_name("interpreted_greedy.py"), tmp_path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rounded = []
    for (base, anchor, _, _), tokens in zip(cases, torch.load(tmp_path / "tokens.pt"), strict=True):
        inputs = (base[None], torch.tensor([anchor]), w1, w2, torch.zeros(1))
        assert torch.equal(oracle.propose(*inputs, rounds_bias=False).tokens[0], tokens)
        rounded.append(torch.equal(oracle.propose(*inputs, step_dtype=torch.bfloat16).tokens[0], tokens))
    assert not all(rounded), "rounding decides somewhere"


@pytest.mark.parametrize("make", [vanilla, deepseek])
@pytest.mark.parametrize("greedy", [False, True])
def test_whole_blocks(make, greedy):
    """Weights are rounded to few bits, so that no order of adding matters and the comparison is of bits. Of several requests: one
    greedy one takes another kernel where the head is dense."""
    vocab, rank, batch, gamma = 1000, 256, 7, 5
    head, w1, w2 = make(vocab, rank)
    for weight in (w1, w2):
        weight.copy_(weight.float().mul(4 / weight.float().abs().max()).round().div(4).bfloat16())
    base = random_values(batch * gamma, vocab, 5).view(batch, gamma, vocab)
    anchors, at = torch.arange(batch) * 91, temperatures(batch)
    noise = DraftNoise(key=KEY, offset=torch.tensor([11]))
    step_dtype = head.step_logits_dtype(torch.bfloat16)
    with torch.no_grad():
        tokens, logits = draft_markov_block(
            markov_head=head, base_logits=base, anchor_tokens=anchors, draft_hidden=None, step_temperatures=at, noise=noise,
            tp_sync=types.SimpleNamespace(sync=lambda site, tokens: tokens), greedy_draft=greedy,
        )  # fmt: skip
    ours = oracle.propose(base, anchors, w1, w2, torch.zeros(batch) if greedy else at, KEY, 11, step_dtype)
    assert step_dtype == {vanilla: torch.bfloat16, deepseek: torch.float32}[make]
    assert torch.equal(ours.tokens, tokens)
    assert noise.offset.item() == (11 if greedy else 12)
    if not greedy:
        assert logits.dtype == step_dtype and torch.equal(ours.step_logits, logits)
