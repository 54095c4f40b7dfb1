"""The automatic choice of a score function, against comparisons that are made naively."""

import math

import numpy as np
import pytest

from rcir.risk import (
    RISKS,
    SCORE_FUNCTIONS,
    Constant,
    Learned,
    MatchProbability,
    Quantile,
    SearchResults,
    fit_score_function,
    selection,
)
from rcir.store.codec import encode
from tests.risk.conftest import naive_allowed_misses

ALPHAS = (0.05, 0.1, 0.2)
FEW_WITHOUT_KEYS = ("constant", "minmax", "quantile", "learned")
OTHER_RISKS = ("recall", "false-discovery")


def draw(kind, n=800, seed=0, depth=80):
    """Queries some of which match late: the uncertain ones, the certain ones, or any."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.uniform(size=n)
    hard = {"good": uncertainty, "wrong": 1 - uncertainty, "noise": rng.uniform(size=n)}[kind]
    late = np.minimum(1 + rng.geometric(0.1, n), depth)
    return SearchResults(uncertainty, depth), np.where(rng.uniform(size=n) < 0.6 * hard, late, 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_informative_uncertainty_gives_smaller_sets(seed):
    score_function, sizes = fit_score_function("auto", *draw("good", seed=seed))
    assert score_function.name != "constant"
    for alpha in ALPHAS:
        assert sizes[score_function.name][alpha] <= sizes["constant"][alpha]
    assert sizes[score_function.name][0.1] < 0.9 * sizes["constant"][0.1]


@pytest.mark.parametrize("kind", ["noise", "wrong"])
@pytest.mark.parametrize("seed", range(4))
def test_misleading_uncertainty_is_not_used_as_a_scale(kind, seed):
    score_function, sizes = fit_score_function("auto", *draw(kind, seed=seed))
    assert score_function.name in ("constant", "learned")  # which can learn to disregard it
    for alpha in ALPHAS:
        assert sizes[score_function.name][alpha] <= 1.1 * sizes["constant"][alpha]
    assert max(sizes["quantile"][a] / sizes["constant"][a] for a in ALPHAS) > 1


@pytest.mark.parametrize("kind", ["good", "noise", "wrong"])
@pytest.mark.parametrize("seed", range(3))
def test_only_much_smaller_sets_replace_learned_ones(kind, seed, monkeypatch):
    split = draw(kind, n=300, seed=seed)
    score_function, sizes = fit_score_function("auto", *split)
    assert tuple(sizes) == FEW_WITHOUT_KEYS
    assert score_function.name == "learned"
    means = {name: math.prod(sizes[name].values()) ** (1 / 3) for name in sizes}
    best = min(means, key=means.get)
    for ratio, expected in ((1.0, best), (means["learned"] / means[best] * 1.001, "learned")):
        monkeypatch.setattr(selection, "MUCH_SMALLER", ratio)
        assert fit_score_function("auto", *split)[0].name == expected


@pytest.mark.parametrize("seed", range(3))
def test_recall_takes_the_smallest_mean_ratio_of_those_never_larger_than_constant(seed, one_key):
    results, relevant, _ = one_key(300, seed)
    score_function, sizes = fit_score_function("auto", results, relevant, risk="recall")
    ratios = {
        name: [sizes[name].get(level, np.inf) / size for level, size in sizes["constant"].items()]
        for name in sizes
    }
    eligible = [name for name in sizes if max(ratios[name]) <= 1]
    assert score_function.name == min(eligible, key=lambda name: math.prod(ratios[name]))


@pytest.mark.parametrize("n", [50, 203, 800])
@pytest.mark.parametrize(("alphas", "delta"), [(ALPHAS, 0.1), ((0.15,), 0.01)])
def test_constant_is_compared_at_the_smallest_size_with_few_enough_misses(n, alphas, delta):
    results, ranks = draw("good", n)
    _, sizes = fit_score_function("auto", results, ranks, alphas=alphas, delta=delta)
    expected = {}
    for alpha in alphas:
        few = naive_allowed_misses(n, alpha, delta)
        if few >= 0:
            expected[alpha] = float(next(k for k in range(1, 81) if np.sum(ranks > k) <= few))
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
        threshold = needed[naive_allowed_misses(203, alpha)] * (1 + 1e-3)
        each = [min(80, 1 + int(threshold * scale)) for scale in scales]
        assert sizes["quantile"][alpha] == pytest.approx(np.mean(each), rel=1e-9)


def test_unattainable_levels_are_left_out_of_the_comparison():
    results, ranks = draw("good", 400)
    ranks[::8] = np.inf  # an eighth is lost
    _, sizes = fit_score_function("auto", results, ranks)
    assert {name: tuple(sizes[name]) for name in sizes} == dict.fromkeys(FEW_WITHOUT_KEYS, (0.2,))
    _, sizes = fit_score_function("auto", results, np.full(400, np.inf))
    assert sizes == {name: {} for name in FEW_WITHOUT_KEYS}


@pytest.mark.parametrize("n", [2, 49])
def test_too_few_queries_to_compare_on_have_a_fixed_choice(n, one_key):
    score_function, sizes = fit_score_function("auto", *draw("good", n))
    assert (type(score_function), sizes) == (Learned, {})
    results, relevant, _ = one_key(n, 0)
    score_function, sizes = fit_score_function("auto", results, relevant, risk="recall")
    assert (type(score_function), sizes) == (Constant, {})


@pytest.mark.parametrize("risk", ["miss", *OTHER_RISKS])
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_a_named_score_function_is_fitted_without_a_comparison(name, risk, one_key):
    results, relevant, _ = one_key(100, 0)
    score_function, sizes = fit_score_function(name, results, relevant, risk=risk)
    of_all_matches = risk in OTHER_RISKS and name not in FEW_WITHOUT_KEYS[:3]
    kind = MatchProbability if of_all_matches else SCORE_FUNCTIONS[name]
    assert (type(score_function), sizes) == (kind, {})
    np.testing.assert_equal(encode(score_function), encode(kind.fit(results, relevant)))


def cross_fitted(kind, results, relevant):
    """Scores and relevance by rank, of score functions fitted on the other four fifths."""
    n, depth = relevant.shape
    scores, matches = np.zeros((n, depth), np.float32), np.zeros((n, depth), bool)
    for fold in range(5):
        rest = np.array([i for i in range(n) if i % 5 != fold])
        score_function = kind.fit(results[rest], relevant[rest])
        for i in range(fold, n, 5):
            one = results[i : i + 1]
            ranking = score_function.rank(one)
            scores[i] = ranking.scores[0]
            matches[i] = ranking.take(relevant[i : i + 1])[0]
    return scores, matches


def measure(scores, matches, totals, threshold, risk):
    """Mean loss, mean size and mean number of matches of the sets of one threshold."""
    included = scores <= np.float32(threshold * (1 + 1e-3))
    sizes, hits = included.sum(axis=1), (included & matches).sum(axis=1)
    if risk == "recall":
        losses = np.where(totals > 0, 1 - hits / np.maximum(totals, 1), 1.0)
    else:
        losses = 1 - hits / sizes
    return np.mean(losses), sizes.mean(), hits.mean()


@pytest.mark.parametrize("risk", OTHER_RISKS)
@pytest.mark.parametrize("kind", [Constant, Quantile, MatchProbability])
def test_cross_fitted_sets_are_compared_at_every_level(kind, risk, one_key):
    results, relevant, totals = one_key(120, 3)
    _, compared = fit_score_function("auto", results, relevant, risk=risk, n_relevant=totals)
    sizes = compared[kind.name]
    scores, matches = cross_fitted(kind, results, relevant)
    thresholds = np.unique(scores[np.isfinite(scores)]).tolist()
    table = [measure(scores, matches, totals, threshold, risk) for threshold in thresholds]
    for alpha in RISKS[risk].levels:
        attained = [row for row in table if row[0] <= alpha]
        assert (alpha in sizes) == bool(attained)
        if attained:
            best = attained[0][1] if risk == "recall" else 1 / attained[-1][2]
            slack = 0 if kind is Constant else 0.05  # of many scores some are thresholds
            assert best * (1 - 1e-9) <= sizes[alpha] <= best * (1 + slack + 1e-9)
    assert sizes


@pytest.mark.parametrize("risk", OTHER_RISKS)
@pytest.mark.parametrize("seed", range(3))
def test_match_probability_is_chosen_where_candidates_are_informative(risk, seed, one_key):
    results, relevant, totals = one_key(400, seed)
    score_function, sizes = fit_score_function(
        "auto", results, relevant, risk=risk, n_relevant=totals
    )
    assert tuple(sizes) == ("constant", "minmax", "quantile", "match-probability")
    assert score_function.name == "match-probability"
    chosen, constant = sizes["match-probability"], sizes["constant"]
    ratios = [chosen[alpha] / constant[alpha] for alpha in constant]
    assert max(ratios) <= 1
    # Large sets are alike; where they must not be, it gives smaller ones, or some at all.
    assert min(ratios) < 0.9 or len(chosen) > len(constant)
    whole = MatchProbability.fit(results, relevant)
    np.testing.assert_array_equal(score_function.rank(results).scores, whole.rank(results).scores)


@pytest.mark.parametrize("risk", OTHER_RISKS)
@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_not_worse_than_constant_at_any_level(risk, seed):
    rng = np.random.default_rng(seed)
    uncertainty = rng.uniform(size=400)
    late = (np.arange(6) >= 3) == (uncertainty < 0.5)[:, None]  # of the certain ones
    relevant = rng.uniform(size=(400, 6)) < np.where(late, 0.8, 0.1)
    results = SearchResults(uncertainty, 6)
    score_function, sizes = fit_score_function("auto", results, relevant, risk=risk)
    constant = sizes["constant"]
    assert all(sizes[score_function.name][alpha] <= constant[alpha] for alpha in constant)
    if risk == "recall":
        assert any(sizes["minmax"][alpha] > constant[alpha] for alpha in constant)


def test_a_score_function_that_attains_more_levels_is_chosen():
    """The first or the second of two candidates matches: only a feature tells which."""
    rng = np.random.default_rng(0)
    second = rng.uniform(size=400) < 0.5
    relevant = np.stack([~second, second], axis=1)
    feature = relevant + rng.normal(scale=0.2, size=(400, 2))
    results = SearchResults(np.zeros(400), 2, candidate_uncertainty=feature)
    score_function, sizes = fit_score_function(
        "auto", results, relevant, alphas=(), risk="false-discovery"
    )
    assert score_function.name == "match-probability"
    assert 0.1 in sizes["match-probability"]
    assert min(sizes["constant"]) == 0.5  # one of the two, or both


def test_misses_compare_every_score_function(one_key):
    results, relevant, totals = one_key(1000, 0)
    score_function, sizes = fit_score_function("auto", results, relevant, n_relevant=totals)
    assert set(sizes) == set(SCORE_FUNCTIONS)
    assert score_function.name == "learned"
    means = {name: np.mean(np.log(list(of.values()))) for name, of in sizes.items()}
    assert means["learned"] == min(means.values())


def test_misses_are_compared_by_the_least_score_of_a_match(one_key):
    results, relevant, _ = one_key(200, 1)
    _, sizes = fit_score_function("auto", results, relevant)
    scores, matches = cross_fitted(Learned, results, relevant)
    falling = np.sort(np.where(matches, scores, np.inf).min(axis=1))[::-1]
    assert sizes["learned"]
    for alpha, size in sizes["learned"].items():
        threshold = falling[naive_allowed_misses(200, alpha)]
        assert size == pytest.approx((scores <= threshold * (1 + 1e-3)).sum(axis=1).mean())
