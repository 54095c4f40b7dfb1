"""Boosted trees as arrays, against scikit-learn's own."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import expit
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.isotonic import IsotonicRegression

from rcir.risk import Boosted, Learned, MissController, SearchResults


def first(relevant):
    return np.array([1.0 + row.index(True) if True in row else np.inf for row in relevant.tolist()])


def possible(results, i, k):
    """Whether candidate k can be the first match: it is there, and the first of its key."""
    row = results.keys[i].tolist()
    return row[k] >= 0 and row[k] not in row[:k]


@pytest.fixture(scope="module")
def fitted(one_key):
    results, relevant, _ = one_key(300, 0)
    return Boosted.fit(results, first(relevant))


@pytest.mark.parametrize("n", [40, 300])
def test_logits_are_those_of_scikit_learns_trees_of_candidates_seen_one_by_one(
    n, one_key, describe
):
    split, relevant, _ = one_key(n, 0)
    asked, ranks = one_key(25, 1)[0], first(relevant)
    rows, found = [], []
    for i, rank in enumerate(ranks):
        for k in range(int(min(rank, split.depth))):
            if possible(split, i, k):
                rows.append(describe(split, i, k, split))
                found.append(k + 1 == rank)
    model = GradientBoostingClassifier(
        n_estimators=60,
        learning_rate=0.1,
        max_depth=3,
        min_samples_leaf=min(60, len(rows) // 4),
        subsample=0.5,
        random_state=0,
    ).fit(rows, found)
    score_function = Boosted.fit(split, ranks)
    hazard = score_function.hazard(asked)
    for i, k in itertools.product(range(25), range(asked.depth)):
        if possible(asked, i, k):
            logit = model.decision_function([describe(asked, i, k, split)])[0]
            assert hazard[i, k] == pytest.approx(expit(logit), abs=1e-9)
        else:
            assert hazard[i, k] == 0
    leaves = {(tree.tree_.node_count + 1) // 2 for tree in model.estimators_[:, 0]}
    assert min(leaves) < 8  # some trees are not complete
    assert n == 40 or max(leaves) > 4


def test_scores_are_one_over_the_isotonic_fit_beyond_the_first_rank(fitted, one_key):
    asked = one_key(60, 2)[0]
    for i, (row, hazard) in enumerate(
        zip(fitted.candidate_scores(asked), fitted.hazard(asked), strict=True)
    ):
        chances = [h * math.prod(1 - g for g in hazard[:k]) for k, h in enumerate(hazard)]
        fit = IsotonicRegression(increasing=False).fit_transform(np.arange(8), chances[1:])
        there = asked.there[i]
        np.testing.assert_allclose(row[1:][there[1:]], 1 / np.maximum(fit, 1e-9)[there[1:]], 1e-6)
        assert row[0] == 0
        assert (row[~there] == np.inf).all()


def test_sizes_and_selection_scores_of_one_query_are_those_of_many(fitted, one_key):
    asked = one_key(30, 3)[0]
    candidate_scores = fitted.candidate_scores(asked)
    for threshold in (0.0, 1.5, 6.0, 40.0):
        sizes = [int(fitted.sizes(asked[i : i + 1], threshold)[0]) for i in range(30)]
        assert sizes == [
            sum(score <= threshold * (1 + 1e-3) for score in row) for row in candidate_scores
        ]
    selection_scores = [float(fitted.selection_score(asked[i : i + 1], 2)[0]) for i in range(30)]
    expected = [math.prod(1 - h for h in row[:2]) for row in fitted.hazard(asked).tolist()]
    assert selection_scores == pytest.approx(expected)


@pytest.mark.parametrize("matches", ["some", "all", "none"])
def test_a_stored_model_is_the_same_model(matches, one_key):
    results, relevant, _ = one_key(80, 0)
    ranks = {"some": first(relevant), "all": np.ones(80), "none": np.full(80, np.inf)}[matches]
    score_function = Boosted.fit(results, ranks)
    restored = Boosted.from_state({name: v.copy() for name, v in score_function.state().items()})
    assert restored.repeats == score_function.repeats
    np.testing.assert_array_equal(
        restored.candidate_scores(results), score_function.candidate_scores(results)
    )
    assert all(
        isinstance(v, np.ndarray) and v.dtype != object for v in score_function.state().values()
    )


def test_candidates_that_always_or_never_match_leave_one_rate():
    queries = SearchResults(np.linspace(0, 1, 40), 6)
    always, never = (Boosted.fit(queries, np.full(40, rank)) for rank in (1.0, np.inf))
    assert always.hazard(queries) == pytest.approx(np.full((40, 6), 40.5 / 41))
    assert never.hazard(queries) == pytest.approx(np.full((40, 6), 0.5 / 241))


def test_a_thousand_queries_suit_and_fewer_do_not():
    for n in (999, 1000):
        queries, ranks = SearchResults(np.zeros(n), 3), np.ones(n)
        assert Boosted.suits(queries, ranks) == (n == 1000)


def test_it_needs_smaller_sets_than_a_linear_model_where_only_the_middle_is_hard():
    rng = np.random.default_rng(0)
    sizes, parts = {}, []
    for _ in range(3):
        uncertainty = rng.uniform(size=2000)
        late = (np.abs(uncertainty - 0.5) < 0.15) & (rng.uniform(size=2000) < 0.8)
        ranks = np.where(late, rng.integers(2, 15, 2000), 1.0)
        parts.append((SearchResults(uncertainty, 20), ranks))
    split, calibration, (asked, ranks) = parts
    for kind in (Learned, Boosted):
        controller = MissController.calibrate(kind.fit(*split), *calibration)
        found = controller.size(asked, 0.1, 0.1)
        assert np.mean(found < ranks) < 0.11
        sizes[kind] = found.mean()
    assert sizes[Boosted] < 0.8 * sizes[Learned]
