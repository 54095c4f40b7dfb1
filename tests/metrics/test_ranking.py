"""Rankings against known values, loops and scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from rcir.errors import InvalidData
from rcir.metrics import (
    average_precision,
    average_precision_at_k,
    average_precision_at_r,
    first_match_ranks,
    macro_mean,
    ranking,
    recall_at_k,
)


def looped_ranks(relevant):
    ranks = []
    for row in relevant:
        rank = np.inf
        for position, match in enumerate(row, 1):
            if match:
                rank = position
                break
        ranks.append(rank)
    return np.array(ranks)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_first_match_ranks(share):
    relevant = np.random.default_rng(0).random((200, 17)) < share
    np.testing.assert_array_equal(first_match_ranks(relevant), looped_ranks(relevant))


def test_recall_counts_ranks_up_to_k():
    ranks = np.array([1, 2, 2, 3, 5, np.inf, np.inf, 1])
    assert [recall_at_k(ranks, k) for k in (1, 2, 3, 4, 5, 100)] == [
        2 / 8,
        4 / 8,
        5 / 8,
        5 / 8,
        6 / 8,
        6 / 8,
    ]


def looped_precision(row, limit):
    """Sum of the precisions at the first `limit` ranks that hold a match."""
    found, total = 0, 0.0
    for rank, match in enumerate(row[:limit], 1):
        if match:
            found += 1
            total += found / rank
    return total


def rankings(share, n=300, gallery=60, seed=4):
    """Whole rankings, the first of a query without a match."""
    relevant = np.random.default_rng(seed).random((n, gallery)) < share
    relevant[0] = False
    return relevant, relevant.sum(axis=1)


GOLDEN = np.array([[1, 0, 1, 0, 0, 1, 0, 0, 0, 0]], bool), np.array([3])
SHALLOW = np.array([[0, 1, 1, 0, 1]], bool), np.array([7])


@pytest.mark.parametrize(
    ("query", "k", "expected"),
    [
        (GOLDEN, 1, 1),
        (GOLDEN, 2, 0.5),
        (GOLDEN, 3, 0.555556),
        (GOLDEN, 5, 0.555556),
        (GOLDEN, 10, 0.722222),
        (SHALLOW, 1, 0),
        (SHALLOW, 2, 0.25),
        (SHALLOW, 3, 0.388889),
        (SHALLOW, 5, 0.353333),
    ],
)
def test_average_precision_at_k_of_known_rankings(query, k, expected):
    assert average_precision_at_k(*query, k) == pytest.approx([expected], abs=1e-6)


def test_average_precision_at_r_of_a_known_ranking():
    assert average_precision_at_r(*GOLDEN) == pytest.approx([0.555556], abs=1e-6)


@pytest.mark.parametrize("share", [0.03, 0.4, 1.0])
@pytest.mark.parametrize("size", [8, 1000, 2**18])
def test_average_precisions_are_those_of_a_loop(share, size, monkeypatch):
    monkeypatch.setattr(ranking, "CELLS_TOGETHER", size)
    relevant, totals = rankings(share)
    for k in (1, 2, 7, 60):
        expected = [
            looped_precision(row, k) / min(r, k) if r else np.nan
            for row, r in zip(relevant, totals, strict=True)
        ]
        np.testing.assert_allclose(average_precision_at_k(relevant, totals, k), expected)
    for limits, found in (
        (totals, average_precision_at_r(relevant, totals)),
        (np.full(len(totals), 60), average_precision(relevant, totals)),
    ):
        expected = [
            looped_precision(row, limit) / r if r else np.nan
            for row, limit, r in zip(relevant, limits, totals, strict=True)
        ]
        np.testing.assert_allclose(found, expected)


def test_matches_beyond_the_search_count_in_the_normaliser():
    relevant, totals = rankings(0.2)
    depth = relevant[:, :20]
    found = average_precision_at_k(depth, totals, 20)
    np.testing.assert_allclose(found, average_precision_at_k(relevant, totals, 20))
    assert (found[1:] < average_precision_at_k(depth, depth.sum(axis=1), 20)[1:]).any()


def test_average_precision_is_that_of_scikit_learn():
    relevant, totals = rankings(0.1)
    scores = -np.arange(relevant.shape[1])
    expected = [average_precision_score(row, scores) for row in relevant[totals > 0]]
    np.testing.assert_allclose(average_precision(relevant, totals)[totals > 0], expected)


def test_average_precision_at_1_is_recall_at_1():
    relevant, totals = rankings(0.3)
    found = average_precision_at_k(relevant, totals, 1)
    np.testing.assert_array_equal(found[totals > 0], relevant[totals > 0, 0])


def test_small_integers_are_totals_too():
    relevant, totals = rankings(0.5, gallery=400)
    np.testing.assert_array_equal(
        average_precision_at_k(relevant, totals.astype(np.uint16), 300),
        average_precision_at_k(relevant, totals, 300),
    )


@pytest.mark.parametrize("k", [0, 6])
def test_k_is_within_the_depth(k):
    with pytest.raises(InvalidData, match=f"k is {k}; allowed is 1 to 5"):
        average_precision_at_k(*SHALLOW, k)


def test_map_at_r_says_how_deep_to_search():
    with pytest.raises(InvalidData, match="search at least 7 deep"):
        average_precision_at_r(*SHALLOW)


def test_a_whole_ranking_holds_all_matches():
    with pytest.raises(InvalidData, match="rankings of 1 queries do not hold all"):
        average_precision(*SHALLOW)


@pytest.mark.parametrize(
    ("relevant", "totals", "message"),
    [
        (np.ones((2, 3), bool), np.array([3]), r"totals \(1,\)"),
        (np.ones(3, bool), np.array([3, 3, 3]), r"shape \(3,\)"),
        (np.ones((0, 3), bool), np.ones(0, int), "at least 1"),
        (np.ones((2, 3)), np.array([3, 3]), "of type float64"),
        (np.ones((2, 3), bool), np.array([3.0, 3.0]), "totals of float64"),
        (np.ones((2, 3), bool), np.array([3, 2]), "totals of 1 queries"),
    ],
)
@pytest.mark.parametrize(
    "metric",
    [lambda r, t: average_precision_at_k(r, t, 1), average_precision_at_r, average_precision],
)
def test_what_is_no_ranking_is_refused(metric, relevant, totals, message):
    with pytest.raises(InvalidData, match=message):
        metric(relevant, totals)


def test_macro_mean_is_that_of_a_loop():
    rng = np.random.default_rng(5)
    values, classes = rng.random(500), rng.choice([3, 8, 9, 40], 500, p=[0.7, 0.2, 0.05, 0.05])
    values[::7] = np.nan
    values[classes == 9] = np.nan
    means = [np.nanmean(values[classes == label]) for label in (3, 8, 40)]
    assert macro_mean(values, classes) == pytest.approx(sum(means) / 3)


@pytest.mark.parametrize("n", [2, 3])
def test_a_mean_needs_a_value_of_each_query(n):
    with pytest.raises(InvalidData, match="0 of them not NaN"):
        macro_mean(np.full(3, np.nan), np.zeros(n))


def test_without_any_match_nothing_has_a_precision():
    relevant, totals = np.zeros((3, 4), bool), np.zeros(3, int)
    for values in (
        average_precision_at_k(relevant, totals, 2),
        average_precision_at_r(relevant, totals),
        average_precision(relevant, totals),
    ):
        np.testing.assert_array_equal(values, np.full(3, np.nan))
