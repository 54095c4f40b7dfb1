"""The exact certificate of the miss risk, and what it reports when nothing can be certified."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta, binom

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel, RiskUnattainable
from rcir.risk import SCORE_FUNCTIONS, Constant, MissController, SearchResults

LEVELS = [(0.02, 0.1), (0.05, 0.01), (0.1, 0.1), (0.3, 0.5), (0.45, 0.05)]
BOUNDS = ("binomial", "hoeffding", "bentkus", "hoeffding-bentkus", "betting")


def with_shared_keys(uncertainty, depth):
    """Queries whose candidates share keys two by two."""
    keys = np.tile(np.arange(depth) // 2, (len(uncertainty), 1))
    return SearchResults(np.asarray(uncertainty, float), depth, keys=keys)


def calibration(n=300, seed=0, depth=60):
    """Queries whose first match is the first of its key."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.gamma(2.0, size=n)
    ranks = 1 + 2 * np.floor(rng.exponential(uncertainty))
    return with_shared_keys(uncertainty, depth), np.where(ranks > depth, np.inf, ranks)


@pytest.fixture(scope="module", params=SCORE_FUNCTIONS.values(), ids=lambda kind: kind.name)
def score_function(request):
    return request.param.fit(*calibration(200, seed=9))


def assert_smallest(controller, threshold, results, ranks, allowed):
    """At most `allowed` queries are missed, and more at any smaller threshold that changes a set.

    Sets include scores up to a thousandth above the threshold.
    """
    ordered, columns = controller.score_function.ordered(results)
    scores, needed = (
        controller.score_function.candidate_scores(ordered),
        np.full(len(ranks), np.inf),
    )
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
    assert controller.sizes(results, threshold).tolist() == expected.tolist()


@pytest.mark.parametrize(("alpha", "delta"), LEVELS)
def test_threshold_is_the_smallest_that_a_search_over_all_candidates_certifies(
    score_function, alpha, delta
):
    results, ranks = calibration()
    controller = MissController.calibrate(score_function, results, ranks)
    allowed = max(m for m in range(-1, 300) if binom.cdf(m, 300, alpha) <= delta)
    assert_smallest(controller, controller.threshold(alpha, delta), results, ranks, allowed)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("alpha", "delta"), LEVELS[2:])
def test_every_bound_allows_the_misses_that_its_p_value_does(bound, alpha, delta, naive_p_value):
    results, ranks = calibration()
    controller = MissController.calibrate(Constant(), results, ranks, bound)
    allowed = max(m for m in range(300) if naive_p_value(m, 300, alpha, bound) <= delta)
    assert_smallest(controller, controller.threshold(alpha, delta), results, ranks, allowed)


@pytest.mark.parametrize("alpha", [0.05, 1 / 3, 0.45, 0.9, 0.9999])
def test_marginal_threshold_is_the_split_conformal_quantile(score_function, alpha):
    results, ranks = calibration(299)
    controller = MissController.calibrate(score_function, results, ranks)
    allowed = max(m for m in range(299) if Fraction(m + 1, 300) <= Fraction(alpha))
    assert_smallest(controller, controller.threshold(alpha, None), results, ranks, allowed)
    scores = np.sort(score_function.scores(results, ranks))
    place = math.ceil(300 * (1 - Fraction(alpha)))
    assert controller.threshold(alpha, None) == scores[max(place, 1) - 1]
    assert controller.risk_bound(alpha, None) == pytest.approx((allowed + 1) / 300)


@pytest.mark.parametrize("bound", ["binomial", "betting"])
@pytest.mark.parametrize(("alpha", "delta"), [(0.1, 0.1), (0.2, 0.5), (0.45, 0.01), (0.1, 0.9)])
def test_simultaneous_levels_use_the_local_level(bound, alpha, delta, naive_local_level):
    results, ranks = calibration()
    controller = MissController.calibrate(Constant(), results, ranks, bound)
    level = naive_local_level(300, delta)
    allowed = max(m for m in range(300) if binom.cdf(m, 300, alpha) <= level)
    threshold = controller.threshold(alpha, delta, simultaneous=True)
    assert_smallest(controller, threshold, results, ranks, allowed)
    certified = controller.risk_bound(alpha, delta, simultaneous=True)
    assert certified == pytest.approx(beta.isf(level, allowed + 1, 300 - allowed), rel=1e-6)
    sizes = controller.size(results, alpha, delta, simultaneous=True)
    assert sizes.tolist() == [min(60, 1 + int(threshold))] * 300


@pytest.mark.parametrize("bound", ["binomial", "betting"])
@pytest.mark.parametrize(("alpha", "delta"), [(0.1, 0.1), (0.45, 0.01)])
def test_anytime_levels_use_the_mean_likelihood_ratio(bound, alpha, delta):
    results, ranks = calibration()
    controller = MissController.calibrate(Constant(), results, ranks, bound)

    def wealth(misses):
        def ratio(risk):
            hits = ((1 - risk) / (1 - alpha)) ** (300 - misses)
            return (risk / alpha) ** misses * hits / alpha

        return quad(ratio, 0, alpha, points=[min(alpha, misses / 300)], limit=200)[0]

    allowed = max(m for m in range(300) if wealth(m) >= 1 / delta)
    threshold = controller.threshold(alpha, delta, anytime=True)
    assert_smallest(controller, threshold, results, ranks, allowed)
    assert controller.risk_bound(alpha, delta, anytime=True) == alpha
    sizes = controller.size(results, alpha, delta, anytime=True)
    assert sizes.tolist() == [min(60, 1 + int(threshold))] * 300


def test_simultaneous_and_anytime_need_a_delta_and_exclude_each_other():
    controller = MissController(Constant(), np.zeros(100, np.float32), depth=5)
    for option in ("simultaneous", "anytime"):
        with pytest.raises(InvalidRiskLevel, match="delta"):
            controller.threshold(0.9, None, **{option: True})
    for call in (controller.threshold, controller.risk_bound, controller.required_calibration):
        with pytest.raises(InvalidConfig, match="exclude"):
            call(0.9, 0.1, simultaneous=True, anytime=True)


def test_one_miss_more_than_allowed_moves_the_threshold_to_the_next_rank():
    # 3,000 queries allow 134 misses at (0.05, 0.1).
    for late, expected in ((134, 0.0), (135, 6.0)):
        ranks = np.repeat([1.0, 7.0], [3000 - late, late])
        controller = MissController.calibrate(Constant(), SearchResults(np.zeros(3000), 10), ranks)
        assert controller.threshold(0.05, 0.1) == expected


def test_scores_may_come_in_any_order():
    scores = np.random.default_rng(0).permutation(np.arange(100.0))
    controller = MissController(Constant(), scores, 200)
    # P(Binomial(100, .1) <= 5) = .058 and P(Binomial(100, .1) <= 6) = .117
    assert controller.threshold(0.1, 0.1) == 94.0


def test_no_set_is_larger_than_the_search_depth(score_function):
    controller = MissController(score_function, np.zeros(1, np.float32), depth=12)
    sizes = controller.sizes(with_shared_keys([0.1, 2.0, 50.0], 12), threshold=1e10)
    assert sizes.tolist() == [12, 12, 12]
    with pytest.raises(InvalidData, match="depth 13"):
        controller.sizes(SearchResults(np.zeros(2), 13), threshold=1.0)


def test_no_bound_gives_smaller_thresholds_than_the_exact_one():
    results, ranks = calibration(n=2000)
    score_function = SCORE_FUNCTIONS["quantile"].fit(*calibration(200, seed=9))
    exact, *others = (
        MissController.calibrate(score_function, results, ranks, bound) for bound in BOUNDS
    )
    for other in others:
        gaps = [other.threshold(a, 0.1) - exact.threshold(a, 0.1) for a in (0.05, 0.1, 0.2, 0.3)]
        assert min(gaps) >= 0
        assert max(gaps) > 0


@pytest.mark.parametrize("n", [30, 300, 3000])
@pytest.mark.parametrize("bound", BOUNDS)
def test_certified_risk_is_the_smallest_alpha_with_the_same_misses(n, bound, naive_p_value):
    controller = MissController(Constant(), np.zeros(n, np.float32), 5, bound)
    for alpha in np.linspace(0.25, 0.9, 8):
        certified = controller.risk_bound(alpha, 0.1)
        assert certified <= alpha
        assert controller.risk_bound(certified * (1 + 1e-9), 0.1) == certified
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
        MissController.calibrate(Constant(), SearchResults(np.zeros(2), 10), np.array(ranks))


def test_an_empty_calibration_and_an_unknown_bound_are_refused():
    with pytest.raises(InvalidData, match="n >= 1"):
        MissController.calibrate(Constant(), SearchResults(np.zeros(0), 10), np.zeros(0))
    with pytest.raises(InvalidConfig, match="binomial"):
        MissController.calibrate(Constant(), SearchResults(np.zeros(2), 10), np.ones(2), "normal")


def matched(served, unmatched=0, bound="binomial"):
    """A calibration on queries that match at rank 1 and others without a match."""
    ranks = np.repeat([1.0, np.inf], [served, unmatched])
    results = SearchResults(np.zeros(len(ranks)), 50)
    return MissController.calibrate(Constant(), results, ranks, bound)


def refusal(controller, alpha, delta, **options):
    with pytest.raises(RiskUnattainable) as caught:
        controller.threshold(alpha, delta, **options)
    with pytest.raises(RiskUnattainable):
        controller.risk_bound(alpha, delta, **options)
    return caught.value


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("served", "unmatched"), [(20, 0), (400, 3), (900, 100), (2, 98)])
@pytest.mark.parametrize("delta", [1e-12, 0.05, 0.3, None])
def test_minimum_alpha_is_attainable_and_slightly_less_is_not(served, unmatched, delta, bound):
    controller = matched(served, unmatched, bound)
    minimum = refusal(controller, 0.002, delta).minimum_alpha
    if minimum is None:
        refusal(controller, 1 - 1e-9, delta)
        return
    assert minimum == controller.minimum_alpha(delta)
    assert np.isfinite(controller.threshold(minimum, delta))
    gap = max(1e-7 * min(minimum, 1 - minimum), 2**-52)
    refusal(controller, minimum - gap, delta)


@pytest.mark.parametrize("options", [{}, {"simultaneous": True}, {"anytime": True}], ids=str)
@pytest.mark.parametrize(("served", "unmatched"), [(20, 0), (196, 4), (96, 4)])
def test_required_calibration_and_minimum_alpha_suffice(served, unmatched, options):
    alpha, delta, controller = 0.05, 0.01, matched(served, unmatched)
    error = refusal(controller, alpha, delta, **options)
    lost = int(np.ceil(error.required_calibration * unmatched / (served + unmatched)))
    enough = matched(error.required_calibration - lost, lost)
    assert enough.threshold(alpha, delta, **options) == 0.0
    assert controller.threshold(error.minimum_alpha, delta, **options) == 0.0
    refusal(controller, error.minimum_alpha - 1e-7, delta, **options)


def test_marginal_guarantee_needs_one_query_over_alpha():
    error = refusal(matched(8), 0.1, None)
    assert error.required_calibration == 9  # (0 + 1) / (9 + 1)
    assert error.minimum_alpha == pytest.approx(1 / 9)
    assert matched(9).threshold(0.1, None) == 0.0
    assert refusal(matched(90, 10), 0.1, None).required_calibration is None
    for one_in in range(2, 60):
        required = matched(1).required_calibration(1 / one_in, None)
        assert matched(required).minimum_alpha(None) <= 1 / one_in
        assert matched(required).threshold(1 / one_in, None) == 0.0


@pytest.mark.parametrize(("served", "unmatched"), [(20, 0), (500, 10)])
def test_minimum_alpha_of_simultaneous_levels_uses_the_local_level(
    served, unmatched, naive_local_level
):
    n = served + unmatched
    minimum = matched(served, unmatched).minimum_alpha(0.1, simultaneous=True)
    level = naive_local_level(n, 0.1)
    assert minimum == pytest.approx(beta.isf(level, unmatched + 1, n - unmatched), rel=1e-6)


def test_too_few_queries_are_told_how_many_and_which_alpha():
    error = refusal(matched(20), 0.05, 0.1)
    # 0.95**45 <= 0.1 < 0.95**44, and 1 - 0.1**(1/20) = 0.10875
    assert error.required_calibration == 45
    assert error.minimum_alpha == pytest.approx(1 - 0.1 ** (1 / 20), rel=1e-12)
    assert "0.1088" in str(error)  # rounded up, so that it can be certified
    assert "45" in str(error)
    assert matched(20).threshold(0.1088, 0.1) == 0.0


def test_too_many_unmatched_queries_are_advised_to_search_deeper():
    error = refusal(matched(80, 20), 0.1, 0.1)
    assert error.required_calibration is None
    assert "search deeper" in str(error)


@pytest.mark.parametrize(
    ("served", "unmatched", "bound", "alpha"),
    [(0, 100, "binomial", 0.99), (1, 0, "hoeffding", 1e-5)],
)
def test_nothing_is_advised_that_cannot_be_certified(served, unmatched, bound, alpha):
    error = refusal(matched(served, unmatched, bound), alpha, 0.1)
    assert (error.minimum_alpha, error.required_calibration) == (None, None)
    assert "ask for alpha >=" not in str(error)
    assert "ask for alpha >=" not in str(refusal(matched(1), 0.5, 1e-6))  # 1 after rounding
