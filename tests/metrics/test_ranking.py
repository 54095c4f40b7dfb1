"""Ranking metrics against known values, loops and other libraries."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from rcir.errors import InvalidData
from rcir.metrics import (
    average_precision_at_k,
    first_match_ranks,
    score_rankings,
)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_first_match_ranks(share):
    relevant = np.random.default_rng(0).random((200, 17)) < share
    expected = [next((k for k, match in enumerate(row, 1) if match), np.inf) for row in relevant]
    np.testing.assert_array_equal(first_match_ranks(relevant), expected)


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


@pytest.mark.parametrize("share", [0.03, 0.4, 1.0])
def test_average_precisions_agree_with_a_loop(share):
    relevant, totals = rankings(share)
    for k in (1, 2, 7, 60):
        expected = [
            looped_precision(row, k) / min(r, k) if r else np.nan
            for row, r in zip(relevant, totals, strict=True)
        ]
        np.testing.assert_allclose(average_precision_at_k(relevant, totals, k), expected)
    expected = [
        looped_precision(row, r) / r if r else np.nan
        for row, r in zip(relevant, totals, strict=True)
    ]
    scores = score_rankings(relevant, totals, (1,))
    np.testing.assert_allclose(scores.average_precisions_at_r, expected)


def test_average_precision_of_whole_rankings_agrees_with_scikit_learn():
    relevant, totals = rankings(0.1)
    scores = -np.arange(relevant.shape[1])
    expected = [average_precision_score(row, scores) for row in relevant[totals > 0]]
    precisions = average_precision_at_k(relevant, totals, relevant.shape[1])
    np.testing.assert_allclose(precisions[totals > 0], expected)


def test_totals_may_be_small_integers():
    relevant, totals = rankings(0.5, gallery=400)
    np.testing.assert_array_equal(
        average_precision_at_k(relevant, totals.astype(np.uint16), 300),
        average_precision_at_k(relevant, totals, 300),
    )


KS = (1, 3, 10)


@pytest.fixture(scope="module")
def searched():
    """Vectors and labels of queries and gallery, and the whole rankings.

    Distances of a query are at least 1 apart, and exact in float32. Queries of label 20 have no
    match.
    """
    rng = np.random.default_rng(0)
    at, of = rng.permutation(400), np.append(rng.integers(0, 400, 150), [7, 300])
    gallery, labels = at // 20, of // 20
    gallery[rng.random(400) < 0.4] = 3
    labels[-2:] = 20
    vectors, items = ((2.0 * np.stack([x, 0 * x], 1)).astype(np.float32) for x in (of, at))
    vectors[:, 0] += 0.5
    distances = np.abs(vectors[:, :1] - items[:, 0])
    relevant = gallery[np.argsort(distances, axis=1)] == labels[:, None]
    return vectors, labels, items, gallery, distances, relevant


def test_scores_are_those_of_each_k_over_queries_with_a_match(searched):
    relevant = searched[-1]
    totals = relevant.sum(axis=1)
    scores = score_rankings(relevant, totals, KS)
    n_unmatched = np.count_nonzero(totals == 0)
    assert scores.unmatched == n_unmatched >= 2
    for column, k in enumerate(KS):
        alone = average_precision_at_k(relevant, totals, k)
        hits = relevant[:, :k].any(axis=1)
        np.testing.assert_array_equal(scores.hits[:, column], hits)
        assert scores.recall[k] == pytest.approx(hits.sum() / (152 - n_unmatched))
        assert scores.mean_average_precision[k] == pytest.approx(np.nanmean(alone))


def test_a_shallow_search_has_no_map_at_r(searched):
    relevant = searched[-1]
    totals = relevant.sum(axis=1)
    whole, shallow = score_rankings(relevant, totals), score_rankings(relevant[:, :10], totals)
    assert shallow.average_precisions_at_r is None
    assert shallow.map_at_r is None
    assert shallow.recall == whole.recall
    assert shallow.mean_average_precision == whole.mean_average_precision
    assert score_rankings(relevant[:, : totals.max()], totals).map_at_r == whole.map_at_r


def test_map_at_r_agrees_with_pytorch_metric_learning(searched):
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    vectors, labels, items, gallery, _, relevant = searched
    metrics = ("precision_at_1", "mean_average_precision_at_r")
    calculator = AccuracyCalculator(metrics, k="max_bin_count", device=torch.device("cpu"))
    found = calculator.get_accuracy(vectors, labels, items, gallery)
    scores = score_rankings(relevant, relevant.sum(axis=1), (1,))
    assert scores.recall[1] == pytest.approx(found["precision_at_1"], abs=1e-9)
    assert scores.map_at_r == pytest.approx(found["mean_average_precision_at_r"], abs=1e-9)


RANKINGS = np.array([[False, True, False], [False, False, False]])


@pytest.mark.parametrize(
    ("relevant", "totals", "ks", "word"),
    [
        (np.ones((2, 3), bool), np.array([3]), (1,), "totals"),
        (np.ones(3, bool), np.array([3, 3, 3]), (1,), "shape"),
        (np.ones((0, 3), bool), np.ones(0, int), (1,), "at least 1"),
        (np.ones((2, 3)), np.array([3, 3]), (1,), "float64"),
        (np.ones((2, 3), bool), np.array([3.0, 3.0]), (1,), "float64"),
        (np.ones((2, 3), bool), np.array([3, 2]), (1,), "totals"),
        (RANKINGS, np.array([1, 0]), (), "ks"),
        (RANKINGS, np.array([1, 0]), (1, 4), "1 to 3"),
        (RANKINGS, np.array([1, 0]), (0,), "1 to 3"),
        (RANKINGS & False, np.zeros(2, int), (1,), "no query"),
    ],
    ids=[
        *("fewer totals", "one dimension", "no query", "floats", "totals of floats"),
        *("more matches than totals", "no k", "large k", "k of zero", "no match"),
    ],
)
def test_invalid_rankings_are_refused(relevant, totals, ks, word):
    with pytest.raises(InvalidData, match=word):
        score_rankings(relevant, totals, ks)
