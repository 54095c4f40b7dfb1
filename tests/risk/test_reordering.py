"""`MatchProbability`, against a regression of scikit-learn."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rcir.errors import InvalidData
from rcir.risk import (
    LabelledResults,
    Learned,
    MatchProbability,
    SetRule,
    make_request,
    reordering,
    score,
)


@pytest.fixture(scope="module")
def split(one_key):
    return one_key(150, 0)


@pytest.fixture(scope="module")
def fitted(split):
    return MatchProbability.fit(*split[:2])


@pytest.fixture(scope="module")
def naive(split, describe):
    """A function of (results, i): the probability of each candidate to match."""
    results, relevant, _ = split
    cells = [(i, k) for i in range(len(results)) for k in range(9) if results.is_candidate[i, k]]
    rows = [describe(results, i, k, results) for i, k in cells]
    exact = LogisticRegression(tol=1e-10, max_iter=10_000)
    model = make_pipeline(StandardScaler(), exact).fit(rows, [relevant[cell] for cell in cells])

    def probability(results, i):
        there = [k for k in range(9) if results.is_candidate[i, k]]
        rows = [describe(results, i, k, split[0]) for k in there]
        return [*model.predict_proba(rows)[:, 1].tolist(), *[0.0] * (9 - len(there))]

    return probability


def test_order_and_probabilities_are_those_of_the_naive_regression(fitted, naive, one_key):
    results = one_key(40, 1)[0]
    ranking = fitted.rank(results)
    moved = 0
    for i, order in enumerate(ranking.columns.tolist()):
        chances = naive(results, i)
        assert sorted(order) == list(range(9))
        expected = [chances[k] for k in order]
        exists = results.is_candidate[i, order][1:]
        inverse = 1 / np.maximum(expected[1:], 1e-9)
        np.testing.assert_allclose(ranking.scores[i, 1:][exists], inverse[exists], rtol=1e-3)
        assert expected == pytest.approx(sorted(chances, reverse=True), abs=1e-5)
        last = [k for k in order if chances[k] == 0]
        assert order[9 - len(last) :] == sorted(last)  # padding stays in order
        moved += order != sorted(order)
        for values in (results.distances, results.labels):
            assert ranking.take(values)[i].tolist() == [values[i, k] for k in order]
    assert moved > 10


def test_selection_score_is_the_chance_that_the_first_candidate_does_not_match(
    fitted, naive, one_key
):
    results = one_key(30, 2)[0]
    scores = fitted.rank(results).selection_score
    for i in range(30):
        assert scores[i] == pytest.approx(1 - max(naive(results, i)), abs=1e-5)


def test_match_scores_are_those_of_the_place_of_the_first_match(fitted, one_key, first_ranks):
    results, relevant, totals = one_key(200, 4)
    ranking = fitted.rank(results)
    columns, scores = ranking.columns, ranking.scores
    scored = score(fitted, LabelledResults(results, relevant, totals))
    moved = np.take_along_axis(relevant, columns, axis=1)
    np.testing.assert_array_equal(scored.relevant, moved)
    np.testing.assert_array_equal(scored.scores, scores)
    np.testing.assert_array_equal(scored.selection_score, ranking.selection_score)
    np.testing.assert_array_equal(scored.match_rank, first_ranks(moved))
    ranks = first_ranks(relevant)
    for i, needed in enumerate(fitted.match_scores(results, ranks).tolist()):
        expected = np.inf
        if ranks[i] < np.inf:
            expected = scores[i, columns[i].tolist().index(int(ranks[i]) - 1)]
        assert needed == expected
        assert scored.match_score[i] == min(scores[i, moved[i]], default=np.inf)


def test_a_query_alone_is_sized_as_among_many(fitted, one_key):
    results = one_key(60, 5)[0]
    scores = fitted.rank(results).scores
    for threshold in (0.0, 1.2, 4.0, 7.7, 30.0, 1e12):
        sizes = (scores <= threshold * (1 + 1e-3)).sum(axis=1)
        assert fitted.sizes(results, threshold).tolist() == sizes.tolist()
        for i in range(40):
            assert fitted.sizes(results[i : i + 1], threshold).tolist() == [sizes[i]]


def test_a_sample_of_many_candidates_is_fitted(split, monkeypatch):
    results, relevant, _ = split
    samples, fit = [], reordering.fit_logistic

    def record(rows, positive):
        samples.append({(*row, match) for row, match in zip(rows.tolist(), positive, strict=True)})
        return fit(rows, positive)

    monkeypatch.setattr(reordering, "fit_logistic", record)
    MatchProbability.fit(results, relevant)
    monkeypatch.setattr(reordering, "MAX_FIT_CANDIDATES", 300)
    MatchProbability.fit(results, relevant)
    assert [len(sample) for sample in samples] == [results.is_candidate.sum(), 300]
    assert samples[1] < samples[0]


def test_matches_that_a_model_cannot_learn_from_are_refused(split):
    with pytest.raises(InvalidData, match="all matches"):
        MatchProbability.fit(split[0], np.ones(150))


@pytest.mark.parametrize("missing", ["distances", "labels", "candidate_uncertainty"])
def test_queries_must_have_what_the_model_was_fitted_with(missing, fitted, split):
    with pytest.raises(InvalidData, match=missing):
        fitted.rank(replace(split[0], **{missing: None}))


@pytest.mark.parametrize("kind", [MatchProbability, Learned], ids=lambda kind: kind.name)
def test_the_constant_baseline_takes_the_candidates_in_the_order_of_the_sets(one_key, kind):
    """Counted query by query."""
    tuning, calibration = (
        LabelledResults(results, relevant, relevant.sum(axis=1))
        for results, relevant, *_ in (one_key(150, 0), one_key(300, 1))
    )
    fitted = kind.fit(tuning.results, tuning.relevant)
    rule = SetRule(fitted, score(fitted, tuning), score(fitted, calibration))
    columns = fitted.rank(calibration.results).columns
    order = np.tile(np.arange(calibration.results.depth), (300, 1)) if columns is None else columns
    for alpha in (0.3, 0.5):
        for size in range(1, calibration.results.depth + 1):
            hits = [calibration.relevant[i, order[i, :size]].any() for i in range(300)]
            if binom.cdf(hits.count(False), 300, alpha) <= 0.1:
                break
        sizes = np.minimum(size, np.isfinite(rule.evidence.scores).sum(axis=1))
        constant = rule.constant_size(make_request(alpha, 0.1), rule.evidence)
        assert constant == pytest.approx(sizes.mean())
    assert rule.constant_size(make_request(0.001, 0.1), rule.evidence) is None
