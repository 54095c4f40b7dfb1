"""What a learned score sees, cell by cell, and the models that are linear in it."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rcir.errors import InvalidData
from rcir.risk import SearchResults
from rcir.risk.features import Features, fit_logistic, flat, linear

KNOWN = ("distances", "keys", "candidate_uncertainty")
SUBSETS = [names for k in range(4) for names in itertools.combinations(KNOWN, k)]


def only(results, known):
    return SearchResults(
        results.uncertainty, results.depth, **{name: getattr(results, name) for name in known}
    )


@pytest.mark.parametrize("known", SUBSETS, ids=str)
@pytest.mark.parametrize(("depth", "columns"), [(4, 4), (22, 22), (22, 3), (1, 1)])
def test_features_are_those_of_candidates_described_one_by_one(
    known, depth, columns, one_key, describe
):
    split, asked = (only(one_key(n, n, depth)[0], known) for n in (35, 20))
    arrays = Features.fit(split).of(asked, columns)
    table = np.stack([np.broadcast_to(values, (20, columns)) for values in arrays], axis=2)
    for i, k in itertools.product(range(20), range(columns)):
        if asked.there[i, k]:
            assert table[i, k].tolist() == pytest.approx(describe(asked, i, k, split))


def test_votes_that_are_known_are_taken(one_key):
    results = one_key(20, 0)[0]
    distinct, columns = results.distinct(), results.key_columns
    votes = Features.fit(results).of(distinct, 3)[-4]
    for i, k in itertools.product(range(20), range(3)):
        if columns[i, k] >= 0:
            row = results.keys[i].tolist()
            assert votes[i, k] == row.count(row[columns[i, k]])


def test_keys_that_are_known_to_stand_once_have_the_features_of_any_others(one_key):
    distinct = one_key(20, 0)[0].distinct()
    features = Features.fit(distinct)
    known, found = (
        flat(features.of(results, 9), distinct.there)
        for results in (distinct, replace(distinct, once=False))
    )
    np.testing.assert_array_equal(known, found)


@pytest.mark.parametrize("missing", KNOWN)
def test_what_the_split_had_and_the_queries_lack_is_named(missing, one_key):
    results = one_key(20, 0)[0]
    less = only(results, [name for name in KNOWN if name != missing])
    with pytest.raises(InvalidData, match=f"fitted with {missing}, which the queries lack"):
        Features.fit(results).of(less, 3)
    assert len(Features.fit(less).of(results, 3)) == len(Features.fit(less).of(less, 3))


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


def test_the_regression_is_scikit_learns_of_standardised_features():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(500, 4)) * [1, 100, 1e-3, 0] + [5, 0, 1, 3]
    found = rng.uniform(size=500) < 1 / (1 + np.exp(-rows[:, 0] + 5 - rows[:, 1] / 50))
    weights, intercept = fit_logistic(rows, found)
    exact = LogisticRegression(tol=1e-10, max_iter=10_000)
    model = make_pipeline(StandardScaler(), exact).fit(rows, found)
    assert intercept + rows @ weights == pytest.approx(model.decision_function(rows), abs=1e-4)


@pytest.mark.parametrize("positive", [True, False])
def test_one_class_leaves_its_smoothed_rate(positive):
    weights, intercept = fit_logistic(np.ones((9, 2)), np.full(9, positive))
    rate = (9 * positive + 0.5) / 10
    assert (weights.tolist(), intercept) == ([0, 0], pytest.approx(math.log(rate / (1 - rate))))
