"""Drift without labels: false alarms are rare enough, and changes are noticed soon."""

import numpy as np
import pytest
from scipy.stats import norm

from rcir.risk.drift import bet, conformal_p_values

pytestmark = pytest.mark.statistical

STREAMS, CALIBRATION, LENGTH, BLOCK = 2_000, 200, 512, 64


def ranks(rng, seen, values):
    return conformal_p_values(seen, values, rng.uniform(size=values.shape))


def wealth_of(rng, calibration, values, p_values=ranks):
    """(m, streams) wealth after each query of (m, streams) features."""
    seen, stakes, wealth = np.sort(calibration.T, axis=1), np.full((values.shape[1], 3), 0.25), []
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        wealth.append(bet(stakes, p_values(rng, seen, block), start))
        seen = np.sort(np.concatenate([seen, block.T], axis=1), axis=1, kind="stable")
    return np.concatenate(wealth)


def peaks(draw, p_values=ranks, features=1):
    """(STREAMS,) largest wealth over streams of exchangeable queries, on average over features."""
    rng = np.random.default_rng(0)
    parts = [draw(rng, n, STREAMS * features) for n in (CALIBRATION, LENGTH)]
    wealth = wealth_of(rng, *parts, p_values)
    return wealth.reshape(LENGTH, STREAMS, features).mean(axis=2).max(axis=0)


def normal(rng, n, columns):
    return rng.normal(size=(n, columns))


def votes(rng, n, columns):
    """A feature with few values, half of the queries at the largest, as of a vote."""
    return np.minimum(rng.integers(8, size=(n, columns)), 4).astype(float)


def correlated(rng, n, columns):
    """Pairs of features of the same query, one of them with ties."""
    values = np.repeat(rng.normal(size=(n, columns // 2)), 2, axis=1)
    values[:, 1::2] = np.round(values[:, 1::2])
    return values


@pytest.mark.parametrize(("draw", "features"), [(normal, 1), (votes, 1), (correlated, 2)])
def test_exchangeable_queries_raise_an_alarm_with_probability_at_most_level(excess, draw, features):
    found = peaks(draw, features=features)
    for level in (0.01, 0.05, 0.2):
        assert excess(found >= 1 / level, level) <= 3
    assert (found >= 5).mean() > 0.05  # the bound is not far from exact


def test_p_values_among_calibration_queries_alone_would_be_noticed(excess):
    """They are not independent of each other, because all depend on the same queries."""

    def alone(rng, seen, values):
        calibration.append(seen)
        columns = zip(calibration[0], values.T, strict=True)
        below = np.stack([np.searchsorted(*column) for column in columns], axis=1)
        return (below + rng.uniform(size=values.shape)) / (CALIBRATION + 1)

    calibration = []
    assert excess(peaks(normal, alone) >= 100, 0.01) > 3


def test_ties_that_are_not_broken_would_be_noticed(excess):
    def largest(_, seen, values):
        return conformal_p_values(seen, values, np.ones(values.shape))

    assert excess(peaks(votes, largest) >= 100, 0.01) > 3


@pytest.mark.parametrize(("auroc", "median"), [(0.6, 133), (0.667, 64), (0.75, 40)])
def test_a_change_after_300_queries_is_noticed_almost_as_soon_as_by_the_simple_jumper(
    auroc, median
):
    """The medians are those of the simple jumper without a reserve, of another simulation."""
    rng = np.random.default_rng(1)
    values = normal(rng, 800, 400)
    values[300:] += np.sqrt(2) * norm.ppf(auroc)
    alarmed = np.maximum.accumulate(wealth_of(rng, normal(rng, 1000, 400), values)) >= 100
    assert np.median(800 - alarmed.sum(axis=0) - 300 + 1) < 1.3 * median


def test_a_long_time_without_change_hardly_delays_the_alarm():
    """Without a reserve, the wealth would be exp(-12) after 3,000 queries."""
    rng = np.random.default_rng(2)
    values = normal(rng, 3200, 100)
    values[3000:] += np.sqrt(2) * norm.ppf(0.75)
    wealth = wealth_of(rng, normal(rng, 1000, 100), values)
    assert np.median(wealth[2999]) > np.exp(-4)
    assert np.median(wealth[3000 + 80]) >= 100
