"""Plans: the exact distribution of a threshold, and requests that have none."""

import numpy as np
import pytest
from scipy.stats import beta, betabinom, binom

from rcir.errors import InvalidConfig
from rcir.risk import Population, ScoredResults, make_request, plan_calibration

DEPTH = 1000


def pilot_of(ranks, **options):
    """Queries whose sets at a threshold t hold t + 1 items, with their match at a rank."""
    scores = np.tile(np.arange(DEPTH, dtype=np.float32), (len(ranks), 1))
    relevant = np.arange(1, DEPTH + 1) == np.asarray(ranks)[:, None]
    return ScoredResults.from_scores(scores, relevant, **options)


def allowed(n, alpha, delta):
    """The most misses whose binomial probability is at most delta."""
    return max(k for k in range(-1, n) if binom.cdf(k, n, alpha) <= delta)


@pytest.mark.parametrize(("alpha", "delta"), [(0.1, 0.1), (0.05, 0.1), (0.05, 0.01), (0.3, 0.5)])
def test_a_perfect_system_needs_so_many_queries_that_none_may_miss(alpha, delta):
    fewest = next(n for n in range(1, 1000) if (1 - alpha) ** n <= delta)
    assert plan_calibration(make_request(alpha, delta)).required == fewest
    pilot = pilot_of(np.ones(50))
    short, enough = plan_calibration(make_request(alpha, delta), pilot, [fewest - 1, fewest]).rows
    assert (short.unattainable, enough.unattainable) == (1, 0)


@pytest.mark.parametrize("n", [50, 200, 1000])
def test_with_a_large_pilot_of_uniform_ranks_the_size_is_the_order_statistic(n):
    pilot = pilot_of(np.arange(1, DEPTH + 1).repeat(2))  # all ranks alike: the rank is uniform
    (row,) = plan_calibration(make_request(0.2, 0.1), pilot, [n]).rows
    misses = allowed(n, 0.2, 0.1)
    law = beta(n - misses, misses + 1)
    # The pilot adds a variance of about p (1 - p) / 2000.
    spread = np.hypot(law.std(), np.sqrt(0.25 / 2000)) / law.std()
    assert row.size / DEPTH == pytest.approx(law.median(), abs=0.01)
    low, high = (law.mean() + spread * (law.ppf(q) - law.mean()) for q in (0.05, 0.95))
    assert (row.low / DEPTH, row.high / DEPTH) == pytest.approx((low, high), abs=0.015)


@pytest.mark.parametrize("unmatched", [0, 3])
def test_shares_are_those_of_the_beta_binomial_distribution(unmatched):
    m, n = 40, 60
    pilot = pilot_of([*range(1, m + 1 - unmatched), *[DEPTH + 1] * unmatched])
    (row,) = plan_calibration(make_request(0.1, 0.1), pilot, [n]).rows
    misses = allowed(n, 0.1, 0.1)
    below = betabinom(m, n - misses, misses + 1)  # pilot scores below the threshold
    assert row.beyond == pytest.approx(below.pmf(m - unmatched), abs=0.04)
    assert row.unattainable == pytest.approx(below.sf(m - unmatched), abs=0.04)


def test_queries_that_do_not_count_are_left_out():
    groups = np.array(["day", "night"]).repeat(100)
    pilot = pilot_of(
        np.array([1.0, 5.0, DEPTH + 1]).repeat([100, 60, 40]),
        n_relevant=np.array([1, 0]).repeat([160, 40]),
        population=Population(200, groups=groups),
    )

    def row(**options):
        plan = plan_calibration(make_request(0.1, 0.1, **options), pilot, [500])
        return plan.n_pilot, plan.rows[0].size

    assert row(group="day") == (100, pytest.approx(1))
    assert row(counted="matchable") == (160, pytest.approx(5))
    assert row(counted="matchable", max_size=4) == (160, np.inf)
    assert row() == (200, np.inf)


@pytest.mark.parametrize(
    "options", [{"risk": "recall"}, {"abstain": True}, {"mix": "any"}, {"beta": 0.1}]
)
def test_requests_without_an_order_statistic_are_refused(options):
    with pytest.raises(InvalidConfig, match="plan"):
        plan_calibration(make_request(0.1, 0.1, **options))


def test_clusters_and_numbers_below_one_are_refused():
    clusters = Population(4, clusters=np.array([0, 0, 1, 1]), cluster_word="video")
    with pytest.raises(InvalidConfig, match="video"):
        plan_calibration(make_request(0.1, 0.1), pilot_of(np.ones(4), population=clusters))
    for number in (0, 1.5, True):
        with pytest.raises(InvalidConfig, match="number"):
            plan_calibration(make_request(0.1, 0.1), pilot_of(np.ones(4)), [number])
