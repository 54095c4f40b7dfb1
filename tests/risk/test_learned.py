import itertools
import math

import numpy as np
import pytest
from scipy.optimize import isotonic_regression
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rcir.errors import InvalidData
from rcir.risk import Constant, Learned, MissController, SearchResults
from rcir.risk.features import Features
from rcir.risk.hazard import non_increasing

KNOWN = ("distances", "keys", "candidate_uncertainty")


def draw(n, seed, known=KNOWN, depth=8, repeats=False):
    """Queries of which the uncertain have later matches; a match is the first of its key or not."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.uniform(size=n)
    distances = np.sort(rng.uniform(size=(n, depth)), axis=1)
    keys = rng.integers(0, 4, (n, depth))
    ends = np.where(rng.uniform(size=n) < 0.2, rng.integers(2, depth, n), depth)
    padding = np.arange(depth) >= ends[:, None]
    distances[padding], keys[padding] = np.inf, -1
    arrays = {
        "distances": distances,
        "keys": keys,
        "candidate_uncertainty": rng.normal(size=(n, depth)),
    }
    ranks = []
    for i in range(n):
        first = [k for k in range(ends[i]) if repeats or keys[i, k] not in keys[i, :k].tolist()]
        at = rng.geometric(1 - 0.8 * uncertainty[i]) - 1
        ranks.append(first[at] + 1.0 if at < len(first) else np.inf)
    return SearchResults(uncertainty, depth, **{name: arrays[name] for name in known}), np.array(
        ranks
    )


def possible(results, i, k, repeats):
    if results.distances is not None and results.distances[i, k] == np.inf:
        return False
    row = None if results.keys is None else results.keys[i].tolist()
    return repeats or row is None or row[k] not in row[:k]


@pytest.mark.parametrize(("depth", "repeats"), [(8, False), (8, True), (22, False)])
@pytest.mark.parametrize(
    "known", [(), *itertools.combinations(KNOWN, 1), ("distances", "keys"), KNOWN], ids=str
)
def test_the_hazard_is_a_logistic_model_of_candidates_seen_one_by_one(
    known, depth, repeats, describe
):
    split, ranks = draw(120, 0, known, depth, repeats)
    asked, _ = draw(25, 1, known, depth)
    score_function = Learned.fit(split, ranks)
    assert score_function.repeats == (repeats or "keys" not in known)
    rows, found = [], []
    for i, rank in enumerate(ranks):
        for k in range(int(min(rank, split.depth))):
            if possible(split, i, k, score_function.repeats):
                rows.append(describe(split, i, k, split))
                found.append(k + 1 == rank)
    exact = LogisticRegression(tol=1e-10, max_iter=10_000)
    model = make_pipeline(StandardScaler(), exact).fit(rows, found)
    hazard = score_function.hazard(asked)
    for i, k in itertools.product(range(25), range(asked.depth)):
        if possible(asked, i, k, score_function.repeats):
            features = [describe(asked, i, k, split)]
            assert hazard[i, k] == pytest.approx(model.predict_proba(features)[0, 1], abs=1e-6)
        else:
            assert hazard[i, k] == 0


@pytest.mark.parametrize("size", [1, 3, 8])
def test_selection_score_is_the_product_of_the_chances_that_each_candidate_is_none(size):
    score_function, (asked, _) = Learned.fit(*draw(300, 0)), draw(40, 1)
    expected = [
        math.prod(1 - h for h in row[:size]) for row in score_function.hazard(asked).tolist()
    ]
    assert score_function.selection_score(asked, size) == pytest.approx(
        np.array(expected), rel=1e-12
    )


def probabilities(score_function, results):
    """Of the first match at each rank; with that of none they sum to 1."""
    rows = []
    for row in score_function.hazard(results).tolist():
        rows.append([h * math.prod(1 - g for g in row[:k]) for k, h in enumerate(row)])
        assert math.fsum(rows[-1]) + math.prod(1 - h for h in row) == pytest.approx(1)
    return np.array(rows)


def test_scores_are_one_over_the_isotonic_fit_of_the_probability_beyond_the_first_rank():
    score_function, (asked, _) = Learned.fit(*draw(300, 0)), draw(60, 1)
    chances = probabilities(score_function, asked)
    for i, row in enumerate(score_function.candidate_scores(asked)):
        there = np.isfinite(asked.distances[i])
        fit = IsotonicRegression(increasing=False).fit_transform(np.arange(7), chances[i, 1:])
        all_scores = 1 / np.maximum(fit, 1e-9)
        np.testing.assert_allclose(row[1:][there[1:]], all_scores[there[1:]], rtol=1e-6)
        assert row[0] == 0
        assert (row[~there] == np.inf).all()


def test_no_sets_of_the_same_mean_size_hold_more_first_matches():
    score_function, (asked, _) = Learned.fit(*draw(300, 0)), draw(4, 3)
    chances, depths = probabilities(score_function, asked), np.isfinite(asked.distances).sum(axis=1)
    served = [np.cumsum(row) for row in chances]
    best = {}  # of every choice of four prefixes, by their total size
    for sizes in itertools.product(*(range(1, depth + 1) for depth in depths)):
        value = sum(served[i][size - 1] for i, size in enumerate(sizes))
        best[sum(sizes)] = max(best.get(sum(sizes), 0), value)
    thresholds = np.unique(score_function.candidate_scores(asked))
    assert len(thresholds) > 8
    for threshold in thresholds[np.isfinite(thresholds)]:
        sizes = score_function.sizes(asked, float(threshold))
        value = sum(served[i][size - 1] for i, size in enumerate(sizes))
        assert value == pytest.approx(best[int(sizes.sum())], abs=1e-9)


def test_sizes_are_the_number_of_scores_within_however_few_ranks_are_looked_at():
    score_function, (asked, _) = Learned.fit(*draw(300, 0, depth=40)), draw(60, 1, depth=40)
    candidate_scores = score_function.candidate_scores(asked)
    finite = np.unique(candidate_scores[np.isfinite(candidate_scores)]).astype(float)
    assert len(finite) > 50
    for threshold in np.concatenate([finite, finite / (1 + 1e-3) * (1 - 1e-6)]):
        assert score_function.sizes(asked, threshold).tolist() == [
            sum(score <= threshold * (1 + 1e-3) for score in row) for row in candidate_scores
        ]


def test_first_matches_alike_at_forty_ranks_are_all_paid_for_at_once():
    chance = [1e-12, *(1 / (41 - k) for k in range(40))]  # 1/41 that the match is at rank 2 to 41
    logits = np.log(chance) - np.log1p(-np.array(chance))
    features = Features(np.zeros(9), (False, False, True, False))
    score_function = Learned(features, True, np.array([0, 0, 0, 1.0]), 0.0)
    asked = SearchResults(np.zeros(2), 41, candidate_uncertainty=np.tile(logits, (2, 1)))
    tolerated = 1 + 1e-3
    assert score_function.sizes(asked, 40.99 / tolerated).tolist() == [1, 1]
    assert score_function.sizes(asked, 41.01 / tolerated).tolist() == [41, 41]


def test_where_a_key_matches_or_not_its_repetitions_are_never_the_first_match():
    score_function = Learned.fit(*draw(300, 0))
    keys = np.array([[5, 5, 5, 7, 5, 7, 9, 9]])
    arrays = {"distances": np.arange(8.0)[None], "candidate_uncertainty": np.zeros((1, 8))}
    hazard = score_function.hazard(SearchResults(np.array([0.5]), 8, keys=keys, **arrays))
    assert (hazard > 0).tolist() == [[True, False, False, True, False, False, True, False]]


@pytest.mark.parametrize("m", [1, 2, 9])
def test_the_isotonic_fit_is_that_of_scipy_row_by_row(m):
    rng = np.random.default_rng(m)
    rows = rng.uniform(size=(5000, m)) ** rng.integers(1, 6, (5000, 1))
    rows[::5] = np.round(rows[::5], 1)  # ties, zeros and ones
    rows[1], rows[2], rows[-1] = 0, 1, np.linspace(0, 1, m)
    fitted = non_increasing(rows)
    expected = [isotonic_regression(row, increasing=False).x for row in rows]
    np.testing.assert_allclose(fitted, expected, atol=1e-10)
    assert (np.diff(fitted, axis=1) <= 1e-10).all()


def test_scores_never_fall_even_where_first_matches_are_as_rare_as_one_in_a_hundred_million():
    features = Features(np.zeros(9), (False, False, True, False))
    score_function = Learned(features, True, np.array([0, 0, 0, 0.5]), -18.5)
    for seed in range(3):
        candidates = np.random.default_rng(seed).normal(size=(4096, 40))
        candidate_scores = score_function.candidate_scores(
            SearchResults(np.zeros(4096), 40, candidate_uncertainty=candidates)
        )
        assert (np.diff(candidate_scores, axis=1) >= 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_it_needs_smaller_sets_than_a_constant_where_uncertainty_tells(seed):
    split, calibration, test = (draw(3000, 10 * seed + i, (), depth=30) for i in range(3))
    sizes, missed = [], []
    for kind in (Constant, Learned):
        controller = MissController.calibrate(kind.fit(*split), *calibration)
        found = controller.size(test[0], 0.1, 0.1)
        sizes.append(found.mean())
        missed.append(np.mean(found < test[1]))
    assert sizes[1] < 0.9 * sizes[0]
    assert max(missed) < 0.11


def test_first_candidates_that_always_match_leave_one_rate_and_no_warning():
    queries = SearchResults(np.linspace(0, 1, 40), 6)
    score_function = Learned.fit(queries, np.ones(40))
    assert score_function.hazard(queries) == pytest.approx(np.full((40, 6), 40.5 / 41))
    assert (score_function.sizes(queries, 0.5) == 1).all()


def test_candidates_that_never_match_leave_one_rate_too():
    queries = SearchResults(np.linspace(0, 1, 40), 6)
    score_function = Learned.fit(queries, np.full(40, np.inf))
    assert score_function.hazard(queries) == pytest.approx(np.full((40, 6), 0.5 / 241))


@pytest.mark.parametrize("repeats", [False, True])
def test_a_stored_model_is_the_same_model(repeats):
    score_function, (asked, _) = Learned.fit(*draw(200, 0, repeats=repeats)), draw(50, 1)
    restored = Learned.from_state({name: v.copy() for name, v in score_function.state().items()})
    assert (restored.features.uses, restored.repeats) == ((True, True, True, False), repeats)
    np.testing.assert_array_equal(restored.hazard(asked), score_function.hazard(asked))
    np.testing.assert_array_equal(
        restored.candidate_scores(asked), score_function.candidate_scores(asked)
    )


@pytest.mark.parametrize("missing", KNOWN)
def test_what_it_was_fitted_with_must_be_known_of_queries(missing):
    score_function = Learned.fit(*draw(100, 0))
    less = draw(5, 1, tuple(name for name in KNOWN if name != missing))[0]
    for call in (
        score_function.candidate_scores,
        score_function.hazard,
        lambda queries: score_function.selection_score(queries, 1),
    ):
        with pytest.raises(InvalidData, match=f"fitted with {missing}, which the queries lack"):
            call(less)


def test_what_it_was_not_fitted_with_does_not_matter():
    score_function, (asked, _) = (
        Learned.fit(*draw(100, 0, ())),
        draw(30, 1, ("candidate_uncertainty",)),
    )
    bare = SearchResults(asked.uncertainty, asked.depth)
    np.testing.assert_array_equal(
        score_function.candidate_scores(asked), score_function.candidate_scores(bare)
    )
