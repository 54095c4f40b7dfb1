"""Confidence and reliability against loops."""

import numpy as np
import pytest

from rcir.metrics import confidence, reliability


def looped(values, correct, bins):
    """Recall, count and expected calibration error (mid-points), one query at a time."""
    hits, count = [0] * bins, [0] * bins
    for value, right in zip(values, correct, strict=True):
        number = bins - 1
        while number > 0 and value < number / bins:
            number -= 1
        count[number] += 1
        hits[number] += bool(right)
    recall = [hit / n if n else np.nan for hit, n in zip(hits, count, strict=True)]
    middle = [(number + 0.5) / bins for number in range(bins)]
    error = sum(n * abs(r - m) for n, r, m in zip(count, recall, middle, strict=True) if n)
    return recall, count, error / len(values)


@pytest.mark.parametrize("bins", [1, 4, 10])
def test_reliability_is_that_of_a_loop(bins):
    rng = np.random.default_rng(1)
    # Quarters of eighths: exact in binary, some of them on the borders of bins.
    values = rng.integers(0, 33, 400) / 32 if bins != 10 else rng.random(400)
    correct = rng.random(400) < values
    found = reliability(values, correct, bins)
    recall, count, error = looped(values, correct, bins)
    np.testing.assert_array_equal(found.count, count)
    np.testing.assert_allclose(found.recall, recall)
    assert found.error == pytest.approx(error)
    np.testing.assert_allclose(found.confidence, (np.arange(bins) + 0.5) / bins)


def test_empty_bins_have_no_recall_and_no_say():
    found = reliability(np.array([0.0, 1.0, 1.0]), np.array([False, True, True]))
    assert np.isnan(found.recall[1:9]).all()
    assert found.count.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert found.error == pytest.approx((0.05 + 2 * 0.05) / 3)


def test_a_perfectly_calibrated_uncertainty_has_no_error_beyond_its_bins():
    values = np.random.default_rng(2).random(200_000)
    correct = np.random.default_rng(3).random(200_000) < values
    assert reliability(values, correct).error < 0.01
    assert reliability(1 - values, correct).error > 0.4


def test_confidence_is_scaled_by_the_given_range_and_clipped():
    found = confidence(np.array([1.0, 2.0, 3.0, 5.0, 6.0]), low=2, high=5)
    np.testing.assert_allclose(found, [1, 1, 2 / 3, 0, 0])


def test_a_range_without_width_clips_at_its_only_value():
    found = confidence(np.array([1.9, 2.0, 2.25, 9.0]), low=2, high=2)
    np.testing.assert_allclose(found, [1, 1, 0.75, 0])
