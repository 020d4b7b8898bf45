"""The oracle of draft_sampler against what is known without SGLang: Philox's published answers, and the distribution that it samples."""

import numpy as np
import pytest
import torch
from draft_cases import hard_values

from sgl_lowlatency.reference import draft_sampler as oracle

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("key", "counters", "words"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ONES << 32 | ONES, (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0 << 32 | 0xA4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(key, counters, words):
    """Random123's kat_vectors, philox4x32 with 10 rounds."""
    assert tuple(int(w) for w in oracle.philox4x32_10(key, *(np.array(c) for c in counters))) == words


def test_the_rules_of_choice():
    names, values = hard_values(100)
    wanted = {
        "all equal": 0, "maxima first and last": 0, "maxima middle and last": 50, "last alone": 99, "zeros of both signs": 1,
        "negative zero last": 50, "+inf twice": 50, "+inf and NaN": 50, "NaN last": 99, "NaN twice": 50, "all NaN": 0, "all -inf": 0,
        "-inf but one": 99, "-inf and NaN": 50, "largest finite": 50, "subnormal": 99,
    }  # fmt: skip
    assert dict(zip(names, oracle.choose(values.float()).tolist())) == wanted


def test_samples_are_distributed_as_the_softmax_of_the_step_logits():
    """Chi-square over 40,000 draws of one distribution, a row and an offset each: below the 99.9 % point of its 11 degrees of freedom."""
    logits, temperature, rows, draws = torch.linspace(-2, 2, 12), 0.8, 400, 100
    counts = torch.zeros(12)
    for offset in range(draws):
        keys = oracle.keys(logits.expand(rows, 12), torch.full((rows,), temperature), 77, offset, 1)
        counts += torch.bincount(oracle.choose(keys), minlength=12)
    expected = torch.softmax(logits / temperature, 0) * rows * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.3


def test_steps_follow_each_other():
    """Each step's bias is of the token before: a chain that can be read off."""
    vocab, rank = 64, 256
    w1, w2 = torch.zeros(vocab, rank), torch.zeros(vocab, rank)
    successor = (torch.arange(vocab) * 5 + 3) % vocab
    w1[torch.arange(vocab), torch.arange(vocab)] = 1.0
    w2[successor, torch.arange(vocab)] = 10.0
    proposal = oracle.propose(torch.zeros(2, 4, vocab).bfloat16(), torch.tensor([1, 7]), w1.bfloat16(), w2.bfloat16(), torch.zeros(2))
    chain, at = [], torch.tensor([1, 7])
    for _ in range(4):
        at = successor[at]
        chain.append(at)
    assert torch.equal(proposal.tokens, torch.stack(chain, 1))
    assert torch.equal(proposal.step_logits.amax(-1), torch.full((2, 4), 10.0))
