import pytest

from sgl_lowlatency.bench import stats


def test_ratio_is_of_medians():
    assert stats.ratio([5.0, 9.0, 5.2], [2.6, 2.5, 100.0]) == pytest.approx(5.2 / 2.6)


def test_quantile_interpolates():
    assert stats.quantile([4, 1, 3, 2], 0.5) == pytest.approx(2.5)
    assert stats.quantile([1, 2, 3], 0.0) == 1
    assert stats.quantile([1, 2, 3], 1.0) == 3


def test_spread():
    assert stats.spread([2.0, 2.2, 1.9]) == pytest.approx(0.15)


def test_interval_holds_the_ratio_and_widens_with_noise():
    quiet = stats.ratio_ci95([5.0, 5.01, 4.99], [2.5, 2.51, 2.5])
    noisy = stats.ratio_ci95([5.0, 6.0, 4.0], [2.5, 3.5, 2.0])
    assert quiet[0] <= 2.0 <= quiet[1]
    assert noisy[1] - noisy[0] > 10 * (quiet[1] - quiet[0])


def test_a_drift_common_to_both_arms_stays_out_of_the_interval():
    off = [5.0, 6.0, 7.0, 8.0]
    low, high = stats.ratio_ci95(off, [x / 2 for x in off])
    assert (low, high) == (pytest.approx(2.0), pytest.approx(2.0))


def test_interval_is_repeatable():
    assert stats.ratio_ci95([1.0, 1.1, 1.2], [0.5, 0.6]) == stats.ratio_ci95([1.0, 1.1, 1.2], [0.5, 0.6])
