import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta, binom

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel
from rcir.risk import SCORE_FUNCTIONS, Constant, MissController, SearchResults

LEVELS = [(0.02, 0.1), (0.05, 0.01), (0.1, 0.1), (0.3, 0.5), (0.45, 0.05)]
BOUNDS = ("binomial", "hoeffding", "bentkus", "hoeffding-bentkus", "betting")


def keyed(uncertainty, depth):
    """Queries of which every two candidates share a key."""
    return SearchResults(
        np.asarray(uncertainty, float),
        depth,
        keys=np.tile(np.arange(depth) // 2, (len(uncertainty), 1)),
    )


def calibration(n=300, seed=0, depth=60):
    """Queries whose first match is the first of its key."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.gamma(2.0, size=n)
    ranks = 1 + 2 * np.floor(rng.exponential(uncertainty))
    return keyed(uncertainty, depth), np.where(ranks > depth, np.inf, ranks)


@pytest.fixture(scope="module", params=SCORE_FUNCTIONS.values(), ids=lambda kind: kind.name)
def score_function(request):
    return request.param.fit(*calibration(200, seed=9))


def assert_smallest(controller, threshold, results, ranks, allowed):
    """At most `allowed` need more than threshold, more at any threshold below at which some set
    grows.

    The sets hold what scores up to a thousandth more than threshold, too.
    """
    ordered, columns = controller.score_function.ordered(results)
    candidate_scores, needed = (
        controller.score_function.candidate_scores(ordered),
        np.full(len(ranks), np.inf),
    )
    for query in np.flatnonzero(np.isfinite(ranks)):
        place = int(ranks[query]) - 1
        if columns is not None:
            place = columns[query].tolist().index(place)
        needed[query] = candidate_scores[query, place]
    assert np.sum(needed > threshold) <= allowed
    grows = np.unique(candidate_scores)
    for candidate in grows[grows < threshold][-200:]:
        assert np.sum(needed > candidate) > allowed
    held = np.sum(candidate_scores <= threshold * (1 + 1e-3), axis=1)
    assert controller.sizes(results, threshold).tolist() == held.tolist()


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


@pytest.mark.parametrize("alpha", [0.05, 0.1, 1 / 3, 0.45, 0.9, 0.9999])
def test_the_marginal_threshold_is_the_smallest_with_a_corrected_risk_of_at_most_alpha(
    score_function, alpha
):
    results, ranks = calibration(299)
    controller = MissController.calibrate(score_function, results, ranks)
    allowed = max(m for m in range(299) if Fraction(m + 1, 300) <= Fraction(alpha))
    assert_smallest(controller, controller.threshold(alpha, None), results, ranks, allowed)
    served = np.sort(score_function.scores(results, ranks))
    place = math.ceil(300 * (1 - Fraction(alpha)))  # split conformal prediction's quantile
    assert controller.threshold(alpha, None) == served[max(place, 1) - 1]
    assert controller.risk_bound(alpha, None) == pytest.approx((allowed + 1) / 300)


@pytest.mark.parametrize("bound", ["binomial", "betting"])
@pytest.mark.parametrize(("alpha", "delta"), [(0.1, 0.1), (0.2, 0.5), (0.45, 0.01), (0.1, 0.9)])
def test_simultaneous_levels_are_judged_at_the_local_level(bound, alpha, delta, naive_local_level):
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
def test_a_calibration_that_goes_on_is_judged_by_the_mean_likelihood_ratio(bound, alpha, delta):
    results, ranks = calibration()
    controller = MissController.calibrate(Constant(), results, ranks, bound)

    def wealth(misses):
        def ratio(risk):
            served = ((1 - risk) / (1 - alpha)) ** (300 - misses)
            return (risk / alpha) ** misses * served / alpha

        return quad(ratio, 0, alpha, points=[min(alpha, misses / 300)], limit=200)[0]

    allowed = max(m for m in range(300) if wealth(m) >= 1 / delta)
    threshold = controller.threshold(alpha, delta, anytime=True)
    assert_smallest(controller, threshold, results, ranks, allowed)
    assert controller.risk_bound(alpha, delta, anytime=True) == alpha
    sizes = controller.size(results, alpha, delta, anytime=True)
    assert sizes.tolist() == [min(60, 1 + int(threshold))] * 300


def test_all_levels_and_all_numbers_of_queries_need_a_delta_and_exclude_each_other():
    controller = MissController(Constant(), np.zeros(100, np.float32), depth=5)
    for option in ("simultaneous", "anytime"):
        with pytest.raises(InvalidRiskLevel, match="need a delta"):
            controller.threshold(0.9, None, **{option: True})
    for ask in (controller.threshold, controller.risk_bound, controller.required_calibration):
        with pytest.raises(InvalidConfig, match="exclude each other"):
            ask(0.9, 0.1, simultaneous=True, anytime=True)


def test_one_more_miss_than_allowed_moves_threshold_to_the_next_rank():
    # 3,000 queries allow 134 misses at (0.05, 0.1).
    for late, expected in ((134, 0.0), (135, 6.0)):
        ranks = np.repeat([1.0, 7.0], [3000 - late, late])
        controller = MissController.calibrate(Constant(), SearchResults(np.zeros(3000), 10), ranks)
        assert controller.threshold(0.05, 0.1) == expected


def test_sizes_stop_at_the_search_depth(score_function):
    controller = MissController(score_function, np.zeros(1, np.float32), depth=12)
    sizes = controller.sizes(keyed([0.1, 2.0, 50.0], 12), threshold=1e10)
    assert sizes.tolist() == [12, 12, 12]


def test_queries_that_were_searched_to_another_depth_are_refused(score_function):
    controller = MissController(score_function, np.zeros(1, np.float32), depth=12)
    with pytest.raises(InvalidData, match="searched to depth 13, the calibration queries to 12"):
        controller.sizes(SearchResults(np.zeros(2), 13), threshold=1.0)


def test_no_bound_is_less_careful_than_the_exact_one(score_function):
    results, ranks = calibration(n=2000)
    scores = score_function.scores(results, ranks)
    exact, *others = (MissController(score_function, scores, 60, bound) for bound in BOUNDS)
    for other in others:
        gaps = [other.threshold(a, 0.1) - exact.threshold(a, 0.1) for a in (0.05, 0.1, 0.2, 0.3)]
        assert min(gaps) >= 0
        if score_function.name != "constant":  # whose thresholds are few
            assert max(gaps) > 0


def test_the_order_of_the_queries_does_not_matter(score_function):
    results, ranks = calibration()
    shuffled = np.random.default_rng(5).permutation(300)
    first = MissController.calibrate(score_function, results, ranks)
    second = MissController.calibrate(score_function, results[shuffled], ranks[shuffled])
    np.testing.assert_array_equal(first.scores, second.scores)


def test_queries_without_a_match_are_counted(score_function):
    results, ranks = calibration()
    ranks[:17] = np.inf
    controller = MissController.calibrate(score_function, results, ranks)
    assert controller.unmatched == sum(rank == np.inf for rank in ranks)
    assert controller.n_calibration == 300


@pytest.mark.parametrize("n", [30, 300, 3000])
@pytest.mark.parametrize("bound", BOUNDS)
def test_the_certified_risk_is_at_most_alpha_and_allows_no_more_misses(n, bound, naive_p_value):
    controller = MissController(Constant(), np.zeros(n, np.float32), 5, bound)
    for alpha in np.linspace(0.25, 0.9, 8):
        certified = controller.risk_bound(alpha, 0.1)
        assert certified <= alpha
        assert controller.risk_bound(certified * (1 + 1e-9), 0.1) == certified
        few = int(0.8 * alpha * n) if n == 3000 else 0  # which are certainly allowed
        allowed = next(m for m in range(few, n) if naive_p_value(m + 1, n, alpha, bound) > 0.1)
        assert naive_p_value(allowed, n, certified * (1 + 1e-9), bound) <= 0.1
        assert naive_p_value(allowed, n, certified * (1 - 1e-6), bound) > 0.1


@pytest.mark.parametrize(
    "ranks",
    [
        np.zeros(0),
        np.ones(3),
        np.ones((2, 1)),
        np.array([1, np.nan]),
        np.array([1, -np.inf]),
        np.array([1, 0]),
        np.array([1, 11]),
        np.array([1, 2.5]),
    ],
)
def test_calibration_queries_that_make_no_sense_are_refused(ranks):
    with pytest.raises(InvalidData):
        MissController.calibrate(Constant(), SearchResults(np.zeros(2), 10), ranks)


def test_no_calibration_queries_and_an_unknown_bound_are_refused():
    with pytest.raises(InvalidData, match="n >= 1"):
        MissController.calibrate(Constant(), SearchResults(np.zeros(0), 10), np.zeros(0))
    with pytest.raises(InvalidConfig, match="choose one of binomial"):
        MissController.calibrate(Constant(), SearchResults(np.zeros(2), 10), np.ones(2), "normal")


def test_scores_in_any_order_mean_the_same():
    scores = np.random.default_rng(0).permutation(np.arange(100.0))
    controller = MissController(Constant(), scores, 200)
    # P(Binomial(100, .1) <= 5) = .058 and P(Binomial(100, .1) <= 6) = .117
    assert controller.threshold(0.1, 0.1) == 94.0
