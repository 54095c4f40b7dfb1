"""Which score function is taken for which risk, against comparisons that are made naively."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidConfig, InvalidData
from rcir.risk import (
    RISKS,
    SCORE_FUNCTIONS,
    Constant,
    MatchProbability,
    Quantile,
    SearchResults,
    fit_score_function,
    score_function_class,
)

SEVERAL = ("recall", "false-discovery")
OF_ALL = ("constant", "minmax", "quantile", "match-probability")


def first(relevant):
    return np.array([1.0 + row.index(True) if True in row else np.inf for row in relevant.tolist()])


def cross_fitted(kind, results, relevant):
    """Of each query, its scores and whether each rank is a match, as others taught the score
    function.
    """
    n, depth = relevant.shape
    candidate_scores, matches = np.zeros((n, depth), np.float32), np.zeros((n, depth), bool)
    for held in range(5):
        rest = np.array([i for i in range(n) if i % 5 != held])
        score_function = kind.fit(results[rest], relevant[rest])
        for i in range(held, n, 5):
            one = results[i : i + 1]
            columns = score_function.ordered(one)[1]
            candidate_scores[i] = score_function.candidate_scores(one)[0]
            matches[i] = relevant[i] if columns is None else relevant[i][columns[0]]
    return candidate_scores, matches


def measured(candidate_scores, matches, totals, threshold, risk):
    """Mean loss, mean size and mean number of true matches of the sets of one threshold."""
    held = candidate_scores <= np.float32(threshold * (1 + 1e-3))
    sizes, hits = held.sum(axis=1), (held & matches).sum(axis=1)
    if risk == "recall":
        losses = np.where(totals > 0, 1 - hits / np.maximum(totals, 1), 1.0)
    else:
        losses = 1 - hits / sizes
    return np.mean(losses), sizes.mean(), hits.mean()


@pytest.mark.parametrize("risk", SEVERAL)
@pytest.mark.parametrize("kind", [Constant, Quantile, MatchProbability])
def test_sets_are_compared_that_others_taught_at_every_level(kind, risk, one_key):
    results, relevant, totals = one_key(120, 3)
    _, sizes = fit_score_function("auto", results, relevant, risk=risk, totals=totals)
    candidate_scores, matches = cross_fitted(kind, results, relevant)
    all_scores = np.unique(candidate_scores[np.isfinite(candidate_scores)]).tolist()
    table = [
        measured(candidate_scores, matches, totals, threshold, risk) for threshold in all_scores
    ]
    found = sizes[kind.name]
    for alpha in RISKS[risk].levels:
        allowed = [row for row in table if row[0] <= alpha]
        assert (alpha in found) == bool(allowed)
        if not allowed:
            continue
        best = allowed[0][1] if risk == "recall" else 1 / allowed[-1][2]
        slack = 0 if kind is Constant else 0.05  # of few scores each is a threshold, else some are
        assert best * (1 - 1e-9) <= found[alpha] <= best * (1 + slack + 1e-9)
    assert found


@pytest.mark.parametrize("risk", SEVERAL)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_taken_is_never_worse_than_constant_and_better_where_candidates_tell(
    risk, seed, one_key
):
    results, relevant, totals = one_key(400, seed)
    score_function, sizes = fit_score_function("auto", results, relevant, risk=risk, totals=totals)
    assert tuple(sizes) == OF_ALL
    assert score_function.name == "match-probability"
    ratios = [
        sizes[score_function.name][alpha] / sizes["constant"][alpha] for alpha in sizes["constant"]
    ]
    assert max(ratios) <= 1
    # Large sets are alike; where they must not be, it gives smaller ones, or some at all.
    assert min(ratios) < 0.9 or len(sizes[score_function.name]) > len(sizes["constant"])
    again = MatchProbability.fit(results, relevant)  # on the whole split
    np.testing.assert_array_equal(
        score_function.candidate_scores(results), again.candidate_scores(results)
    )


@pytest.mark.parametrize("risk", SEVERAL)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_taken_that_is_worse_than_constant_at_any_level(risk, seed):
    rng = np.random.default_rng(seed)
    uncertainty = rng.uniform(size=400)
    late = (np.arange(6) >= 3) == (uncertainty < 0.5)[:, None]  # of the certain ones
    relevant = rng.uniform(size=(400, 6)) < np.where(late, 0.8, 0.1)
    score_function, sizes = fit_score_function(
        "auto", SearchResults(uncertainty, 6), relevant, risk=risk
    )
    constant = sizes["constant"]
    assert all(sizes[score_function.name][alpha] <= constant[alpha] for alpha in constant)
    if risk == "recall":
        assert any(sizes["minmax"][alpha] > constant[alpha] for alpha in constant)


def test_what_attains_levels_that_a_constant_does_not_is_taken():
    """Of two candidates the second matches, of another half the first: only features tell which."""
    rng = np.random.default_rng(0)
    second = rng.uniform(size=400) < 0.5
    relevant = np.stack([~second, second], axis=1)
    tells = relevant + rng.normal(scale=0.2, size=(400, 2))
    results = SearchResults(np.zeros(400), 2, candidate_uncertainty=tells)
    score_function, sizes = fit_score_function(
        "auto", results, relevant, alphas=(), risk="false-discovery"
    )
    assert score_function.name == "match-probability"
    assert 0.1 in sizes["match-probability"]
    assert min(sizes["constant"]) == 0.5  # one of the two, or both


@pytest.mark.parametrize("risk", SEVERAL)
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_a_model_of_first_matches_stands_for_one_of_all_matches(name, risk, one_key):
    results, relevant, _ = one_key(100, 0)
    score_function, sizes = fit_score_function(name, results, relevant, risk=risk)
    expected = name if name in ("constant", "minmax", "quantile") else "match-probability"
    assert (score_function.name, sizes) == (expected, {})


def test_misses_compare_every_score_function_that_suits(one_key):
    results, relevant, totals = one_key(1000, 0)
    score_function, sizes = fit_score_function("auto", results, relevant, totals=totals)
    assert set(sizes) == set(SCORE_FUNCTIONS) - {"boosted"}  # it is for candidates without labels
    best = min(np.mean(np.log(list(of.values()))) for of in sizes.values())
    assert np.mean(np.log(list(sizes[score_function.name].values()))) == best
    assert score_function.name == "reranked"  # the candidates tell which key is right
    unlabelled = replace(results, keys=None)
    _, many = fit_score_function("auto", unlabelled, relevant)
    _, fewer = fit_score_function("auto", unlabelled[:999], relevant[:999])
    assert set(many) - set(fewer) == {"boosted"}
    several = relevant.copy()
    several[0, :3] = True
    results.keys[0, :3] = [0, 1, 2]
    _, others = fit_score_function("auto", results[:200], several[:200])
    assert "reranked" not in others


def test_labels_ranked_anew_are_compared_by_the_price_of_the_right_one(one_key):
    results, relevant, _ = one_key(200, 1)
    _, sizes = fit_score_function("auto", results, relevant)
    candidate_scores, matches = cross_fitted(SCORE_FUNCTIONS["reranked"], results, relevant)
    all_scores = np.where(matches, candidate_scores, np.inf).min(axis=1)
    for alpha, size in sizes["reranked"].items():
        allowed = max(m for m in range(200) if binom.cdf(m, 200, alpha) <= 0.1)
        threshold = sorted(all_scores.tolist())[::-1][allowed]
        assert size == pytest.approx(
            np.mean((candidate_scores <= threshold * (1 + 1e-3)).sum(axis=1))
        )
    assert tuple(sizes["reranked"])


def test_matches_and_risks_that_make_no_sense_are_refused(one_key):
    results, relevant, _ = one_key(60, 0)
    for name in ("auto", "learned"):
        with pytest.raises(InvalidConfig, match="choose one of miss, recall, false-discovery"):
            fit_score_function(name, results, relevant, risk="precision")
        with pytest.raises(InvalidData, match="bool of shape"):
            fit_score_function(name, results, relevant[:, :-1], risk="recall")
    assert score_function_class("match-probability") is MatchProbability
