"""Pairs that would not end in time are not begun. Oracle: a clock that the test sets."""

import pytest

from benchmark.agentic import budget
from benchmark.agentic.budget import Budget


@pytest.fixture
def left(monkeypatch):
    """Sets the seconds left of the limit."""
    return lambda seconds: monkeypatch.setattr(budget.deadline, "remaining", lambda limit_s: seconds)


def test_a_pair_like_one_before_is_begun_if_it_would_end_in_time(left):
    made = Budget(400.0)
    made.took("replay", 1, 10.0)
    made.took("replay", 8, 20.0)
    left(budget.RESERVE_S + budget.MARGIN * 10.0 + 0.1)
    assert made.fits("replay", 1) and not made.fits("replay", 8)
    assert not made.fits("replay", 4)  # not seen yet: as long as the longest
    assert made.fits("fixed-length", 1)  # nothing of it was seen
    left(budget.RESERVE_S - 0.1)
    assert not made.fits("fixed-length", 1)


def test_without_a_limit_everything_fits():
    made = Budget(None)
    made.took("replay", 1, 1e9)
    assert made.fits("replay", 1)
