"""Scores and set sizes of every score function, against their definitions."""

import numpy as np
import pytest

from rcir.errors import InvalidConfig, InvalidData
from rcir.metrics.labels import NO_CANDIDATE
from rcir.risk import (
    SCORE_FUNCTIONS,
    Constant,
    MinMax,
    Quantile,
    SearchResults,
    fit_score_function,
    score_function_class,
)
from rcir.risk.selection import ScoreFunctionName
from tests.risk.conftest import with_shared_keys

KINDS = tuple(SCORE_FUNCTIONS.values())
SCALED = (Constant, MinMax, Quantile)
DEPTH = 150
TOLERATED = 1 + 1e-3  # times the threshold


def draw_queries(n=400, seed=2, depth=DEPTH):
    inside = np.random.default_rng(seed).lognormal(size=n)
    beyond = [-5.0, 0.0, 1e-300, 1e6]  # outside the range of the tuning split
    return with_shared_keys(np.concatenate([inside, beyond]), depth)


def draw_split(depth=DEPTH):
    """Queries whose first match is the first of its key."""
    rng = np.random.default_rng(1)
    uncertainty = rng.lognormal(size=300)
    ranks = 1 + 2 * np.floor(rng.exponential(2 * uncertainty))
    return with_shared_keys(uncertainty, depth), np.where(ranks > depth, np.inf, ranks)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def score_function(request):
    return request.param.fit(*draw_split())


def places(score_function, results, ranks):
    """Places, in the order of the score function, of ranks counted nearest first."""
    columns = score_function.rank(results).columns
    if columns is None:
        return [int(rank) for rank in ranks]
    return [row.index(int(rank) - 1) + 1 for row, rank in zip(columns.tolist(), ranks, strict=True)]


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0, 7.5, 123.4, 9999.0])
def test_sizes_follow_the_definition_query_by_query(threshold):
    sample, queries = draw_split()[0].uncertainty, draw_queries()
    low, high = min(sample), max(sample)
    definitions = {
        Constant: lambda u: 1.0,
        MinMax: lambda u: min(max((u - low) / (high - low), 1 / 300), 1.0),
        Quantile: lambda u: max(1, sum(other <= TOLERATED * u for other in sample)) / 300,
    }
    for kind, scale in definitions.items():
        sizes = kind.fit(*draw_split()).sizes(queries, threshold)
        for u, size in zip(queries.uncertainty, sizes, strict=True):
            grown = threshold * TOLERATED * scale(u)
            slack = 1e-5 * grown  # where it is a whole number but for the rounding of scores
            assert min(DEPTH, 1 + int(grown - slack)) <= size <= min(DEPTH, 1 + int(grown + slack))


@pytest.mark.parametrize("kind", SCALED)
def test_a_scaled_score_is_the_rank_over_the_scale_in_single_precision(kind):
    fitted, queries = kind.fit(*draw_split()), draw_queries(n=20)
    ranking = fitted.rank(queries)
    scores = ranking.scores
    assert scores.dtype == np.float32
    for row, scale in zip(scores, fitted.scale(queries.uncertainty), strict=True):
        assert row.tolist() == [float(np.float32(k) / np.float32(scale)) for k in range(DEPTH)]
    assert ranking.selection_score.tolist() == queries.uncertainty.tolist()


def test_scores_start_at_zero_and_never_fall(score_function):
    scores = score_function.rank(draw_queries()).scores
    assert (scores.shape, scores.dtype) == ((404, DEPTH), np.float32)
    assert (scores[:, 0] == 0).all()
    assert (np.diff(scores, axis=1) >= 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_score_is_the_smallest_sufficient_threshold_within_a_thousandth(score_function, seed):
    queries = draw_queries(n=40, seed=seed)
    ranks = np.random.default_rng(seed).integers(2, DEPTH + 1, len(queries))
    needed = places(score_function, queries, ranks)
    scores = score_function.match_scores(queries, ranks)
    assert sum(place > 1 for place in needed) > 30
    for query, (place, score) in enumerate(zip(needed, scores.tolist(), strict=True)):
        one = queries[query : query + 1]
        assert score_function.sizes(one, score)[0] >= place
        assert score_function.sizes(one, score / TOLERATED * (1 + 1e-6))[0] >= place
        if place > 1:
            assert score_function.sizes(one, score / TOLERATED * (1 - 1e-6))[0] < place


def test_the_score_of_a_rank_is_that_of_its_candidate_and_infinite_without_a_match(score_function):
    queries = draw_queries()
    ranks = np.random.default_rng(4).integers(1, DEPTH + 1, len(queries)).astype(float)
    lost = np.arange(len(queries)) % 7 == 0
    needed = places(score_function, queries, ranks)
    scores = score_function.rank(queries).scores.tolist()
    expected = [np.inf if lost[i] else scores[i][place - 1] for i, place in enumerate(needed)]
    assert score_function.match_scores(queries, np.where(lost, np.inf, ranks)).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_no_threshold_includes_candidates_that_do_not_exist(kind):
    distances = np.tile(np.arange(6.0), (40, 1))
    ends = np.arange(40) % 6 + 1
    distances[np.arange(6) >= ends[:, None]] = np.inf
    keys = np.where(np.isfinite(distances), np.arange(6), NO_CANDIDATE)
    queries = SearchResults(np.linspace(0, 1, 40), 6, distances, keys)
    fitted = kind.fit(queries, np.minimum(ends, np.arange(40) % 3 + 1))
    for threshold in (1e30, 1e300):  # the second is beyond single precision
        assert fitted.sizes(queries, threshold).tolist() == ends.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_uncertainties_give_equal_sizes(kind):
    queries = with_shared_keys(np.full(50, 3.0), 20)
    fitted = kind.fit(queries, np.arange(50) % 10 * 2 + 1)
    assert len(set(fitted.sizes(queries, 9.5).tolist())) == 1
    if kind in SCALED:
        assert fitted.sizes(queries[:9], 4.0).tolist() == [5] * 9


@pytest.mark.parametrize("name", ["auto", "match-probability", "quantile"])
def test_impossible_tuning_splits_are_refused(name):
    for n in (0, 1):
        with pytest.raises(InvalidData, match="at least 2"):
            fit_score_function(name, SearchResults(np.zeros(n), 5), np.ones(n))
    results = SearchResults(np.zeros(3), 5)
    for ranks in ([1, 2], *([1, x, 2] for x in (0, 6, 2.5, np.nan, -np.inf))):
        with pytest.raises(InvalidData, match="ranks"):
            fit_score_function(name, results, np.array(ranks))
    for matches in (np.ones((3, 4), bool), np.ones((2, 5), bool), np.ones((3, 5))):
        with pytest.raises(InvalidData, match="bool"):
            fit_score_function(name, results, matches)
    for truth in ([1.0] * 3, "first", None, np.array(["a"] * 3)):
        with pytest.raises(InvalidData):
            fit_score_function(name, results, truth)


def test_all_matches_are_fitted_like_the_first_ones(score_function):
    results, ranks = draw_split()
    matches = np.arange(1, DEPTH + 1) == ranks[:, None]
    matches[:, 1:] |= matches[:, :-1]  # the other candidate of the same key
    fitted, queries = type(score_function).fit(results, matches), draw_queries()
    expected = score_function.rank(queries).scores
    np.testing.assert_array_equal(fitted.rank(queries).scores, expected)


def test_an_unknown_score_function_is_refused_with_the_choices():
    assert ScoreFunctionName.__args__ == ("auto", *SCORE_FUNCTIONS)
    with pytest.raises(InvalidConfig, match="quantile"):
        score_function_class("min-max")
    assert score_function_class("match-probability").name == "match-probability"
    with pytest.raises(InvalidConfig, match="quantile"):
        fit_score_function("best", *draw_split())


@pytest.mark.parametrize("threshold", [-1.0, np.nan])
def test_a_negative_threshold_is_refused(score_function, threshold):
    with pytest.raises(InvalidData, match="threshold"):
        score_function.sizes(draw_queries(), threshold)
