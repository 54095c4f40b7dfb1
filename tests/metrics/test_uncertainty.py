"""Measures of an uncertainty: reliability, correlation, sparsification, out-of-distribution."""

from itertools import pairwise

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from rcir.errors import InvalidData
from rcir.metrics import (
    OutOfDistribution,
    confidence,
    kendall_of_pairs,
    kendall_over_bins,
    pearson,
    pearson_over_percentiles,
    reliability,
    reliability_btl_percentile,
    reliability_btl_width,
    reliability_lam,
    reliability_rcir,
    sparsification,
)


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


@pytest.fixture(scope="module")
def measured():
    """Uncertainties exact in binary, some of them equal, and precisions that fall with them."""
    rng = np.random.default_rng(6)
    uncertainty = (64 * rng.gamma(2, size=507)).round() / 64
    precision = np.clip(rng.normal(1 - uncertainty / 5, 0.2), 0, 1)
    return uncertainty, precision


def test_btl_width_agrees_with_a_loop(measured):
    uncertainty, precision = measured
    low, high = 0.5, 4.5
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


def test_btl_percentile_agrees_with_a_loop(measured):
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


def test_rcir_expects_the_upper_edge(measured):
    uncertainty, precision = measured
    hit = precision > 0.6
    found = reliability_rcir(uncertainty, hit, 0.5, 4.5)
    middle = reliability(confidence(uncertainty, 0.5, 4.5), hit)
    np.testing.assert_array_equal(found.accuracy, middle.accuracy)
    np.testing.assert_allclose(found.confidence, np.arange(1, 11) / 10)
    gap = np.abs(middle.accuracy - np.arange(1, 11) / 10)
    assert found.error == pytest.approx(np.average(gap, weights=middle.count))


def test_lam_agrees_with_a_loop():
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


def test_lam_counts_unanimous_votes_and_breaks_ties_by_the_smallest_label():
    found = reliability_lam(np.array([[4, 4], [4, 4]]), np.array([4, 5]))
    assert found.count[9] == 2
    assert found.error == 0.5
    assert np.isnan(found.confidence[:9]).all()
    for order in ([2, 1], [1, 2]):
        assert reliability_lam(np.array(order)[:, None], np.array([1])).accuracy[5] == 1


def looped_tau(values):
    """Minus tau-b of the values' order and the values, pair by pair."""
    pairs = [(i, j) for i in range(len(values)) for j in range(i)]
    signs = [np.sign(values[i] - values[j]) for i, j in pairs]
    return -sum(signs) / np.sqrt(len(pairs) * sum(sign != 0 for sign in signs))


def test_golden_kendall():
    performance = 1 - 0.02 * np.arange(20)
    performance[5] = 0.97
    shuffled = np.random.default_rng(0).permutation(200)
    uncertainty = np.arange(200.0)[shuffled]
    found = kendall_over_bins(uncertainty, np.repeat(performance, 10)[shuffled])
    assert found == pytest.approx(0.9684211, abs=1e-7)


def test_kendall_agrees_with_a_loop():
    rng = np.random.default_rng(1)
    uncertainty = rng.random(611)
    correct = rng.random(611) < 1 - 0.5 * uncertainty
    order = np.argsort(uncertainty)
    of = np.arange(611) * 20 // 611
    means = [correct[order][of == m].mean() for m in range(20)]
    found = kendall_over_bins(uncertainty, correct)
    assert found == pytest.approx(looped_tau(means))
    assert 0 < found < 1


def test_kendall_of_pairs_agrees_with_a_loop():
    rng = np.random.default_rng(2)
    match = np.arange(2000) % 2 == 0
    uncertainty = rng.random(2000)
    score = match + rng.normal(size=2000) * (0.2 + 2 * uncertainty)
    parts = np.array_split(np.argsort(uncertainty), 20)
    precisions = [average_precision_score(match[part], score[part]) for part in parts]
    found = kendall_of_pairs(uncertainty, score, match)
    assert found == pytest.approx(looped_tau(precisions))
    assert found > 0.5


def test_correlation_with_a_constant_is_undefined():
    assert np.isnan(kendall_over_bins(np.arange(40.0), np.ones(40)))
    assert np.isnan(pearson(np.arange(4.0), np.ones(4)))
    assert np.isnan(pearson(np.ones(4), np.arange(4.0)))
    assert np.isnan(pearson_over_percentiles(np.ones(200), np.arange(200.0)))


def test_pearson_agrees_with_numpy():
    rng = np.random.default_rng(3)
    precision = rng.random(400)
    uncertainty = rng.normal(1 - precision, 0.4)
    expected = np.corrcoef(uncertainty, precision)[0, 1]
    assert pearson(uncertainty, precision) == pytest.approx(expected)
    order = np.argsort(precision)
    means = [values[order].reshape(100, 4).mean(axis=1) for values in (uncertainty, precision)]
    found = pearson_over_percentiles(uncertainty, precision)
    assert found == pytest.approx(np.corrcoef(*means)[0, 1])
    assert found < expected < 0


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


def test_golden_areas():
    inside, outside = np.array([0.1, 0.2, 0.35, 0.8]), np.array([0.3, 0.7, 0.9])
    found = OutOfDistribution.of(inside, outside)
    assert found.auroc == pytest.approx(0.75)
    assert found.auprc == pytest.approx(0.7555556, abs=1e-7)
    assert found.auprc_trapezoid == pytest.approx(0.7111111, abs=1e-7)


def test_auroc_is_the_share_of_ordered_pairs_with_ties_as_half():
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 9, 120), rng.integers(3, 12, 80)
    above = outside[:, None] > inside
    same = outside[:, None] == inside
    found = OutOfDistribution.of(inside, outside)
    assert found.auroc == pytest.approx((above + same / 2).mean())
    steps, recalled = 0.0, 0.0
    for level in sorted(set(outside.tolist()), reverse=True):
        hits = (outside >= level).sum()
        recall = hits / len(outside)
        steps += (recall - recalled) * hits / (hits + (inside >= level).sum())
        recalled = recall
    assert found.auprc == pytest.approx(steps)


TWO, THREE = np.arange(2.0), np.arange(3.0)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: reliability(THREE, TWO), "shapes"),
        (lambda: reliability(np.array([0, 1.5]), TWO), "span"),
        (lambda: reliability_btl_width(THREE, TWO, 0, 1), "shapes"),
        (lambda: reliability_btl_width(TWO, np.array([1, np.nan]), 0, 1), "NaN"),
        (lambda: reliability_btl_percentile(THREE, THREE), "10 bins"),
        (lambda: reliability_lam(np.zeros((4, 3), int), np.zeros(2, int)), "shape"),
        (lambda: kendall_over_bins(THREE, TWO), "same"),
        (lambda: kendall_over_bins(THREE, THREE), "20 bins"),
        (lambda: kendall_over_bins(THREE, THREE, bins=1), "two bins"),
        (lambda: kendall_of_pairs(THREE, THREE, np.array([1, 0, 0], bool), bins=2), "pair"),
        (lambda: pearson(THREE, TWO), "same"),
        (lambda: pearson(np.ones(1), np.ones(1)), "two queries"),
        (lambda: pearson_over_percentiles(THREE, THREE), "100 bins"),
        (lambda: sparsification(THREE, TWO), "uncertainty"),
        (lambda: sparsification(TWO, np.array([1, np.nan])), "NaN"),
        (lambda: sparsification(np.zeros(0), np.zeros(0)), "n >= 1"),
        (lambda: OutOfDistribution.of(np.zeros(0), TWO), "inside"),
        (lambda: OutOfDistribution.of(TWO, np.array([np.nan])), "NaN"),
    ],
)
def test_invalid_input_is_refused(call, word):
    with pytest.raises(InvalidData, match=word):
        call()
