import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidData
from rcir.risk import (
    anytime_allowed_misses,
    anytime_miss_rate_bound,
    anytime_required_calibration,
)


def wealth(misses, n, alpha):
    """The likelihood ratio against alpha, averaged over all risks below it, by integration."""
    alpha = mpmath.mpf(alpha)

    def ratio(risk):
        return (risk / alpha) ** misses * ((1 - risk) / (1 - alpha)) ** (n - misses)

    edges = sorted({mpmath.mpf(0), min(alpha, mpmath.mpf(misses) / n), alpha})
    return float(mpmath.quad(ratio, edges) / alpha)


@pytest.mark.parametrize("n", [1, 10, 50, 400])
@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("delta", [0.5, 0.1, 1e-6])
def test_the_misses_allowed_are_the_most_that_leave_one_over_delta(n, alpha, delta):
    allowed = anytime_allowed_misses(n, alpha, delta)
    assert allowed < n
    assert allowed == -1 or wealth(allowed, n, alpha) >= 1 / delta
    assert wealth(allowed + 1, n, alpha) < 1 / delta


@pytest.mark.parametrize(("misses", "n"), [(0, 1), (0, 30), (3, 40), (74, 1000), (9, 10)])
@pytest.mark.parametrize("delta", [0.9, 0.1, 1e-6])
def test_the_bound_is_the_risk_at_which_one_over_delta_is_left(misses, n, delta):
    bound = anytime_miss_rate_bound(misses, n, delta)
    assert misses / n < bound < 1
    assert wealth(misses, n, bound) == pytest.approx(1 / delta, rel=1e-5)
    assert anytime_allowed_misses(n, bound, delta) >= misses
    assert anytime_allowed_misses(n, bound * (1 - 1e-6), delta) < misses


def test_one_query_and_one_without_misses_have_closed_forms():
    # Of one query that is served: the mean of 1 - q is 1 - alpha / 2.
    assert anytime_miss_rate_bound(0, 1, 0.1) == pytest.approx(18 / 19)
    assert anytime_miss_rate_bound(1, 1, 0.1) == 1.0


@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_it_is_the_bet_of_someone_who_follows_every_smaller_risk_query_by_query(alpha):
    n, delta = 300, 0.1
    risks = alpha * (np.arange(20_000) + 0.5) / 20_000
    for misses in (0, 3, 6, 7, 8, 60, 75, 90):
        wealth = np.ones(len(risks))
        for missed in np.random.default_rng(misses).permutation(n) < misses:
            wealth *= risks / alpha if missed else (1 - risks) / (1 - alpha)
        assert (wealth.mean() >= 1 / delta) == (anytime_allowed_misses(n, alpha, delta) >= misses)


def test_more_queries_a_larger_risk_and_a_larger_delta_never_allow_fewer_misses():
    def allowed(n=200, alpha=0.1, delta=0.1):
        return anytime_allowed_misses(n, alpha, delta)

    for values in (
        [allowed(n=n) for n in range(0, 3000, 7)],
        [allowed(alpha=alpha) for alpha in np.linspace(0.001, 0.999, 300)],
        [allowed(delta=delta) for delta in np.geomspace(1e-9, 0.999, 300)],
    ):
        assert values == sorted(values)
        assert values[0] < values[-1]


@pytest.mark.parametrize(("n", "alpha"), [(30, 0.1), (460, 0.1), (3000, 0.05), (10**6, 0.01)])
def test_looking_all_the_time_costs_some_misses_but_not_many(n, alpha):
    for delta in (0.01, 0.1):
        once = int(binom.ppf(delta, n, alpha)) - 1
        assert binom.cdf(once, n, alpha) <= delta
        spread = math.sqrt(n * alpha * (1 - alpha))
        assert once - 2.5 * spread <= anytime_allowed_misses(n, alpha, delta) <= once


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.5])
def test_the_required_number_of_queries_is_that_of_a_stream_without_a_miss(alpha):
    def wealth_unmissed(n):
        return (1 - alpha) * ((1 - alpha) ** -(n + 1) - 1) / (alpha * (n + 1))

    expected = next(n for n in itertools.count(1) if wealth_unmissed(n) >= 20)
    assert anytime_required_calibration(alpha, 0.05) == expected


def test_queries_without_a_match_count_as_misses():
    n = anytime_required_calibration(0.1, 0.05, unmatched=0.06)
    assert wealth(math.ceil(0.06 * n), n, 0.1) >= 20
    assert wealth(math.ceil(0.06 * (n - 1)), n - 1, 0.1) < 20
    assert anytime_required_calibration(0.1, 0.05, unmatched=0.1) is None


@pytest.mark.parametrize("n", [10.5, 10.0, np.nan, "10", -1])
def test_a_number_of_queries_that_is_no_count_is_refused(n):
    with pytest.raises(InvalidData, match=r"n is .*; a number of queries is an integer"):
        anytime_allowed_misses(n, 0.3, 0.1)
    with pytest.raises(InvalidData, match="needed: integers"):
        anytime_miss_rate_bound(1, n, 0.1)


@pytest.mark.parametrize("misses", [-1, 11, 1.5])
def test_misses_that_are_no_count_are_refused(misses):
    with pytest.raises(InvalidData, match="needed: integers, 0 <= misses <= n and n >= 1"):
        anytime_miss_rate_bound(misses, 10, 0.1)
