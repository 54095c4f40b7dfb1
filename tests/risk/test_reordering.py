"""Score functions that reorder candidates, against regressions of scikit-learn and SciPy."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rcir.errors import InvalidData
from rcir.risk import (
    Constant,
    LabelledResults,
    Learned,
    MatchProbability,
    MissController,
    Request,
    Reranked,
    SearchResults,
    constant_baseline,
    matching,
    reranked,
)

KINDS = (MatchProbability, Reranked)


@pytest.fixture(scope="module")
def split(one_key):
    return one_key(150, 0)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def fitted(request, split):
    return request.param.fit(*split[:2])


def nearest(results, i):
    """Columns of the nearest candidate of each key of query i, in their order."""
    row = results.keys[i].tolist()
    return [k for k, key in enumerate(row) if key >= 0 and key not in row[:k]]


def label_features(results, i, describe, split):
    """Features of each key of query i, in a ranking that holds every key once."""
    columns = nearest(results, i)
    row, missing = results.keys[i].tolist(), results.depth - len(columns)
    once = SearchResults(
        results.uncertainty[i : i + 1],
        results.depth,
        np.array([[*results.distances[i, columns], *[np.inf] * missing]]),
        None,
        results.candidate_uncertainty[i : i + 1, columns + [0] * missing],
    )
    table = []
    for place, column in enumerate(columns):
        values = describe(once, 0, place, split)
        # votes of the key among all candidates, keys so far, and no repetition
        values[-1:-1] = [row[:30].count(row[column]), np.log(place + 1), 0.0]
        table.append(values)
    return np.array(table)


def conditional_logit(split, relevant, rows, describe):
    """A function of (results, i): probability of each key, then of none, by SciPy's BFGS."""
    tables = [label_features(split, i, describe, split) for i in rows]
    right = []
    for i, table in zip(rows, tables, strict=True):
        hits = [relevant[i, column] for column in nearest(split, i)]
        right.append(hits.index(True) if True in hits else len(table))
    stacked = np.concatenate(tables)
    mean, spread = stacked.mean(axis=0), stacked.std(axis=0)
    spread[spread == 0] = 1

    def chances(weights, table):
        utilities = [*((table - mean) / spread @ weights[:-1]), weights[-1]]
        powers = np.exp(np.array(utilities) - max(utilities))
        return powers / powers.sum()

    def loss(weights):
        pairs = zip(tables, right, strict=True)
        likelihood = sum(np.log(chances(weights, table)[place]) for table, place in pairs)
        return -likelihood / len(tables) + 1e-4 * weights @ weights

    optimum = minimize(loss, np.zeros(len(mean) + 1), method="BFGS", options={"gtol": 1e-7})
    return lambda results, i: chances(optimum.x, label_features(results, i, describe, split))


@pytest.fixture(scope="module")
def naive_labels(split, describe):
    return conditional_logit(*split[:2], range(150), describe)


@pytest.fixture(scope="module")
def naive_matches(split, describe):
    """A function of (results, i): the probability of each candidate to match."""
    results, relevant, _ = split
    cells = [(i, k) for i in range(len(results)) for k in range(9) if results.there[i, k]]
    rows = [describe(results, i, k, results) for i, k in cells]
    exact = LogisticRegression(tol=1e-10, max_iter=10_000)
    model = make_pipeline(StandardScaler(), exact).fit(rows, [relevant[cell] for cell in cells])

    def probability(results, i):
        there = [k for k in range(9) if results.there[i, k]]
        rows = [describe(results, i, k, split[0]) for k in there]
        return [*model.predict_proba(rows)[:, 1].tolist(), *[0.0] * (9 - len(there))]

    return probability


@pytest.fixture
def naive(fitted, naive_labels, naive_matches):
    """A function of (results, i): the probability of each candidate, and that of no match."""

    def of_labels(results, i):
        *chances, none = naive_labels(results, i)
        each = dict(zip(nearest(results, i), chances, strict=True))
        return [each.get(k, 0.0) for k in range(9)], none

    return of_labels if fitted.name == "reranked" else lambda *of: (naive_matches(*of), None)


def test_order_and_probabilities_are_those_of_the_naive_regression(fitted, naive, one_key):
    results = one_key(40, 1)[0]
    ordered, columns = fitted.ordered(results)
    moved = 0
    for i, order in enumerate(columns.tolist()):
        chances, _ = naive(results, i)
        assert sorted(order) == list(range(9))
        expected = [chances[k] for k in order]
        assert ordered.probability[i].tolist() == pytest.approx(expected, abs=1e-5)
        assert expected == pytest.approx(sorted(chances, reverse=True), abs=1e-5)
        last = [k for k in order if chances[k] == 0]
        assert order[9 - len(last) :] == sorted(last)  # repeated keys and padding stay in order
        moved += order != sorted(order)
        for name in ("distances", "keys"):
            row = getattr(results, name)[i]
            assert getattr(ordered, name)[i].tolist() == [row[k] for k in order]
    assert moved > 10


def test_selection_score_is_the_chance_that_no_candidate_of_the_set_matches(fitted, naive, one_key):
    results = one_key(30, 2)[0]
    for size in (1, 3, 9):
        scores = fitted.selection_score(results, size)
        for i in range(30):
            chances, none = naive(results, i)
            chances = sorted(chances, reverse=True)
            independent = np.prod([1 - chance for chance in chances[:size]])
            expected = independent if none is None else sum(chances[size:]) + none
            assert scores[i] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("columns", [1, 3, 9, 20])
def test_the_first_candidates_are_ordered_as_among_all(fitted, one_key, columns):
    results = one_key(40, 1)[0]
    (whole, order), (few, taken) = fitted.ordered(results), fitted.ordered(results, columns)
    np.testing.assert_array_equal(taken, order[:, :columns])
    for name in ("distances", "keys", "probability"):
        np.testing.assert_array_equal(getattr(few, name), getattr(whole, name)[:, :columns])


def test_scores_are_one_over_probabilities_and_never_fall(fitted, one_key):
    results = one_key(300, 3)[0]
    ordered, _ = fitted.ordered(results)
    scores = fitted.candidate_scores(results)
    np.testing.assert_array_equal(fitted.candidate_scores(ordered), scores)
    assert scores.dtype == np.float32
    for row, chances, there in zip(scores, ordered.probability, ordered.there, strict=True):
        expected = np.array([0.0, *(1 / np.maximum(chances[1:], 1e-9))])
        np.testing.assert_allclose(row[there], expected[there], rtol=1e-6)
        assert (row[~there] == np.inf).all()
        assert (row[1:] >= row[:-1]).all()


def test_match_scores_are_those_of_the_place_of_the_first_match(fitted, one_key, first_ranks):
    results, relevant, totals = one_key(200, 4)
    columns, scores = fitted.ordered(results)[1], fitted.candidate_scores(results)
    labelled = LabelledResults.of(results, relevant, totals).scored(fitted)
    moved = np.take_along_axis(relevant, columns, axis=1)
    np.testing.assert_array_equal(labelled.relevant, moved)
    np.testing.assert_array_equal(labelled.candidate_scores, scores)
    np.testing.assert_array_equal(labelled.selection_score, fitted.selection_score(results, 1))
    np.testing.assert_array_equal(labelled.ranks, first_ranks(moved))
    ranks = first_ranks(relevant)
    for i, score in enumerate(fitted.scores(results, ranks).tolist()):
        expected = np.inf
        if ranks[i] < np.inf:
            expected = scores[i, columns[i].tolist().index(int(ranks[i]) - 1)]
        assert score == expected
        assert labelled.scores[i] == min(scores[i, moved[i]], default=np.inf)


def test_a_query_alone_is_sized_as_among_many(fitted, one_key):
    results = one_key(60, 5)[0]
    scores = fitted.candidate_scores(results)
    for threshold in (0.0, 1.2, 4.0, 7.7, 30.0, 1e12):
        sizes = (scores <= threshold * (1 + 1e-3)).sum(axis=1)
        assert fitted.sizes(results, threshold).tolist() == sizes.tolist()
        assert sizes.max() <= fitted.most(threshold)
        for i in range(40):
            assert fitted.sizes(results[i : i + 1], threshold).tolist() == [sizes[i]]


def test_rankings_that_hold_every_key_once_are_reranked_alike(split, one_key, first_ranks):
    fitted, results = Reranked.fit(*split[:2]), one_key(60, 6)[0]
    once, columns = results.distinct(), results.key_columns
    every, again = fitted.ordered(results), fitted.ordered(once)
    for i in range(60):
        labels = nearest(results, i)
        order = [columns[i, k] for k in again[1][i]][: len(labels)]
        assert order == every[1][i, : len(labels)].tolist()
    np.testing.assert_allclose(again[0].probability, every[0].probability, rtol=1e-6)
    labelled = LabelledResults.of(*split, one_label=True).distinct()
    for truth in (
        Reranked.fit(labelled, labelled.relevant),
        Reranked.fit(split[0], first_ranks(split[1])),
    ):
        np.testing.assert_allclose(truth.weights, fitted.weights, rtol=1e-6, atol=1e-9)


def test_a_sample_of_many_queries_is_fitted(split, describe, monkeypatch):
    results, relevant, _ = split
    monkeypatch.setattr(reranked, "MOST_QUERIES", 60)
    ordered, _ = Reranked.fit(results, relevant).ordered(results)
    sample = np.random.default_rng(0).permutation(150)[:60].tolist()
    expected = conditional_logit(results, relevant, sample, describe)
    for i in range(0, 150, 10):
        chances = sorted(expected(results, i)[:-1].tolist())[::-1]
        assert ordered.probability[i, : len(chances)] == pytest.approx(chances, abs=1e-5)


def test_a_sample_of_many_candidates_is_fitted(split, monkeypatch):
    results, relevant, _ = split
    samples, fit = [], matching.fit_logistic

    def record(rows, positive):
        samples.append({(*row, match) for row, match in zip(rows.tolist(), positive, strict=True)})
        return fit(rows, positive)

    monkeypatch.setattr(matching, "fit_logistic", record)
    MatchProbability.fit(results, relevant)
    monkeypatch.setattr(matching, "MOST_CANDIDATES", 300)
    MatchProbability.fit(results, relevant)
    assert [len(sample) for sample in samples] == [results.there.sum(), 300]
    assert samples[1] < samples[0]


def test_matches_that_a_model_cannot_learn_from_are_refused(split):
    results, relevant, _ = split
    with pytest.raises(InvalidData, match="all matches"):
        MatchProbability.fit(results, np.ones(150))
    several = relevant.copy()
    some = np.flatnonzero(relevant.sum(axis=1) < results.there.sum(axis=1))[0]
    several[some, np.flatnonzero(results.there[some] & ~relevant[some])[-1]] = True
    repeats = SearchResults(np.zeros(3), 3, keys=np.array([[5, 5, 7]] * 3))
    for queries, truth in (
        (replace(results, keys=None), relevant),
        (results, several),
        (repeats, np.array([1, 2, 3.0])),  # the second of its key is the first match
    ):
        assert not Reranked.suits(queries, truth)
        with pytest.raises(InvalidData, match="keys"):
            Reranked.fit(queries, truth)
    assert Reranked.suits(results, relevant)


@pytest.mark.parametrize("missing", ["distances", "keys", "candidate_uncertainty"])
def test_queries_must_have_what_the_model_was_fitted_with(missing, fitted, split):
    with pytest.raises(InvalidData, match=missing):
        fitted.candidate_scores(replace(split[0], **{missing: None}))


def test_a_stored_model_gives_the_same_scores(fitted, split):
    state = {name: values.copy() for name, values in fitted.state().items()}
    restored, results = type(fitted).from_state(state), split[0]
    for one, other in itertools.pairwise((fitted, restored)):
        np.testing.assert_array_equal(
            one.candidate_scores(results), other.candidate_scores(results)
        )
        np.testing.assert_array_equal(
            one.selection_score(results, 3), other.selection_score(results, 3)
        )


@pytest.mark.parametrize("rank", [np.inf, 1.0])
def test_queries_without_a_match_or_with_the_first_only_are_fitted_without_warning(rank, split):
    scores = Reranked.fit(split[0], np.full(150, rank)).candidate_scores(split[0])
    assert (scores[:, 0] == 0).all()
    assert (scores[:, 1:] >= scores[:, :-1]).all()


def test_reranked_sets_are_smaller_than_those_in_order_of_distance(one_key, first_ranks):
    split, calibration, (results, relevant, _) = (one_key(1000, seed) for seed in (7, 8, 9))
    sizes, ranks = {}, first_ranks(relevant)
    for kind in (Learned, Reranked):
        score_function = kind.fit(split[0], split[1])
        controller = MissController.calibrate(
            score_function, calibration[0], first_ranks(calibration[1])
        )
        threshold = controller.threshold(0.3, 0.1)
        assert np.mean(score_function.scores(results, ranks) > threshold) < 0.32
        sizes[kind] = controller.sizes(results, threshold).mean()
    assert sizes[Reranked] < 0.9 * sizes[Learned]


def test_sets_by_match_probability_hold_more_matches_than_constant_ones(split, one_key):
    results, relevant, totals = one_key(1000, 5)
    constant, learned = (
        LabelledResults.of(results, relevant, totals).scored(score_function)
        for score_function in (Constant(), MatchProbability.fit(*split[:2]))
    )
    for size in (1, 3):
        included = constant.candidate_scores <= size
        threshold = np.sort(learned.candidate_scores.ravel())[included.sum() - 1]
        same = learned.candidate_scores <= threshold
        assert abs(same.sum() - included.sum()) <= 1
        assert learned.relevant[same].sum() > 1.15 * constant.relevant[included].sum()


@pytest.mark.parametrize("kind", [Reranked, Learned], ids=lambda kind: kind.name)
def test_the_constant_baseline_takes_the_candidates_in_the_order_of_the_sets(one_key, kind):
    """One candidate of each key where the sets take one, counted query by query."""
    tuning, calibration = (
        LabelledResults.of(results, relevant, relevant.sum(axis=1))
        for results, relevant, *_ in (one_key(150, 0), one_key(300, 1))
    )
    fitted = kind.fit(tuning, tuning.relevant)
    baseline = constant_baseline(fitted, tuning, calibration)
    _, columns = fitted.ordered(calibration)
    order = np.tile(np.arange(calibration.depth), (300, 1)) if columns is None else columns
    for alpha in (0.3, 0.5):
        for size in range(1, calibration.depth + 1):
            hits = [calibration.relevant[i, order[i, :size]].any() for i in range(300)]
            if binom.cdf(hits.count(False), 300, alpha) <= 0.1:
                break
        guarantee = baseline.decide(Request(alpha, 0.1))
        assert guarantee.threshold == size - 1
