import pytest

from benchmark.serve import tokens
from benchmark.serve.client import Reply


def reply(ids, top=None):
    top = top if top is not None else [[(-0.1, i), (-2.0, i + 1)] for i in ids]
    return Reply(ids=ids, logprobs=[t[0][0] for t in top], top=top, finish="length", cached=0)


def test_first_difference():
    assert tokens.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert tokens.first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert tokens.first_difference([1, 2, 3], [1, 2]) == 2


def test_a_near_tie_is_forgiven_and_a_decided_token_is_not():
    off = reply([5, 6, 7], [[(-0.1, 5)], [(-1.00, 6), (-1.02, 8)], [(-0.2, 7)]])
    near, far = reply([5, 8, 1]), reply([5, 9, 1])
    verdict = tokens.judge([[1]], [off], [near], bound=0.1)
    assert len(verdict.differences) == 1 and not verdict.wrong
    assert verdict.differences[0].off_margin == pytest.approx(0.02)
    assert verdict.compared == 2
    verdict = tokens.judge([[1]], [off], [far], bound=0.1)  # 9 is not among the best: no known margin excuses it
    assert [d.on_id for d in verdict.wrong] == [9]


def test_a_lost_token_is_an_error_not_a_difference():
    with pytest.raises(ValueError, match="3 tokens from the standard path, 2 from the plugin"):
        tokens.judge([[1]], [reply([5, 6, 7])], [reply([5, 6])], bound=0.1)


def test_path_error_reads_agreed_positions_only():
    off = reply([5, 6], [[(-0.10, 5), (-3.0, 4)], [(-0.5, 6)]])
    on = reply([5, 7], [[(-0.13, 5), (-3.2, 4)], [(-9.5, 6)]])
    assert tokens.path_error([off], [on]) == pytest.approx(0.2)


def test_a_parted_text_is_taken_up_behind_the_standard_token():
    off = reply([5, 6, 7, 8], [[(-0.1, 5)], [(-1.0, 6), (-1.0, 9)], [(-0.1, 7)], [(-0.1, 8), (-5.0, 3)]])

    class Resumed:
        asked = None

        def generate(self, prompts, params, top=0):
            Resumed.asked = (prompts, [p["max_new_tokens"] for p in params])
            return [reply([7, 3])]

    verdict = tokens.judge([[1, 2]], [off], [reply([5, 9, 0, 0])], bound=0.5, client=Resumed(), rounds=1)
    assert Resumed.asked == ([[1, 2, 5, 6]], [2])
    assert [(d.position, d.on_id) for d in verdict.differences] == [(1, 9), (3, 3)]
    assert [d.position for d in verdict.wrong] == [3]
    assert verdict.compared == 4


class TwoTokenOracle:
    """Logits over a vocabulary of four that prefer token 1 by `margin` over token 2, everywhere."""

    def __init__(self, margin):
        self.margin = margin

    def logits(self, sequences, first):
        torch = pytest.importorskip("torch")
        return [
            torch.tensor([[0.0, self.margin, 0.0, -5.0]]).repeat(len(s) - f, 1) for s, f in zip(sequences, first, strict=True)
        ]


@pytest.mark.parametrize(("margin", "wrong"), [(0.3, 0), (0.5, 1)])
def test_float32_decides_with_twice_the_standard_paths_error(margin, wrong):
    torch = pytest.importorskip("torch")
    exact = torch.tensor([0.0, margin, 0.0, -5.0]).log_softmax(0).tolist()
    off = reply([1], [[(exact[1] + 0.2, 1), (exact[2], 2)]])  # its own error: 0.2, so the bound is 0.4
    verdict = tokens.judge([[0]], [off], [reply([2], [[(exact[2], 2)]])], oracle=TwoTokenOracle(margin))
    assert verdict.bound == pytest.approx(0.4, abs=1e-5)
    assert verdict.differences[0].fp32_margin == pytest.approx(margin, abs=1e-5)
    assert len(verdict.wrong) == wrong
