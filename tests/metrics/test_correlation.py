"""Correlations against known values, loops and closed forms."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from rcir.errors import InvalidData
from rcir.metrics import kendall_of_pairs, kendall_over_bins, pearson, pearson_over_percentiles


def looped_tau(values):
    """Minus tau-b of the values' order and the values, pair by pair."""
    pairs = [(i, j) for i in range(len(values)) for j in range(i)]
    signs = [np.sign(values[i] - values[j]) for i, j in pairs]
    return -sum(signs) / np.sqrt(len(pairs) * sum(sign != 0 for sign in signs))


def test_a_known_trend():
    performance = 1 - 0.02 * np.arange(20)
    performance[5] = 0.97
    shuffled = np.random.default_rng(0).permutation(200)
    uncertainty = np.arange(200.0)[shuffled]
    found = kendall_over_bins(uncertainty, np.repeat(performance, 10)[shuffled])
    assert found == pytest.approx(0.9684211, abs=1e-7)


def test_kendall_is_that_of_a_loop():
    rng = np.random.default_rng(1)
    uncertainty = rng.random(611)
    correct = rng.random(611) < 1 - 0.5 * uncertainty
    order = np.argsort(uncertainty)
    of = np.arange(611) * 20 // 611
    means = [correct[order][of == m].mean() for m in range(20)]
    found = kendall_over_bins(uncertainty, correct)
    assert found == pytest.approx(looped_tau(means))
    assert 0 < found < 1


def test_kendall_of_pairs_is_that_of_a_loop():
    rng = np.random.default_rng(2)
    match = np.arange(2000) % 2 == 0
    uncertainty = rng.random(2000)
    score = match + rng.normal(size=2000) * (0.2 + 2 * uncertainty)
    parts = np.array_split(np.argsort(uncertainty), 20)
    precisions = [average_precision_score(match[part], score[part]) for part in parts]
    found = kendall_of_pairs(uncertainty, score, match)
    assert found == pytest.approx(looped_tau(precisions))
    assert found > 0.5


def test_a_trend_without_a_change_is_undefined():
    assert np.isnan(kendall_over_bins(np.arange(40.0), np.ones(40)))
    assert np.isnan(pearson(np.arange(4.0), np.ones(4)))
    assert np.isnan(pearson(np.ones(4), np.arange(4.0)))
    assert np.isnan(pearson_over_percentiles(np.ones(200), np.arange(200.0)))


def test_pearson_is_that_of_its_definition():
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


def test_what_has_no_correlation_is_refused():
    three = np.arange(3.0)
    for call in (
        lambda: kendall_over_bins(three, np.zeros(2)),
        lambda: kendall_of_pairs(three, three, np.ones(2, bool)),
        lambda: pearson(three, np.zeros(2)),
        lambda: pearson_over_percentiles(three, np.zeros(2)),
    ):
        with pytest.raises(InvalidData, match="the same n >= 1"):
            call()
    with pytest.raises(InvalidData, match="20 bins of 3 values"):
        kendall_over_bins(three, three)
    with pytest.raises(InvalidData, match="at least two bins"):
        kendall_over_bins(three, three, bins=1)
    with pytest.raises(InvalidData, match="1 of 2 bins hold no matching pair"):
        kendall_of_pairs(np.arange(4.0), np.arange(4.0), np.array([1, 1, 0, 0], bool), bins=2)
    with pytest.raises(InvalidData, match="at least two queries"):
        pearson(np.ones(1), np.ones(1))
    with pytest.raises(InvalidData, match="100 bins of 3 values"):
        pearson_over_percentiles(three, three)
