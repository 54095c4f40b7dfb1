"""The exact certificate of the miss risk, and what it reports when nothing can be certified."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel, RiskUnattainable
from rcir.risk import (
    SCORE_FUNCTIONS,
    Constant,
    ScoredResults,
    SearchResults,
    minimum_alpha,
    order_statistic,
    score_ranks,
)
from tests.risk.band import naive_local_level
from tests.risk.conftest import naive_allowed_misses, with_shared_keys

LEVELS = [(0.02, 0.1), (0.05, 0.01), (0.1, 0.1), (0.3, 0.5), (0.45, 0.05)]
BOUNDS = ("binomial", "hoeffding", "bentkus", "hoeffding-bentkus", "betting")


def calibration(n=300, seed=0, depth=60):
    """Queries whose first match is the first of its key."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.gamma(2.0, size=n)
    ranks = 1 + 2 * np.floor(rng.exponential(uncertainty))
    return with_shared_keys(uncertainty, depth), np.where(ranks > depth, np.inf, ranks)


@pytest.fixture(scope="module", params=SCORE_FUNCTIONS.values(), ids=lambda kind: kind.name)
def score_function(request):
    return request.param.fit(*calibration(200, seed=9))


def assert_smallest(score_function, threshold, results, ranks, allowed):
    """At most `allowed` queries are missed, and more at any smaller threshold that changes a set.

    Sets include scores up to a thousandth above the threshold.
    """
    ranking, needed = score_function.rank(results), np.full(len(ranks), np.inf)
    scores, columns = ranking.scores, ranking.columns
    for query in np.flatnonzero(np.isfinite(ranks)):
        place = int(ranks[query]) - 1
        if columns is not None:
            place = columns[query].tolist().index(place)
        needed[query] = scores[query, place]
    assert np.sum(needed > threshold) <= allowed
    smaller = np.unique(scores)
    for candidate in smaller[smaller < threshold][-200:]:
        assert np.sum(needed > candidate) > allowed
    expected = np.sum(scores <= threshold * (1 + 1e-3), axis=1)
    assert score_function.sizes(results, threshold).tolist() == expected.tolist()


@pytest.mark.parametrize(("alpha", "delta"), LEVELS)
def test_threshold_is_the_smallest_that_a_search_over_all_candidates_certifies(
    score_function, alpha, delta
):
    results, ranks = calibration()
    certificate = order_statistic(alpha, delta, score_ranks(score_function, results, ranks))
    allowed = naive_allowed_misses(300, alpha, delta)
    assert_smallest(score_function, certificate.threshold, results, ranks, allowed)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("alpha", "delta"), LEVELS[2:])
def test_every_bound_allows_the_misses_that_its_p_value_does(bound, alpha, delta, naive_p_value):
    results, ranks = calibration()
    scored = score_ranks(Constant(), results, ranks)
    certificate = order_statistic(alpha, delta, scored, bound)
    allowed = max(m for m in range(300) if naive_p_value(m, 300, alpha, bound) <= delta)
    assert_smallest(Constant(), certificate.threshold, results, ranks, allowed)
    assert certificate.bound == bound


@pytest.mark.parametrize("alpha", [0.05, 1 / 3, 0.45, 0.9, 0.9999])
def test_marginal_threshold_is_the_split_conformal_quantile(score_function, alpha):
    results, ranks = calibration(299)
    certificate = order_statistic(alpha, None, score_ranks(score_function, results, ranks))
    allowed = max(m for m in range(299) if Fraction(m + 1, 300) <= Fraction(alpha))
    assert_smallest(score_function, certificate.threshold, results, ranks, allowed)
    scores = np.sort(score_function.match_scores(results, ranks))
    place = math.ceil(300 * (1 - Fraction(alpha)))
    assert certificate.threshold == scores[max(place, 1) - 1]
    assert certificate.risk_bound == pytest.approx((allowed + 1) / 300)


@pytest.mark.parametrize("bound", ["binomial", "betting"])
@pytest.mark.parametrize(("alpha", "delta"), [(0.1, 0.1), (0.2, 0.5), (0.45, 0.01), (0.1, 0.9)])
def test_simultaneous_levels_use_the_local_level(bound, alpha, delta):
    results, ranks = calibration()
    scored = score_ranks(Constant(), results, ranks)
    level = naive_local_level(300, delta)
    allowed = naive_allowed_misses(300, alpha, level)
    certificate = order_statistic(alpha, delta, scored, bound, holds="for all alphas")
    assert_smallest(Constant(), certificate.threshold, results, ranks, allowed)
    expected = beta.isf(level, allowed + 1, 300 - allowed)
    assert certificate.risk_bound == pytest.approx(expected, rel=1e-6)
    assert certificate.bound == "band"


@pytest.mark.parametrize("bound", ["binomial", "betting"])
@pytest.mark.parametrize(("alpha", "delta"), [(0.1, 0.1), (0.45, 0.01)])
def test_anytime_levels_use_the_mean_likelihood_ratio(bound, alpha, delta):
    results, ranks = calibration()
    scored = score_ranks(Constant(), results, ranks)

    def wealth(misses):
        def ratio(risk):
            hits = ((1 - risk) / (1 - alpha)) ** (300 - misses)
            return (risk / alpha) ** misses * hits / alpha

        return quad(ratio, 0, alpha, points=[min(alpha, misses / 300)], limit=200)[0]

    allowed = max(m for m in range(300) if wealth(m) >= 1 / delta)
    certificate = order_statistic(alpha, delta, scored, bound, holds="at every moment")
    assert_smallest(Constant(), certificate.threshold, results, ranks, allowed)
    assert (certificate.risk_bound, certificate.bound) == (alpha, "anytime")


@pytest.mark.parametrize("holds", ["for all alphas", "at every moment"])
def test_levels_that_hold_together_need_a_delta(holds):
    scored = ScoredResults(np.zeros(100, np.float32), depth=5)
    with pytest.raises(InvalidRiskLevel, match="delta"):
        order_statistic(0.9, None, scored, holds=holds)


def test_one_miss_more_than_allowed_moves_the_threshold_to_the_next_rank():
    # 3,000 queries allow 134 misses at (0.05, 0.1).
    for late, expected in ((134, 0.0), (135, 6.0)):
        ranks = np.repeat([1.0, 7.0], [3000 - late, late])
        scored = score_ranks(Constant(), SearchResults(np.zeros(3000), 10), ranks)
        assert order_statistic(0.05, 0.1, scored).threshold == expected


@pytest.mark.parametrize("n", [30, 300, 3000])
@pytest.mark.parametrize("bound", BOUNDS)
def test_certified_risk_is_the_smallest_alpha_with_the_same_misses(n, bound, naive_p_value):
    scored = ScoredResults(np.zeros(n, np.float32), 5)
    for alpha in np.linspace(0.25, 0.9, 8):
        certified = order_statistic(alpha, 0.1, scored, bound).risk_bound
        assert certified <= alpha
        assert order_statistic(certified * (1 + 1e-9), 0.1, scored, bound).risk_bound == certified
        few = int(0.8 * alpha * n) if n == 3000 else 0  # certainly allowed
        allowed = next(m for m in range(few, n) if naive_p_value(m + 1, n, alpha, bound) > 0.1)
        assert naive_p_value(allowed, n, certified * (1 + 1e-9), bound) <= 0.1
        assert naive_p_value(allowed, n, certified * (1 - 1e-6), bound) > 0.1


@pytest.mark.parametrize(
    "ranks",
    [np.zeros(0), np.ones(3), np.ones((2, 1)), *([1, x] for x in (np.nan, -np.inf, 0, 11, 2.5))],
)
def test_impossible_ranks_are_refused(ranks):
    with pytest.raises(InvalidData, match="ranks"):
        score_ranks(Constant(), SearchResults(np.zeros(2), 10), np.array(ranks))


def test_an_empty_calibration_and_an_unknown_bound_are_refused():
    with pytest.raises(InvalidData, match="n >= 1"):
        score_ranks(Constant(), SearchResults(np.zeros(0), 10), np.zeros(0))
    with pytest.raises(InvalidConfig, match="binomial"):
        order_statistic(0.1, 0.1, matched(2), "normal")


def matched(served, unmatched=0):
    """Queries that match at rank 1 and others without a match."""
    return ScoredResults(np.repeat(np.float32([0, np.inf]), [served, unmatched]), 50)


def refusal(alpha, delta, scored, bound="binomial", holds="once"):
    with pytest.raises(RiskUnattainable) as caught:
        order_statistic(alpha, delta, scored, bound, holds=holds)
    return caught.value


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("served", "unmatched"), [(20, 0), (400, 3), (900, 100), (2, 98)])
@pytest.mark.parametrize("delta", [1e-12, 0.05, 0.3, None])
def test_minimum_alpha_is_attainable_and_slightly_less_is_not(served, unmatched, delta, bound):
    scored = matched(served, unmatched)
    minimum = refusal(0.002, delta, scored, bound).minimum_alpha
    if minimum is None:
        refusal(1 - 1e-9, delta, scored, bound)
        return
    assert minimum == minimum_alpha(delta, scored, bound)
    assert np.isfinite(order_statistic(minimum, delta, scored, bound).threshold)
    gap = max(1e-7 * min(minimum, 1 - minimum), 2**-52)
    refusal(minimum - gap, delta, scored, bound)


@pytest.mark.parametrize("holds", ["once", "for all alphas", "at every moment"])
@pytest.mark.parametrize(("served", "unmatched"), [(20, 0), (196, 4), (96, 4)])
def test_required_calibration_and_minimum_alpha_suffice(served, unmatched, holds):
    alpha, delta, scored = 0.05, 0.01, matched(served, unmatched)
    error = refusal(alpha, delta, scored, holds=holds)
    lost = int(np.ceil(error.required_calibration * unmatched / (served + unmatched)))
    enough = matched(error.required_calibration - lost, lost)
    assert order_statistic(alpha, delta, enough, holds=holds).threshold == 0.0
    assert order_statistic(error.minimum_alpha, delta, scored, holds=holds).threshold == 0.0
    refusal(error.minimum_alpha - 1e-7, delta, scored, holds=holds)


def test_marginal_guarantee_needs_one_query_over_alpha():
    error = refusal(0.1, None, matched(8))
    assert error.required_calibration == 9  # (0 + 1) / (9 + 1)
    assert error.minimum_alpha == pytest.approx(1 / 9)
    assert order_statistic(0.1, None, matched(9)).threshold == 0.0
    assert refusal(0.1, None, matched(90, 10)).required_calibration is None
    for one_in in range(3, 60):
        required = refusal(1 / one_in, None, matched(1)).required_calibration
        assert minimum_alpha(None, matched(required)) <= 1 / one_in
        assert order_statistic(1 / one_in, None, matched(required)).threshold == 0.0


@pytest.mark.parametrize(("served", "unmatched"), [(20, 0), (500, 10)])
def test_minimum_alpha_of_simultaneous_levels_uses_the_local_level(served, unmatched):
    n = served + unmatched
    minimum = minimum_alpha(0.1, matched(served, unmatched), holds="for all alphas")
    level = naive_local_level(n, 0.1)
    assert minimum == pytest.approx(beta.isf(level, unmatched + 1, n - unmatched), rel=1e-6)


def test_too_few_queries_are_told_how_many_and_which_alpha():
    error = refusal(0.05, 0.1, matched(20))
    # 0.95**45 <= 0.1 < 0.95**44, and 1 - 0.1**(1/20) = 0.10875
    assert error.required_calibration == 45
    assert error.minimum_alpha == pytest.approx(1 - 0.1 ** (1 / 20), rel=1e-12)
    assert "0.1088" in str(error)  # rounded up, so that it can be certified
    assert "45" in str(error)
    assert order_statistic(0.1088, 0.1, matched(20)).threshold == 0.0


def test_too_many_unmatched_queries_are_advised_to_search_deeper():
    error = refusal(0.1, 0.1, matched(80, 20))
    assert error.required_calibration is None
    assert "search deeper" in str(error)


@pytest.mark.parametrize(
    ("served", "unmatched", "bound", "alpha"),
    [(0, 100, "binomial", 0.99), (1, 0, "hoeffding", 1e-5)],
)
def test_nothing_is_advised_that_cannot_be_certified(served, unmatched, bound, alpha):
    error = refusal(alpha, 0.1, matched(served, unmatched), bound)
    assert (error.minimum_alpha, error.required_calibration) == (None, None)
    assert "request alpha >=" not in str(error)
    assert "request alpha >=" not in str(refusal(0.5, 1e-6, matched(1)))  # 1 after rounding
