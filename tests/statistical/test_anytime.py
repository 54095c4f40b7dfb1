"""Calibration while labelled queries arrive, stopped at any moment."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import (
    ScoredResults,
    allowed_misses,
    anytime_allowed_misses,
    anytime_miss_rate_bound,
    miss_rate_bound,
    order_statistic,
)

pytestmark = pytest.mark.statistical

STREAMS, LENGTH = 2_000, 3_000


@pytest.fixture(scope="module")
def scores():
    """(streams, queries) uniform on (0, 1), so that the risk of a threshold is 1 - threshold."""
    return np.random.default_rng(0).uniform(size=(STREAMS, LENGTH))


def ever_wrong(scores, alpha, allowed):
    """(streams,) True if the certified threshold ever has a risk above alpha.

    It has if the number of scores from 1 - alpha on, which are misses at the threshold of risk
    alpha, is at most the number of allowed misses.
    """
    misses = np.cumsum(scores >= 1 - alpha, axis=1)
    return (misses <= [allowed(n) for n in range(1, scores.shape[1] + 1)]).any(axis=1)


@pytest.mark.parametrize("delta", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.4])
def test_the_risk_is_ever_above_alpha_with_probability_delta_at_most(scores, excess, alpha, delta):
    def allowed(n):
        return anytime_allowed_misses(n, alpha, delta)

    wrong = ever_wrong(scores, alpha, allowed)
    assert excess(wrong, delta) <= 3
    assert wrong.mean() > delta / 4  # the bound is not needlessly wide


def largest_risks(scores, alpha, delta, anytime):
    """(streams,) the risk at the moment when sets are smallest; 0 where nothing is certified."""
    numbers = np.unique(np.geomspace(20, 600, 25).astype(int))
    risks = np.zeros(len(scores))
    for stream, row in enumerate(scores):
        for n in numbers:
            calibration = ScoredResults(row[:n], depth=5)
            try:
                certificate = order_statistic(alpha, delta, calibration, anytime=anytime)
            except RiskUnattainable:
                continue
            risks[stream] = max(risks[stream], 1 - certificate.threshold)
    return risks


def test_the_risk_holds_if_calibration_stops_when_the_sets_are_smallest(scores, excess):
    assert excess(largest_risks(scores, 0.15, 0.1, anytime=True) > 0.15, 0.1) <= 3


def test_a_plain_calibration_that_stops_when_the_sets_are_smallest_would_be_noticed(scores, excess):
    assert excess(largest_risks(scores, 0.15, 0.1, anytime=False) > 0.15, 0.1) > 3


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.4])
def test_the_exact_bound_of_one_number_applied_at_every_number_would_be_noticed(
    scores, excess, alpha
):
    wrong = ever_wrong(scores, alpha, lambda n: allowed_misses(n, alpha, 0.1))
    assert excess(wrong, 0.1) > 3


def ever_below(scores, rate, bound):
    """(streams,) True if the bound of a miss rate is below it at any number of queries."""
    misses = np.cumsum(scores[:, :400] < rate, axis=1)
    wrong = np.zeros(STREAMS, bool)
    for n in range(1, 401):
        counts, where = np.unique(misses[:, n - 1], return_inverse=True)
        few = counts[counts <= rate * n]  # with more misses, no bound is below the rate
        bounds = [bound(int(count), n, 0.1) for count in few]
        wrong |= np.append(bounds, np.ones(len(counts) - len(few)))[where] < rate
    return wrong


@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_the_bound_of_a_fixed_threshold_s_miss_rate_holds_at_every_number(scores, excess, rate):
    assert excess(ever_below(scores, rate, anytime_miss_rate_bound), 0.1) <= 3


def test_the_bound_of_a_miss_rate_at_one_number_would_be_noticed_at_every_number(scores, excess):
    assert excess(ever_below(scores, 0.3, miss_rate_bound), 0.1) > 3
