"""Drift of queries: the wealth by a naive derivation, whatever the batches, and what is refused."""

import numpy as np
import pytest

from rcir.errors import InvalidData, InvalidRiskLevel
from rcir.risk import DriftMonitor


def naive_wealth(calibration, values, seed):
    """(m, f) wealth: a simple jumper starts before each query, with a share of the money."""
    uniform = np.random.default_rng(seed).uniform(size=values.shape)
    m, n_features = values.shape
    wealth = np.empty((m, n_features))
    for feature in range(n_features):
        p_values = []
        for row in range(m):
            seen = [*calibration[:, feature], *values[:row, feature]]
            below = sum(value < values[row, feature] for value in seen)
            ties = sum(value == values[row, feature] for value in seen)
            p_values.append((below + uniform[row, feature] * (ties + 1)) / (len(seen) + 1))
        reserve = [1.0, *(0.25 / (1 + np.log(np.arange(1, m + 1))))]
        for last in range(m):
            total = reserve[last + 1]
            for start in range(last + 1):
                bets = np.full(3, (reserve[start] - reserve[start + 1]) / 3)
                for p_value in p_values[start : last + 1]:
                    bets = 0.99 * bets + 0.01 * bets.mean()
                    bets = bets * (1 + np.array([-1, 0, 1]) * (p_value - 0.5))
                total += bets.sum()
            wealth[last, feature] = total
    return wealth


def test_the_wealth_is_that_of_jumpers_that_start_at_each_query():
    rng = np.random.default_rng(0)
    calibration = np.column_stack([rng.normal(size=30), rng.integers(3, size=30)])
    values = np.column_stack([rng.normal(1, size=70), rng.integers(3, size=70)])
    expected = np.maximum.accumulate(np.append(1, naive_wealth(calibration, values, 5).mean(1)))
    whole = DriftMonitor(calibration, seed=5)
    whole.update(values)
    assert whole.peak == pytest.approx(expected[-1], rel=1e-9)
    one_by_one = DriftMonitor(calibration, seed=5)
    for row, peak in zip(values, expected[1:], strict=True):
        assert one_by_one.update(row[None]) == (peak >= 100)
        assert one_by_one.peak == pytest.approx(peak, rel=1e-9)
    assert one_by_one.n == whole.n == 70


def test_an_endless_change_keeps_the_wealth_finite():
    monitor = DriftMonitor(np.arange(50.0))
    assert monitor.update(np.arange(50.0, 6000.0))
    assert np.isfinite(monitor.peak)


@pytest.mark.parametrize("values", [[[0.0]], [[0.0, np.nan]], [["a", "b"]], 3.0])
def test_unsuitable_features_are_refused_and_change_nothing(values):
    monitor = DriftMonitor(np.zeros((5, 2)))
    with pytest.raises(InvalidData, match="features"):
        monitor.update(values)
    assert (monitor.n, monitor.peak) == (0, 1.0)


def test_a_monitor_needs_calibration_queries_and_a_level():
    with pytest.raises(InvalidData, match="calibration"):
        DriftMonitor(np.zeros((0, 2)))
    with pytest.raises(InvalidRiskLevel, match="level"):
        DriftMonitor(np.zeros((5, 2)), level=0.0)
