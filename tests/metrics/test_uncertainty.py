"""Measures of an uncertainty: reliability, correlation, sparsification, out-of-distribution."""

from itertools import pairwise

import numpy as np
import pytest

from rcir.errors import InvalidData
from rcir.metrics import confidence, reliability, sparsification


def looped_reliability(values, correct, bins):
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
def test_reliability_agrees_with_a_loop(bins):
    rng = np.random.default_rng(1)
    # Exact in binary, some of them on the borders of bins.
    values = rng.integers(0, 33, 400) / 32 if bins != 10 else rng.random(400)
    correct = rng.random(400) < values
    found = reliability(values, correct, bins)
    recall, count, error = looped_reliability(values, correct, bins)
    np.testing.assert_array_equal(found.count, count)
    np.testing.assert_allclose(found.accuracy, recall)
    assert found.error == pytest.approx(error)
    np.testing.assert_allclose(found.confidence, (np.arange(bins) + 0.5) / bins)


def test_empty_bins_have_no_accuracy_and_do_not_count():
    found = reliability(np.array([0.0, 1.0, 1.0]), np.array([False, True, True]))
    assert np.isnan(found.accuracy[1:9]).all()
    assert found.count.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert found.error == pytest.approx((0.05 + 2 * 0.05) / 3)


def test_confidence_is_scaled_to_a_range_and_clipped():
    found = confidence(np.array([1.0, 2.0, 3.0, 5.0, 6.0]), low=2, high=5)
    np.testing.assert_allclose(found, [1, 1, 2 / 3, 0, 0])
    found = confidence(np.array([1.9, 2.0, 2.25, 9.0]), low=2, high=2)  # a range without width
    np.testing.assert_allclose(found, [1, 1, 0.75, 0])


def looped_curve(uncertainty, performance):
    """The curve and its area, one percent at a time."""
    order = sorted(range(len(uncertainty)), key=lambda i: (-uncertainty[i], i))
    curve = [
        sum(rest := [performance[i] for i in order[len(order) * r // 100 :]]) / len(rest)
        for r in range(99)
    ]
    return curve, sum((a + b) / 2 for a, b in pairwise(curve)) / 98


@pytest.mark.parametrize("n", [1, 7, 100, 733])
def test_sparsification_agrees_with_a_loop(n):
    rng = np.random.default_rng(n)
    uncertainty, performance = rng.integers(0, 40, n) / 8, rng.random(n)
    found = sparsification(uncertainty, performance)
    curve, area = looped_curve(uncertainty, performance)
    np.testing.assert_allclose(found.curve, curve)
    assert found.ausc == pytest.approx(area)
    best, most = looped_curve(-performance, performance)
    np.testing.assert_allclose(found.oracle_curve, best)
    assert found.oracle == pytest.approx(most)
    assert found.random == pytest.approx(performance.mean())
    np.testing.assert_allclose(found.fractions, np.arange(99) / 100)


def test_a_better_order_has_a_larger_sparsification_area():
    rng = np.random.default_rng(1)
    chance = rng.random(5000)
    right = rng.random(5000) < chance
    good, none = sparsification(1 - chance, right), sparsification(rng.random(5000), right)
    assert good.oracle > good.ausc > none.ausc + 0.1
    assert none.ausc == pytest.approx(none.random, abs=0.03)
    assert sparsification(chance, right).ausc < none.ausc - 0.1


TWO, THREE = np.arange(2.0), np.arange(3.0)


@pytest.mark.parametrize(
    ("measure", "first", "second", "word"),
    [
        (reliability, THREE, TWO, "shapes"),
        (reliability, np.array([0, 1.5]), TWO, "span"),
        (reliability, TWO, np.array([1, np.nan]), "NaN"),
        (sparsification, THREE, TWO, "uncertainty"),
        (sparsification, TWO, np.array([1, np.nan]), "NaN"),
        (sparsification, np.zeros(0), np.zeros(0), "n >= 1"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_invalid_input_is_refused(measure, first, second, word):
    with pytest.raises(InvalidData, match=word):
        measure(first, second)


@pytest.mark.parametrize("n", [7, 100])
def test_bins_of_equal_mass_hold_as_many_values_at_their_mean(n):
    rng = np.random.default_rng(n)
    values, correct = rng.uniform(size=n) ** 3, rng.uniform(size=n) < 0.5
    found = reliability(values, correct, bins=5, equal_mass=True)
    assert np.ptp(found.count) <= 1
    order, start, error = np.argsort(values), 0, 0.0
    for middle, accuracy, count in zip(found.confidence, found.accuracy, found.count, strict=True):
        rows = order[start : (start := start + count)]
        assert (middle, accuracy) == pytest.approx((values[rows].mean(), correct[rows].mean()))
        error += abs((values[rows] - correct[rows]).sum()) / n
    assert found.error == pytest.approx(error)
