"""The routing oracle against torch's softmax and topk where those are unambiguous, and against the definitions where they are not."""

import math

import pytest
import torch
from routing_cases import hard_logits, random_logits

from sgl_lowlatency.reference import routing


@pytest.mark.parametrize("renormalizes", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 1), (128, 8), (384, 6)])
def test_choices_are_torchs_where_nothing_ties(num_experts, top_k, renormalizes):
    logits = random_logits(16, num_experts, 1).double()
    weights, ids = logits.softmax(-1).topk(top_k, -1)
    if renormalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    choices = routing.choose(logits, top_k, renormalizes)
    assert torch.equal(choices.ids, ids)
    torch.testing.assert_close(choices.weights, weights, rtol=1e-13, atol=0)


def test_the_rules_of_choice_row_by_row():
    names, logits = hard_logits(8)
    ids = dict(zip(names, routing.choose(logits, 4, True).ids.tolist(), strict=True))
    assert ids["all equal"] == ids["all -inf"] == ids["all +inf"] == ids["all NaN"] == [0, 1, 2, 3]
    assert ids["few values"] == [2, 5, 1, 4]
    assert ids["one finite"] == [7, 0, 1, 2]
    assert ids["one +inf"][0] == 4
    assert 0 not in ids["one NaN"]
    assert ids["NaN and -inf"] == [0, 2, 4, 6]
    assert ids["below NaN"] == [1, 3, 5, 7]
    assert ids["NaN's own rank"] == [0, 1, 2, 3]
    assert ids["ascending"] == ids["subnormal"] == [7, 6, 5, 4] and ids["descending"] == [0, 1, 2, 3]


def test_weights_of_rows_that_are_not_finite():
    names, logits = hard_logits(8)
    for renormalizes in (True, False):
        weights = dict(zip(names, routing.choose(logits, 4, renormalizes).weights.tolist(), strict=True))
        for name in ("all -inf", "one +inf", "all +inf", "one NaN", "all NaN", "NaN and -inf", "below NaN", "NaN's own rank"):
            assert all(map(math.isnan, weights[name])), name
        assert weights["one finite"] == [1.0, 0.0, 0.0, 0.0]
        assert weights["all equal"] == [0.25 if renormalizes else 0.125] * 4


def test_rows_that_are_not_live_choose_nothing():
    choices = routing.choose(random_logits(3, 16, 2), 2, True, num_live_rows=1)
    assert choices.ids[0].min() >= 0 and choices.ids[1:].tolist() == [[-1, -1]] * 2
    assert choices.weights[0].sum() == pytest.approx(1.0) and choices.weights[1:].tolist() == [[0.0, 0.0]] * 2


def test_places_of_a_small_example():
    places = routing.place(torch.tensor([[5, 2], [2, -1], [7, 5], [7, 7]]), 8)
    assert places.row_bits == [0, 0, 0b0011, 0, 0, 0b0101, 0, 0b1100]
    assert places.experts == [2, 5, 7] and places.num_rows == [2, 2, 2]
    assert places.places == [[1, 0], [0, -1], [2, 1], [2, 2]]


@pytest.mark.parametrize("bad", [-2, 8])
def test_an_id_that_no_expert_has(bad):
    with pytest.raises(ValueError, match=f"^row 1 has expert {bad}, outside -1..7$"):
        routing.place(torch.tensor([[0], [bad]]), 8)


def test_alignment_of_the_example_in_sglangs_documentation():
    """moe_align_block_size's own docstring, whose experts count from 1."""
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]])
    tokens, blocks = routing.aligned(ids, 5, 4)
    assert tokens == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12] and blocks == [1, 2, 3, 4]
    tokens, blocks = routing.aligned(torch.tensor([[-1, 0], [0, 0]]), 1, 2)
    assert tokens == [0, 4, 1, 2, 3, 4] and blocks == [-1, 0, 0]
