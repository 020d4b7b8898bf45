"""Routers' logits that are kept of one forward and given to another."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from benchmark.kernels import same_experts  # noqa: E402


class Gate(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.e_score_correction_bias = torch.tensor(bias)

    def forward(self, x, allocator=None):
        return x * 2


@pytest.fixture
def layers():
    topk = SimpleNamespace(topk_config=SimpleNamespace(top_k=1))
    return [SimpleNamespace(mlp=SimpleNamespace(gate=Gate(bias), topk=topk)) for bias in ([0.0, 0.0, 0.0], [0.0, 0.0, 9.0])]


def said(layers, x):
    return [layer.mlp.gate(x, None) for layer in layers]


X, OTHER = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]), torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])


def test_the_last_word_of_each_router_is_kept_and_given(layers):
    running = SimpleNamespace(router_logits=None)
    with same_experts.kept_logits(layers, running) as kept:
        assert running.router_logits is kept
        said(layers, torch.zeros(2, 3)), said(layers, X)
    assert running.router_logits is None and [torch.equal(kept[i], 2 * X) for i in (0, 1)] == [True, True]
    with same_experts.given_logits(layers, kept) as own:
        assert all(torch.equal(logits, 2 * X) for logits in said(layers, OTHER))
    assert all(torch.equal(own[i], 2 * OTHER) for i in (0, 1))
    assert all(torch.equal(logits, 2 * OTHER) for logits in said(layers, OTHER)), "routers are their own again"
    assert same_experts.others_chosen(layers, own, kept) == 0.25, "one row of two, of the layer whose bias does not decide"


def test_routers_that_were_not_kept_or_have_other_rows(layers):
    with pytest.raises(ValueError, match=r"no router ran in layers \[1\]"), same_experts.given_logits(layers, {0: X}):
        raise AssertionError("not entered")
    with pytest.raises(RuntimeError, match=r"layer 0: the router's logits are \[1, 3\], those kept \[2, 3\]"):
        with same_experts.given_logits(layers, {0: X, 1: X}):
            said(layers, X[:1])
    assert "forward" not in layers[0].mlp.gate.__dict__, "routers are their own behind an error"
