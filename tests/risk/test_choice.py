import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidConfig, InvalidData
from rcir.risk import SCORE_FUNCTIONS, Constant, Quantile, SearchResults, fit_score_function

ALPHAS = (0.05, 0.1, 0.2)
SUITED = ("constant", "minmax", "quantile", "learned")  # to few queries without keys


def draw(kind, n=800, seed=0, depth=80):
    """Queries of which a part is late: the uncertain ones, the certain ones, or any."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.uniform(size=n)
    hard = {"good": uncertainty, "wrong": 1 - uncertainty, "noise": rng.uniform(size=n)}[kind]
    late = np.minimum(1 + rng.geometric(0.1, n), depth)
    return SearchResults(uncertainty, depth), np.where(rng.uniform(size=n) < 0.6 * hard, late, 1.0)


def allowed(n, alpha, delta=0.1):
    return max(m for m in range(-1, n) if binom.cdf(m, n, alpha) <= delta)


@pytest.mark.parametrize("seed", range(4))
def test_auto_takes_what_needs_smaller_sets_where_uncertainty_tells(seed):
    score_function, sizes = fit_score_function("auto", *draw("good", seed=seed))
    assert score_function.name != "constant"
    for alpha in ALPHAS:
        assert sizes[score_function.name][alpha] <= sizes["constant"][alpha]
    assert sizes[score_function.name][0.1] < 0.9 * sizes["constant"][0.1]


@pytest.mark.parametrize("kind", ["noise", "wrong"])
@pytest.mark.parametrize("seed", range(4))
def test_auto_takes_none_that_scales_with_uncertainty_where_it_misleads(kind, seed):
    score_function, sizes = fit_score_function("auto", *draw(kind, seed=seed))
    assert score_function.name in ("constant", "learned")  # which can learn to disregard it
    assert all(sizes[score_function.name][alpha] <= sizes["constant"][alpha] for alpha in ALPHAS)
    assert max(sizes["quantile"][a] / sizes["constant"][a] for a in ALPHAS) > 1


def test_auto_takes_a_constant_where_no_query_needs_more_than_one():
    rng = np.random.default_rng(0)
    assert (
        fit_score_function("auto", SearchResults(rng.uniform(size=500), 20), np.ones(500))[0].name
        == "constant"
    )


def test_whatever_auto_takes_queries_that_look_alike_get_sets_of_one_size():
    ranks = np.random.default_rng(1).choice([1.0, 2.0, 3.0, 7.0], 500, p=[0.5, 0.3, 0.1, 0.1])
    alike = SearchResults(np.zeros(500), 20)
    score_function, _ = fit_score_function("auto", alike, ranks)
    for threshold in (0.0, 1.5, 9.0, 80.0):
        assert len(set(score_function.sizes(alike, threshold).tolist())) == 1


@pytest.mark.parametrize("kind", ["good", "noise", "wrong"])
@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_the_smallest_mean_ratio_of_those_never_larger_than_constant(kind, seed):
    score_function, sizes = fit_score_function("auto", *draw(kind, n=300, seed=seed))
    assert tuple(sizes) == SUITED
    ratios = {
        name: [sizes[name][alpha] / sizes["constant"][alpha] for alpha in sizes["constant"]]
        for name in sizes
    }
    eligible = [name for name in sizes if max(ratios[name]) <= 1]
    best = min(eligible, key=lambda name: math.prod(ratios[name]))
    assert score_function.name == best


@pytest.mark.parametrize("n", [50, 203, 800])
def test_constant_is_compared_at_the_smallest_size_with_few_enough_misses(n):
    results, ranks = draw("good", n)
    _, sizes = fit_score_function("auto", results, ranks)
    expected = {}
    for alpha in ALPHAS:
        if allowed(n, alpha) >= 0:
            few = allowed(n, alpha)
            fits = (k for k in range(1, 81) if np.sum(ranks > k) <= few)
            expected[alpha] = float(next(fits))
    assert sizes["constant"] == expected


def test_quantile_is_compared_on_queries_that_it_was_not_fitted_on():
    results, ranks = draw("good", 203)
    _, sizes = fit_score_function("auto", results, ranks)
    scales = []
    for i, u in enumerate(results.uncertainty):
        others = [v for j, v in enumerate(results.uncertainty) if j % 5 != i % 5]
        scales.append(max(1, sum(v <= u * (1 + 1e-3) for v in others)) / len(others))
    needed = sorted((rank - 1) / scale for rank, scale in zip(ranks, scales, strict=True))[::-1]
    for alpha in ALPHAS:
        threshold = needed[allowed(203, alpha)] * (1 + 1e-3)  # which the sets are allowed
        each = [min(80, 1 + int(threshold * scale)) for scale in scales]
        assert sizes["quantile"][alpha] == pytest.approx(np.mean(each), rel=1e-9)


def test_the_chosen_score_function_is_fitted_on_the_whole_split():
    for seed in range(20):
        results, ranks = draw("good", 203, seed)
        score_function, _ = fit_score_function("auto", results, ranks)
        if isinstance(score_function, Quantile):
            break
    assert score_function.state()["sample"].tolist() == sorted(results.uncertainty.tolist())


def test_levels_that_nothing_attains_are_left_out_of_the_comparison():
    results, ranks = draw("good", 400)
    ranks[::8] = np.inf  # an eighth is lost
    _, sizes = fit_score_function("auto", results, ranks)
    assert {name: tuple(sizes[name]) for name in sizes} == dict.fromkeys(SUITED, (0.2,))
    score_function, sizes = fit_score_function("auto", results, np.full(400, np.inf))
    assert score_function.name == "constant"
    assert sizes == {name: {} for name in SUITED}


def test_other_levels_can_be_compared():
    _, sizes = fit_score_function("auto", *draw("good"), alphas=(0.15,), delta=0.01)
    assert tuple(sizes["constant"]) == (0.15,)
    ranks = draw("good")[1]
    few = allowed(800, 0.15, 0.01)
    fits = (k for k in range(1, 81) if np.sum(ranks > k) <= few)
    assert sizes["constant"][0.15] == next(fits)


@pytest.mark.parametrize("n", [2, 49])
def test_too_few_queries_to_compare_on_leave_a_constant(n):
    results, ranks = draw("good", n)
    score_function, sizes = fit_score_function("auto", results, ranks)
    assert isinstance(score_function, Constant)
    assert sizes == {}


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_a_named_score_function_is_fitted_without_a_comparison(name):
    results, ranks = draw("good", 100)
    results = replace(results, keys=np.tile(np.arange(80), (100, 1)))
    score_function, sizes = fit_score_function(name, results, ranks)
    assert type(score_function) is SCORE_FUNCTIONS[name]
    assert sizes == {}
    expected = SCORE_FUNCTIONS[name].fit(results, ranks).state()
    for key, values in score_function.state().items():
        np.testing.assert_array_equal(values, expected[key])


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(InvalidConfig, match="quantile, learned, boosted, reranked, auto"):
        fit_score_function("best", *draw("good", 100))


@pytest.mark.parametrize("name", ["auto", *SCORE_FUNCTIONS])
def test_a_split_that_makes_no_sense_is_refused(name):
    results, ranks = draw("good", 100)
    for bad in (ranks[:-1], np.full(100, 81.0), np.full(100, np.nan)):
        with pytest.raises(InvalidData, match="ranks must be"):
            fit_score_function(name, results, bad)
    with pytest.raises(InvalidData, match="at least 2"):
        fit_score_function(name, results[:1], ranks[:1])
