import numpy as np
import pytest

from rcir.errors import InvalidConfig, InvalidData
from rcir.risk import (
    SCORE_FUNCTIONS,
    Constant,
    MinMax,
    Quantile,
    SearchResults,
    score_function_class,
)

KINDS = tuple(SCORE_FUNCTIONS.values())
SCALED = (Constant, MinMax, Quantile)
DEPTH = 150
TOLERATED = 1 + 1e-3  # of threshold


def keyed(uncertainty, depth=DEPTH):
    """Queries of which every two candidates share a key."""
    keys = np.tile(np.arange(depth) // 2, (len(uncertainty), 1))
    return SearchResults(np.asarray(uncertainty, float), depth, keys=keys)


def asked(n=400, seed=2, depth=DEPTH):
    inside = np.random.default_rng(seed).lognormal(size=n)
    beyond = [-5.0, 0.0, 1e-300, 1e6]  # and some beyond the tuning split
    return keyed(np.concatenate([inside, beyond]), depth)


def split(depth=DEPTH):
    """Queries whose first match is the first of its key."""
    rng = np.random.default_rng(1)
    uncertainty = rng.lognormal(size=300)
    ranks = 1 + 2 * np.floor(rng.exponential(2 * uncertainty))
    return keyed(uncertainty, depth), np.where(ranks > depth, np.inf, ranks)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def score_function(request):
    return request.param.fit(*split())


def places(score_function, results, ranks):
    """Where the score function takes the candidates of ranks that are counted nearest first."""
    _, columns = score_function.ordered(results)
    if columns is None:
        return [int(rank) for rank in ranks]
    return [row.index(int(rank) - 1) + 1 for row, rank in zip(columns.tolist(), ranks, strict=True)]


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0, 7.5, 123.4, 9999.0])
def test_sizes_follow_the_definition_query_by_query(threshold):
    fitted_on, queries = split()[0].uncertainty, asked()
    low, high = min(fitted_on), max(fitted_on)
    definitions = {
        Constant: lambda u: 1.0,
        MinMax: lambda u: min(max((u - low) / (high - low), 1 / 300), 1.0),
        Quantile: lambda u: max(1, sum(other <= TOLERATED * u for other in fitted_on)) / 300,
    }
    for kind, scale in definitions.items():
        sizes = kind.fit(*split()).sizes(queries, threshold)
        for u, size in zip(queries.uncertainty, sizes, strict=True):
            grown = threshold * TOLERATED * scale(u)
            slack = 1e-5 * grown  # where it is a whole number but for the rounding of scores
            assert min(DEPTH, 1 + int(grown - slack)) <= size <= min(DEPTH, 1 + int(grown + slack))


@pytest.mark.parametrize("kind", SCALED)
def test_a_scaled_price_is_the_number_of_ranks_before_over_the_scale_in_single_precision(kind):
    fitted, queries = kind.fit(*split()), asked(n=20)
    candidate_scores = fitted.candidate_scores(queries)
    assert candidate_scores.dtype == np.float32
    for row, scale in zip(candidate_scores, fitted.scale(queries.uncertainty), strict=True):
        assert row.tolist() == [float(np.float32(k) / np.float32(scale)) for k in range(DEPTH)]


def test_scores_start_at_zero_and_never_fall(score_function):
    candidate_scores = score_function.candidate_scores(asked())
    assert candidate_scores.shape == (404, DEPTH)
    assert candidate_scores.dtype == np.float32
    assert (candidate_scores[:, 0] == 0).all()
    assert (np.diff(candidate_scores, axis=1) >= 0).all()


def test_sizes_never_shrink_as_threshold_grows(score_function):
    thresholds = np.sort(np.random.default_rng(3).uniform(0, 500, 40))
    sizes = np.stack([score_function.sizes(asked(n=40), threshold) for threshold in thresholds])
    assert (np.diff(sizes, axis=0) >= 0).all()
    assert sizes.min() >= 1
    assert sizes.max() <= DEPTH
    assert sizes.dtype == np.int64


@pytest.mark.parametrize("kind", SCALED)
def test_sizes_never_shrink_as_uncertainty_grows(kind):
    queries = SearchResults(np.sort(asked().uncertainty), DEPTH)
    assert (np.diff(kind.fit(*split()).sizes(queries, 100.0)) >= 0).all()


def test_threshold_zero_gives_everybody_one_image(score_function):
    assert (score_function.sizes(asked(), 0.0) == 1).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_score_is_the_smallest_threshold_that_serves_but_for_a_thousandth(score_function, seed):
    queries = asked(n=40, seed=seed)
    ranks = np.random.default_rng(seed).integers(2, DEPTH + 1, len(queries))
    scores, needed = score_function.scores(queries, ranks), places(score_function, queries, ranks)
    assert sum(place > 1 for place in needed) > 30
    for query, (place, score) in enumerate(zip(needed, scores.tolist(), strict=True)):
        one = queries[query : query + 1]
        assert score_function.sizes(one, score)[0] >= place
        assert score_function.sizes(one, score / TOLERATED * (1 + 1e-6))[0] >= place
        if place > 1:
            assert score_function.sizes(one, score / TOLERATED * (1 - 1e-6))[0] < place


def test_the_price_of_a_rank_is_its_column_of_the_costs(score_function):
    queries = asked()
    ranks = np.random.default_rng(4).integers(1, DEPTH + 1, len(queries)).astype(float)
    lost = np.arange(len(queries)) % 7 == 0
    needed = places(score_function, queries, ranks)
    candidate_scores = score_function.candidate_scores(queries).tolist()
    expected = [
        np.inf if lost[i] else candidate_scores[i][place - 1] for i, place in enumerate(needed)
    ]
    assert score_function.scores(queries, np.where(lost, np.inf, ranks)).tolist() == expected


def test_what_is_taken_first_needs_nothing_and_no_match_needs_the_impossible(score_function):
    queries = keyed([0.7, 0.7])
    first = places(score_function, queries, [1, 1]).index(1)
    scores = score_function.scores(queries, np.array([first + 1.0, np.inf]))
    assert scores.tolist() == [0.0, np.inf]


@pytest.mark.parametrize("kind", KINDS)
def test_no_threshold_pays_for_candidates_that_are_not_there(kind):
    distances = np.tile(np.arange(6.0), (40, 1))
    ends = np.arange(40) % 6 + 1
    distances[np.arange(6) >= ends[:, None]] = np.inf
    keys = np.where(np.isfinite(distances), np.arange(6), -1)
    queries = SearchResults(np.linspace(0, 1, 40), 6, distances, keys)
    fitted = kind.fit(queries, np.minimum(ends, np.arange(40) % 3 + 1))
    assert fitted.sizes(queries, 1e30).tolist() == ends.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_uncertainties_make_a_constant_score_function(kind):
    queries = keyed(np.full(50, 3.0), 20)
    fitted = kind.fit(queries, np.arange(50) % 10 * 2 + 1)
    assert len(set(fitted.sizes(queries, 9.5).tolist())) == 1
    if kind in SCALED:
        assert fitted.sizes(queries[:9], 4.0).tolist() == [5] * 9


@pytest.mark.parametrize("kind", [MinMax, Quantile])
def test_uncertainty_beyond_the_tuning_split_counts_as_its_extreme(kind):
    fitted = kind.fit(SearchResults(np.linspace(1, 2, 100), DEPTH), np.ones(100))
    beyond = fitted.sizes(SearchResults(np.array([-9.0, 0.99, 2.01, 1e9]), DEPTH), 60.0)
    extreme = fitted.sizes(SearchResults(np.array([1.0, 2.0]), DEPTH), 60.0)
    assert beyond.tolist() == [extreme[0], extreme[0], extreme[1], extreme[1]]
    assert extreme[1] == 61


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1])
def test_an_tuning_split_of_too_few_queries_is_refused(kind, n):
    with pytest.raises(InvalidData, match=f"has {n} queries; at least 2"):
        kind.fit(SearchResults(np.zeros(n), 5), np.ones(n))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "ranks",
    [[1, 2], [1, 0, 2], [1, 6, 2], [1, 2.5, 2], [1, np.nan, 2], [1, -np.inf, 2]],
)
def test_an_tuning_split_with_impossible_ranks_is_refused(kind, ranks):
    with pytest.raises(InvalidData, match="ranks must be"):
        kind.fit(SearchResults(np.zeros(3), 5), np.array(ranks))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("matches", [np.ones((3, 4), bool), np.ones((2, 5), bool), np.ones((3, 5))])
def test_matches_that_are_not_those_of_the_candidates_are_refused(kind, matches):
    with pytest.raises(InvalidData, match=r"needed is bool of shape \(3, 5\)"):
        kind.fit(SearchResults(np.zeros(3), 5), matches)


def test_all_matches_tell_what_the_first_ones_do(score_function):
    results, ranks = split()
    matches = np.arange(1, DEPTH + 1) == ranks[:, None]
    matches[:, 1:] |= matches[:, :-1]  # the other candidate of the same key
    fitted = type(score_function).fit(results, matches)
    np.testing.assert_array_equal(
        fitted.candidate_scores(asked()), score_function.candidate_scores(asked())
    )


def test_state_restores_the_same_prices(score_function):
    restored = type(score_function).from_state(
        {k: v.copy() for k, v in score_function.state().items()}
    )
    np.testing.assert_array_equal(
        restored.candidate_scores(asked()), score_function.candidate_scores(asked())
    )
    for size in (1, 4):
        np.testing.assert_array_equal(
            restored.selection_score(asked(), size), score_function.selection_score(asked(), size)
        )


@pytest.mark.parametrize("kind", SCALED)
def test_selection_score_is_the_uncertainty_where_nothing_better_was_learned(kind):
    queries = asked()
    assert kind.fit(*split()).selection_score(queries, 3).tolist() == queries.uncertainty.tolist()


def test_an_unknown_score_function_is_refused_with_the_choices():
    with pytest.raises(
        InvalidConfig, match="constant, minmax, quantile, learned, boosted, reranked, auto"
    ):
        score_function_class("min-max")


@pytest.mark.parametrize("kind", [Constant, MinMax, Quantile])
def test_a_threshold_beyond_single_precision_pays_for_all_that_is_there(kind):
    distances = np.array([[0.1, 0.2, 0.3], [0.1, 0.2, np.inf]])
    score_function = kind.fit(*split())
    assert score_function.sizes(SearchResults(np.ones(2), 3, distances), 1e300).tolist() == [3, 2]


@pytest.mark.parametrize("threshold", [-1.0, np.nan])
def test_a_threshold_that_is_no_price_is_refused(score_function, threshold):
    with pytest.raises(InvalidData, match=r"threshold is .*; it is at least 0"):
        score_function.sizes(asked(), threshold)
