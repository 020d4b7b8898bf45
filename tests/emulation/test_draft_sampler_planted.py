"""Bugs planted in draft_sampler: each turns the comparison that must catch it red, and leaves the others as they are."""

import pytest
import torch
from draft_cases import Draft, random_values

from sgl_lowlatency.kernels.decode_step import EmulationOptions

MISSING_AWAIT, SKIPPED_NORM, RING_NO_WAIT, TIE_TO_HIGHER_ID = 2, 6, 9, 15  # dialect::Planted
STALE_NOISE, NOISE_OF_NEXT_ROW, DROPPED_UNIT, UNROUNDED_BIAS, KEPT_LATENTS, EARLY_LATENTS = 27, 28, 29, 31, 32, 33


def draft_of(planted, seed=0, **kwargs):
    kwargs = dict(hidden=192, vocab=640, gamma=5, max_batch=4, num_ranks=2, blocks_per_rank=2) | kwargs
    return Draft(**kwargs, emulation=EmulationOptions(planted=planted, seed=seed))


def problems_of(planted, seeds=1, **kwargs):
    """Of launches under several schedules; a launch that ends itself, as a token that nobody chose makes it, is a problem as well."""
    found = []
    for seed in range(seeds):
        draft = draft_of(planted, seed, **kwargs)
        try:
            found += draft.run(4, draft.inputs(4, seed))
        except (IndexError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_nothing_planted_nothing_found():
    assert problems_of(0, seeds=6) == []


@pytest.mark.parametrize("planted", [STALE_NOISE, NOISE_OF_NEXT_ROW])
def test_other_noise_gives_other_tokens_and_only_to_requests_that_sample(planted):
    found = problems_of(planted)
    assert any(problem.startswith("tokens of rank 0") for problem in found)
    assert problems_of(planted, greedy=True) == []


@pytest.mark.parametrize("planted", [UNROUNDED_BIAS, KEPT_LATENTS])
def test_another_bias_changes_the_step_logits(planted):
    assert any(problem.startswith("step logits of rank 1") for problem in problems_of(planted))


@pytest.mark.parametrize("planted", [MISSING_AWAIT, RING_NO_WAIT, EARLY_LATENTS])
def test_what_is_not_waited_for_is_missed_by_some_schedule(planted):
    assert problems_of(planted, seeds=8) != []


def tied_inputs(draft, temperature=0.0):
    hidden, anchors, at = draft.inputs(4)
    hidden.zero_()
    hidden[torch.arange(20), torch.arange(20)] = 1.0
    return hidden, anchors, at.fill_(temperature)


def tied_draft(planted):
    head = torch.zeros(640, 64, dtype=torch.bfloat16)
    head[:, :20] = random_values(20, 640, 1).T
    return draft_of(planted, hidden=64, norm=False, head=head, biased=False)


def test_ties_to_the_higher_id_are_found():
    assert tied_draft(0).run(4, tied_inputs(tied_draft(0))) == []
    assert any(problem.startswith("tokens") for problem in tied_draft(TIE_TO_HIGHER_ID).run(4, tied_inputs(tied_draft(0))))


def test_columns_that_take_no_part_are_found():
    """The largest logit is in the last columns of the first block's share; the step logits are right all the same."""
    head = torch.zeros(640, 64, dtype=torch.bfloat16)
    head[150, 0] = 30.0
    found = {}
    for planted in (0, DROPPED_UNIT):
        draft = draft_of(planted, hidden=64, norm=False, head=head, biased=False)
        hidden, anchors, at = draft.inputs(4)
        hidden.zero_()
        hidden[:, 0] = 1.0
        found[planted] = draft.run(4, (hidden, anchors, at))
    assert found[0] == []
    assert found[DROPPED_UNIT] and all(problem.startswith("tokens of rank") for problem in found[DROPPED_UNIT])


def test_a_skipped_norm_is_found_by_the_gate():
    for planted, passed in ((0, True), (SKIPPED_NORM, False)):
        draft = draft_of(planted)
        inputs = draft.inputs(4)
        assert draft.run(4, inputs) == []
        assert draft.base_figure(4, inputs).passed is passed
