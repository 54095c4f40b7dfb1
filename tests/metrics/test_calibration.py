"""Confidence and reliability against loops."""

import numpy as np
import pytest

from rcir.errors import InvalidData
from rcir.metrics import (
    confidence,
    reliability,
    reliability_btl_percentile,
    reliability_btl_width,
    reliability_lam,
    reliability_rcir,
)


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
    np.testing.assert_allclose(found.accuracy, recall)
    assert found.error == pytest.approx(error)
    np.testing.assert_allclose(found.confidence, (np.arange(bins) + 0.5) / bins)


def test_empty_bins_have_no_recall_and_no_say():
    found = reliability(np.array([0.0, 1.0, 1.0]), np.array([False, True, True]))
    assert np.isnan(found.accuracy[1:9]).all()
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


@pytest.fixture(scope="module")
def measured():
    """Uncertainties, with some alike, and precisions that fall with them."""
    rng = np.random.default_rng(6)
    uncertainty = rng.gamma(2, size=507).round(2)
    precision = np.clip(rng.normal(1 - uncertainty / 5, 0.2), 0, 1)
    return uncertainty, precision


def test_btl_width_is_that_of_a_loop(measured):
    uncertainty, precision = measured
    low, high = 0.5, 4.0
    sums, count = [0.0] * 10, [0] * 10
    for u, value in zip(uncertainty, precision, strict=True):
        certain = min(max(1 - (u - low) / (high - low), 0), 1)
        number = min(int(certain * 10), 9)
        sums[number] += value
        count[number] += 1
    expected = sum(abs(sums[m] - count[m] * (m + 0.5) / 10) for m in range(10)) / len(uncertainty)
    found = reliability_btl_width(uncertainty, precision, low, high)
    assert found.count.tolist() == count
    np.testing.assert_allclose(found.accuracy, np.divide(sums, count))
    assert found.error == pytest.approx(expected)


def test_btl_percentile_is_that_of_a_loop(measured):
    uncertainty, precision = measured
    by_rank = sorted(range(len(uncertainty)), key=lambda i: (uncertainty[i], i))
    groups = [[] for _ in range(10)]
    for rank, query in enumerate(by_rank):
        groups[rank * 10 // len(by_rank)].append(precision[query])
    gaps = [
        len(group) * abs(np.mean(group) - (1 - (m - 0.5) / 10)) for m, group in enumerate(groups, 1)
    ]
    found = reliability_btl_percentile(uncertainty, precision)
    assert found.error == pytest.approx(sum(gaps) / len(uncertainty))
    np.testing.assert_allclose(found.accuracy, [np.mean(group) for group in groups[::-1]])
    assert set(found.count) == {50, 51}


def test_only_the_order_counts_for_percentiles(measured):
    uncertainty, precision = measured
    found = reliability_btl_percentile(np.exp(uncertainty), precision)
    assert found.error == reliability_btl_percentile(uncertainty, precision).error


def test_rcir_expects_the_upper_edge(measured):
    uncertainty, precision = measured
    hit = precision > 0.6
    found = reliability_rcir(uncertainty, hit, 0.5, 4.0)
    middle = reliability(confidence(uncertainty, 0.5, 4.0), hit)
    np.testing.assert_array_equal(found.accuracy, middle.accuracy)
    np.testing.assert_allclose(found.confidence, np.arange(1, 11) / 10)
    gap = np.abs(middle.accuracy - np.arange(1, 11) / 10)
    assert found.error == pytest.approx(np.average(gap, weights=middle.count))


def test_lam_is_that_of_a_loop():
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 12, 300) * 3
    votes = np.where(
        rng.random((20, 300)) < rng.random(300), labels, rng.integers(0, 12, (20, 300))
    )
    found = reliability_lam(votes, labels)
    right, sure, count = [0] * 10, [0.0] * 10, [0] * 10
    for column, label in zip(votes.T.tolist(), labels, strict=True):
        winner = min(set(column), key=lambda vote: (-column.count(vote), vote))
        share = column.count(winner) / 20
        number = min(column.count(winner) * 10 // 20, 9)
        right[number] += winner == label
        sure[number] += share
        count[number] += 1
    assert found.count.tolist() == count
    for number in filter(count.__getitem__, range(10)):
        assert found.accuracy[number] == pytest.approx(right[number] / count[number])
        assert found.confidence[number] == pytest.approx(sure[number] / count[number])
    error = sum(abs(a - b) for a, b in zip(right, sure, strict=True)) / 300
    assert found.error == pytest.approx(error)


def test_lam_counts_the_votes_that_agree_fully():
    found = reliability_lam(np.array([[4, 4], [4, 4]]), np.array([4, 5]))
    assert found.count[9] == 2
    assert found.error == 0.5
    assert np.isnan(found.confidence[:9]).all()


@pytest.mark.parametrize("order", [[2, 1], [1, 2]])
def test_the_smallest_label_wins_a_tied_vote(order):
    assert reliability_lam(np.array(order)[:, None], np.array([1])).accuracy[5] == 1


def test_what_has_no_reliability_is_refused():
    three, two = np.zeros(3), np.zeros(2)
    for call in (
        lambda: reliability(three, two),
        lambda: reliability_btl_width(three, two, 0, 1),
        lambda: reliability_btl_percentile(three, two),
        lambda: reliability_rcir(three, two, 0, 1),
    ):
        with pytest.raises(InvalidData, match=r"shapes are .*\(3,\).*\(2,\)"):
            call()
    with pytest.raises(InvalidData, match="average_precision are NaN"):
        reliability_btl_width(two, np.array([1, np.nan]), 0, 1)
    with pytest.raises(InvalidData, match="10 bins of 3 values"):
        reliability_btl_percentile(three, three)
    with pytest.raises(InvalidData, match=r"confidences span 0 to 1\.5"):
        reliability(np.array([0, 1.5]), two)
    with pytest.raises(InvalidData, match="votes have shape"):
        reliability_lam(np.zeros((4, 3), int), np.zeros(2, int))
