"""The learned hazard, against scikit-learn on candidates described one by one."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rcir.errors import InvalidData
from rcir.risk import Constant, Learned, SearchResults, order_statistic, score_ranks
from rcir.risk.features import Features, fit_logistic, flat, linear

OPTIONAL = ("distances", "labels", "candidate_uncertainty")
SUBSETS = [names for k in range(4) for names in itertools.combinations(OPTIONAL, k)]


def only(results, names):
    """The same results with some of the optional arrays."""
    return replace(results, **{name: None for name in OPTIONAL if name not in names})


def logistic_regression(ridge=1.0):
    model = LogisticRegression(C=1 / ridge, tol=1e-10, max_iter=10_000)
    return make_pipeline(StandardScaler(), model)


@pytest.mark.parametrize("names", SUBSETS, ids=str)
@pytest.mark.parametrize(("depth", "columns"), [(4, 4), (22, 22), (22, 3), (1, 1)])
def test_features_are_those_of_candidates_described_one_by_one(
    names, depth, columns, one_key, describe
):
    split, results = (only(one_key(n, n, depth)[0], names) for n in (35, 20))
    arrays = Features.fit(split).of(results, columns)
    table = np.stack([np.broadcast_to(values, (20, columns)) for values in arrays], axis=2)
    for i, k in itertools.product(range(20), range(columns)):
        if results.is_candidate[i, k]:
            assert table[i, k].tolist() == pytest.approx(describe(results, i, k, split))


def test_features_of_distinct_results_use_the_votes_of_all_candidates(one_key):
    results = one_key(20, 0)[0]
    distinct, columns = results.first_of_each_label(), results.label_columns
    votes = Features.fit(results).of(distinct, 3)[-4]
    for i, k in itertools.product(range(20), range(3)):
        if columns[i, k] >= 0:
            row = results.labels[i].tolist()
            assert votes[i, k] == row.count(row[columns[i, k]])
    features, every = Features.fit(distinct), distinct.is_candidate
    np.testing.assert_array_equal(
        flat(features.of(distinct, 9), every),
        flat(features.of(replace(distinct, one_per_label=False), 9), every),
    )


def test_cells_become_rows_and_weighted_sums():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) for shape in ((1, 4), (6, 1), (6, 4))]
    chosen, weights = rng.uniform(size=(6, 4)) < 0.5, rng.normal(size=3)
    cells = [(i, k) for i in range(6) for k in range(4)]
    values = {(i, k): [arrays[0][0, k], arrays[1][i, 0], arrays[2][i, k]] for i, k in cells}
    assert flat(arrays, chosen).tolist() == [values[cell] for cell in cells if chosen[cell]]
    sums = linear(arrays, weights, 0.7, (6, 4))
    for cell in cells:
        expected = 0.7 + sum(w * v for w, v in zip(weights, values[cell], strict=True))
        assert sums[cell] == pytest.approx(expected)


def test_logistic_fit_is_scikit_learns_on_standardised_features():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(500, 4)) * [1, 100, 1e-3, 0] + [5, 0, 1, 3]
    matches = rng.uniform(size=500) < 1 / (1 + np.exp(-rows[:, 0] + 5 - rows[:, 1] / 50))
    for ridge in (1.0, 30.0):
        check_logistic_fit(rows, matches, ridge)


def check_logistic_fit(rows, matches, ridge):
    weights, intercept = fit_logistic(rows, matches, ridge)
    model = logistic_regression(ridge).fit(rows, matches)
    assert intercept + rows @ weights == pytest.approx(model.decision_function(rows), abs=1e-4)


@pytest.mark.parametrize("positive", [True, False])
def test_logistic_fit_of_one_class_is_its_smoothed_rate(positive):
    weights, intercept = fit_logistic(np.ones((9, 2)), np.full(9, positive))
    rate = (9 * positive + 0.5) / 10
    assert (weights.tolist(), intercept) == ([0, 0], pytest.approx(math.log(rate / (1 - rate))))


def draw(n, seed, names=OPTIONAL, depth=8, repeats=False):
    """Queries whose match is later for the uncertain, and the first of its key or not."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.uniform(size=n)
    distances = np.sort(rng.uniform(size=(n, depth)), axis=1)
    keys = rng.integers(0, 4, (n, depth))
    ends = np.where(rng.uniform(size=n) < 0.2, rng.integers(2, depth, n), depth)
    padding = np.arange(depth) >= ends[:, None]
    distances[padding], keys[padding] = np.inf, -1
    results = SearchResults(uncertainty, depth, distances, keys, rng.normal(size=(n, depth)))
    ranks = []
    for i in range(n):
        first = [k for k in range(ends[i]) if repeats or keys[i, k] not in keys[i, :k].tolist()]
        at = rng.geometric(1 - 0.8 * uncertainty[i]) - 1
        ranks.append(first[at] + 1.0 if at < len(first) else np.inf)
    return only(results, names), np.array(ranks)


def possible(results, i, k, repeats=False):
    """Return whether candidate k exists and can be the first match of query i."""
    if results.distances is not None and results.distances[i, k] == np.inf:
        return False
    row = None if results.labels is None else results.labels[i].tolist()
    return repeats or row is None or row[k] not in row[:k]


def training_cells(results, ranks, repeats):
    """The candidates up to each first match that could have been it."""
    for i, rank in enumerate(ranks):
        for k in range(int(min(rank, results.depth))):
            if possible(results, i, k, repeats):
                yield i, k, k + 1 == rank


@pytest.mark.parametrize(("depth", "repeats"), [(8, False), (8, True), (22, False)])
@pytest.mark.parametrize(
    "names", [(), *itertools.combinations(OPTIONAL, 1), ("distances", "labels"), OPTIONAL], ids=str
)
def test_hazard_is_a_logistic_model_of_candidates_described_one_by_one(
    names, depth, repeats, describe
):
    split, ranks = draw(120, 0, names, depth, repeats)
    results, _ = draw(12, 1, names, depth)
    score_function = Learned.fit(split, ranks)
    repeats = repeats or "labels" not in names
    assert score_function.repeats == repeats
    cells = list(training_cells(split, ranks, repeats))
    rows = [describe(split, i, k, split) for i, k, _ in cells]
    ridge = (600 / 120) ** 2  # 120 queries tune
    model = logistic_regression(ridge).fit(rows, [match for *_, match in cells])
    hazard = score_function.hazard(results)
    for i, k in itertools.product(range(12), range(depth)):
        expected = 0.0
        if possible(results, i, k, repeats):
            expected = model.predict_proba([describe(results, i, k, split)])[0, 1]
        assert hazard[i, k] == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def fitted():
    return Learned.fit(*draw(300, 0))


def probabilities(score_function, results):
    """The probability of the first match at each rank."""
    rows = []
    for row in score_function.hazard(results).tolist():
        rows.append([h * math.prod(1 - g for g in row[:k]) for k, h in enumerate(row)])
        assert math.fsum(rows[-1]) + math.prod(1 - h for h in row) == pytest.approx(1)
    return np.array(rows)


def test_candidates_are_in_the_order_of_their_probability_and_scored_by_its_logarithm(fitted):
    results = draw(60, 1)[0]
    chances, ranking = probabilities(fitted, results), fitted.rank(results)
    for chance, row, columns, there in zip(
        chances, ranking.scores, ranking.columns, results.is_candidate, strict=True
    ):
        possible, n = chance > 0, int(there.sum())
        assert sorted(columns.tolist()) == list(range(8))
        assert set(columns[:n]) == set(np.flatnonzero(there))
        places = np.isin(columns, np.flatnonzero(possible & there))
        expected = -np.log(chance[columns[places]])
        assert (np.diff(expected) >= 0).all()
        np.testing.assert_allclose(row[places][1:], expected[1:], rtol=1e-5)
        assert row[0] == 0
        assert (row[n:] == np.inf).all()
        assert (row[1:n] < np.inf).all()  # even what cannot be the first match can be in a set


def test_selection_score_is_the_chance_that_the_first_candidate_is_not_the_nearest_match(fitted):
    results = draw(40, 1)[0]
    expected = 1 - probabilities(fitted, results).max(axis=1)
    assert fitted.rank(results).selection_score == pytest.approx(expected, rel=1e-5)


def test_no_sets_of_the_same_mean_size_hold_more_first_matches():
    score_function, results = Learned.fit(*draw(300, 0)), draw(4, 3)[0]
    chances, depths = probabilities(score_function, results), results.is_candidate.sum(axis=1)
    cumulative = [np.cumsum(np.sort(row)[::-1]) for row in chances]
    best = {}  # of every choice of the likeliest candidates of four queries, by their number
    for sizes in itertools.product(*(range(1, depth + 1) for depth in depths)):
        value = sum(cumulative[i][size - 1] for i, size in enumerate(sizes))
        best[sum(sizes)] = max(best.get(sum(sizes), 0), value)
    thresholds = np.unique(score_function.rank(results).scores)
    assert len(thresholds) > 8
    for threshold in thresholds[np.isfinite(thresholds)]:
        sizes = score_function.sizes(results, float(threshold)).tolist()
        value = sum(cumulative[i][size - 1] for i, size in enumerate(sizes))
        assert value == pytest.approx(best[sum(sizes)], rel=1e-6)


def test_candidates_of_equal_probability_enter_the_set_together():
    chance = [1e-12, *(1 / (41 - k) for k in range(40))]  # 1/41 that the match is at rank 2 to 41
    logits = np.log(chance) - np.log1p(-np.array(chance))
    features = Features(np.zeros(9), (False, False, True, False, False))
    score_function = Learned(features, True, np.array([0, 0, 0, 1.0]), 0.0)
    results = SearchResults(np.zeros(2), 41, candidate_uncertainty=np.tile(logits, (2, 1)))
    tolerated = np.log(41) / (1 + 1e-3)
    assert score_function.sizes(results, tolerated - 0.01).tolist() == [1, 1]
    assert score_function.sizes(results, tolerated + 0.01).tolist() == [40, 40]


@pytest.mark.parametrize("seed", range(4))
def test_few_tuning_queries_hardly_enlarge_sets_however_many_features_there_are(seed):
    """Without the stronger ridge, twelve queries would double the sets."""
    rng = np.random.default_rng(seed)

    def noise(n):
        results = draw(n, rng.integers(1000), OPTIONAL[::2], depth=30)[0]
        results = replace(results, distances=np.sort(rng.uniform(size=(n, 30)), axis=1))
        return results, np.minimum(rng.geometric(0.3, n), 30).astype(float)

    calibration, test = noise(2000), noise(2000)
    sizes = []
    for score_function in (Constant(), Learned.fit(*noise(12))):
        threshold = order_statistic(0.1, 0.1, score_ranks(score_function, *calibration)).threshold
        sizes.append(score_function.sizes(test[0], threshold).mean())
    assert sizes[1] < 1.1 * sizes[0]


def test_scores_never_fall_even_for_tiny_probabilities():
    features = Features(np.zeros(9), (False, False, True, False, False))
    score_function = Learned(features, True, np.array([0, 0, 0, 0.5]), -18.5)
    for seed in range(3):
        candidates = np.random.default_rng(seed).normal(size=(4096, 40))
        results = SearchResults(np.zeros(4096), 40, candidate_uncertainty=candidates)
        assert (np.diff(score_function.rank(results).scores, axis=1) >= 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_learned_sets_are_smaller_than_constant_ones_where_uncertainty_is_informative(seed):
    split, calibration, test = (draw(3000, 10 * seed + i, (), depth=30) for i in range(3))
    sizes, missed = [], []
    for kind in (Constant, Learned):
        score_function = kind.fit(*split)
        certificate = order_statistic(0.1, 0.1, score_ranks(score_function, *calibration))
        each = score_function.sizes(test[0], certificate.threshold)
        sizes.append(each.mean())
        missed.append(np.mean(score_function.match_scores(*test) > certificate.threshold * 1.001))
    assert sizes[1] < 0.9 * sizes[0]
    assert max(missed) < 0.11


def test_candidates_that_always_or_never_match_leave_one_rate():
    results = SearchResults(np.linspace(0, 1, 40), 6)
    always, never = (Learned.fit(results, np.full(40, rank)) for rank in (1.0, np.inf))
    assert always.hazard(results) == pytest.approx(np.full((40, 6), 40.5 / 41))
    assert never.hazard(results) == pytest.approx(np.full((40, 6), 0.5 / 241))
    assert (always.sizes(results, 0.5) == 1).all()


@pytest.mark.parametrize("missing", OPTIONAL)
def test_queries_must_have_what_the_model_was_fitted_with(missing):
    score_function = Learned.fit(*draw(100, 0))
    less = only(draw(5, 1)[0], set(OPTIONAL) - {missing})
    for call in (score_function.rank, score_function.hazard):
        with pytest.raises(InvalidData, match=missing):
            call(less)


def test_queries_may_have_more_than_the_model_was_fitted_with():
    score_function, results = Learned.fit(*draw(100, 0, ())), draw(30, 1, OPTIONAL[2:])[0]
    bare = SearchResults(results.uncertainty, results.depth)
    expected = score_function.rank(bare).scores
    np.testing.assert_array_equal(score_function.rank(results).scores, expected)
