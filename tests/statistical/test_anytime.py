"""Calibration while labelled queries arrive, stopped at any moment."""

import numpy as np
import pytest
from scipy.stats import norm

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

STREAMS, LENGTH = 500, 3_000


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


def largest_risks(scores, alpha, delta, holds):
    """(streams,) the risk at the moment when sets are smallest; 0 where nothing is certified."""
    numbers = np.unique(np.geomspace(20, 600, 25).astype(int))
    risks = np.zeros(len(scores))
    for stream, row in enumerate(scores):
        for n in numbers:
            calibration = ScoredResults(row[:n], depth=5)
            try:
                certificate = order_statistic(alpha, delta, calibration, holds=holds)
            except RiskUnattainable:
                continue
            risks[stream] = max(risks[stream], 1 - certificate.threshold)
    return risks


def test_the_risk_holds_if_calibration_stops_when_the_sets_are_smallest(scores, excess):
    assert excess(largest_risks(scores, 0.15, 0.1, holds="at every moment") > 0.15, 0.1) <= 3


def test_a_plain_calibration_that_stops_when_the_sets_are_smallest_would_be_noticed(scores, excess):
    assert excess(largest_risks(scores, 0.15, 0.1, holds="once") > 0.15, 0.1) > 3


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.4])
def test_the_exact_bound_of_one_number_applied_at_every_number_would_be_noticed(
    scores, excess, alpha
):
    wrong = ever_wrong(scores, alpha, lambda n: allowed_misses(n, alpha, 0.1))
    assert excess(wrong, 0.1) > 3


@pytest.mark.parametrize("divided", [True, False])
def test_groups_that_join_need_a_delta_divided_by_their_final_number(excess, divided):
    """Each group is harder than those before, so that it decides the threshold when it arrives."""
    wrong = np.zeros(STREAMS, bool)
    for number in range(1, 13):
        delta = 0.1 / (12 if divided else number)
        allowed = [anytime_allowed_misses(n, 0.1, delta) for n in range(1, 601)]
        misses = np.cumsum(np.random.default_rng(number).uniform(size=(STREAMS, 600)) < 0.1, axis=1)
        wrong |= (misses <= allowed).any(axis=1)
    assert (excess(wrong, 0.1) <= 3) == divided


def test_the_risk_holds_at_every_moment_of_one_gallery_but_not_of_all(excess):
    """The scores of the same queries in 60 galleries have a correlation of one half."""
    rng, first, every, alpha = np.random.default_rng(1), 45, 2, 0.1
    failed = np.zeros((60, STREAMS), bool)
    of_query = rng.standard_normal((STREAMS, first + 60 * every))
    for gallery in range(60):
        own = (of_query + rng.standard_normal(of_query.shape)) / np.sqrt(2)
        misses = np.cumsum(own > norm.isf(alpha), axis=1)
        for n in first + gallery * every + np.arange(every):
            failed[gallery] |= misses[:, n - 1] <= anytime_allowed_misses(int(n), alpha, 0.1)
    assert all(excess(one, 0.1) <= 3 for one in failed)
    assert excess(failed.any(axis=0), 0.1) > 3


def anytime_misses(n):
    return anytime_allowed_misses(n, 0.1, 0.1)


@pytest.mark.parametrize("lag", [20, 100])
def test_an_order_in_which_misses_come_later_would_be_noticed(scores, excess, lag):
    """Misses at the threshold of risk 0.1 become known `lag` queries later than hits."""
    order = np.argsort(np.arange(LENGTH) + lag * (scores >= 0.9), axis=1, kind="stable")
    by_truth = np.take_along_axis(scores, order, axis=1)[:, : LENGTH - lag]
    assert excess(ever_wrong(by_truth, 0.1, anytime_misses), 0.1) > 3


def test_queries_of_unknown_truth_as_misses_and_that_leaving_them_out_would_be_noticed(
    scores, excess
):
    unknown = (scores >= 0.9) & (np.random.default_rng(1).uniform(size=scores.shape) < 0.2)
    counted = np.where(unknown, np.inf, scores)
    assert excess(ever_wrong(counted, 0.1, anytime_misses), 0.1) <= 3
    known = np.stack([row[~gone][:2_500] for row, gone in zip(scores, unknown, strict=True)])
    assert excess(ever_wrong(known, 0.1, anytime_misses), 0.1) > 3


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
