"""The oracle accepts what rounding explains and nothing else."""

from __future__ import annotations

import pytest

from sgl_lowlatency.cli.greedy_oracle import Choice, GreedyOracle
from sgl_lowlatency.cli.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory)
    return GreedyOracle(directory)


def greedy(oracle, prompt, num_tokens):
    output = []
    for _ in range(num_tokens):
        exact, _bounds = oracle.logits(prompt, output + [0])
        output.append(int(exact[-1].argmax()))
    return output


def test_its_own_greedy_tokens_are_right(oracle):
    output = greedy(oracle, [3, 4, 5], 6)
    choices = oracle.judge([3, 4, 5], output)
    assert [(choice.index, choice.token, choice.best, choice.gap) for choice in choices] == [
        (index, token, token, 0.0) for index, token in enumerate(output)
    ]
    assert all(choice.is_right for choice in choices)


def test_one_wrong_token_is_the_only_one_called_wrong(oracle):
    """Tokens after a wrong one are judged in its wake, as the server chose them."""
    prompt = [3, 4, 5]
    head = greedy(oracle, prompt, 2)
    exact, _bounds = oracle.logits(prompt, head + [0])
    unlikely = int(exact[-1].argmin())
    output = head + [unlikely] + greedy(oracle, prompt + head + [unlikely], 2)
    assert [choice.is_right for choice in oracle.judge(prompt, output)] == [True, True, False, True, True]


def test_a_near_tie_is_right_and_a_clear_loser_is_not():
    assert Choice(index=0, token=1, best=2, gap=0.1, bound=0.1).is_right
    assert not Choice(index=0, token=1, best=2, gap=0.1001, bound=0.1).is_right
