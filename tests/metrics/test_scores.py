"""All figures at once, against one at a time and against other libraries."""

import numpy as np
import pytest
import torch

from rcir.errors import InvalidData
from rcir.metrics import (
    average_precision_at_k,
    average_precision_at_r,
    first_match_ranks,
    score_rankings,
)

KS = (1, 3, 10)


@pytest.fixture(scope="module")
def searched():
    """Clustered embeddings of queries and gallery, their labels, and the whole rankings.

    Queries of label 20 have no match.
    """
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(21, 8))
    labels, gallery = np.append(rng.integers(0, 20, 150), [20, 20]), rng.integers(0, 20, 400)
    vectors, others = (centres[of] + rng.normal(size=(len(of), 8)) for of in (labels, gallery))
    vectors, others = vectors.astype(np.float32), others.astype(np.float32)
    distances = np.linalg.norm(vectors[:, None] - others, axis=2)
    relevant = gallery[np.argsort(distances, axis=1)] == labels[:, None]
    return vectors, labels, others, gallery, distances, relevant


def test_they_are_what_each_metric_gives_alone(searched):
    relevant = searched[-1]
    totals = relevant.sum(axis=1)
    scores = score_rankings(relevant, totals, KS)
    assert scores.unmatched == 2
    for column, k in enumerate(KS):
        alone = average_precision_at_k(relevant, totals, k)
        np.testing.assert_array_equal(scores.average_precisions[:, column], alone)
        hits = first_match_ranks(relevant) <= k
        np.testing.assert_array_equal(scores.hits[:, column], hits)
        assert scores.recall[k] == hits.sum() / 150
        assert scores.mean_average_precision[k] == pytest.approx(np.nanmean(alone))
    alone = average_precision_at_r(relevant, totals)
    np.testing.assert_array_equal(scores.average_precisions_at_r, alone)
    assert scores.map_at_r == pytest.approx(alone[:-2].mean())


def test_a_shallow_search_has_no_map_at_r(searched):
    relevant = searched[-1]
    totals = relevant.sum(axis=1)
    whole, shallow = score_rankings(relevant, totals), score_rankings(relevant[:, :10], totals)
    assert shallow.average_precisions_at_r is None
    assert shallow.map_at_r is None
    assert shallow.recall == whole.recall
    assert shallow.mean_average_precision == whole.mean_average_precision
    assert score_rankings(relevant[:, : totals.max()], totals).map_at_r == whole.map_at_r


def test_map_at_r_is_that_of_pytorch_metric_learning(searched):
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    vectors, labels, others, gallery, _, relevant = searched
    metrics = ("precision_at_1", "mean_average_precision_at_r")
    calculator = AccuracyCalculator(metrics, k="max_bin_count", device=torch.device("cpu"))
    found = calculator.get_accuracy(vectors, labels, others, gallery)
    scores = score_rankings(relevant, relevant.sum(axis=1), (1,))
    assert scores.recall[1] == pytest.approx(found["precision_at_1"], abs=1e-12)
    assert scores.map_at_r == pytest.approx(found["mean_average_precision_at_r"], abs=1e-12)


@pytest.mark.parametrize("k", KS)
def test_recall_and_map_are_those_of_torchmetrics(searched, k):
    from torchmetrics.retrieval import RetrievalHitRate, RetrievalMAP

    distances = searched[4]
    relevant = searched[3] == searched[1][:, None]
    queries = torch.arange(len(distances))[:, None].expand(distances.shape)
    given = torch.tensor(1 / distances), torch.tensor(relevant), queries
    scores = score_rankings(searched[-1], relevant.sum(axis=1), (k, 400))
    hit_rate = RetrievalHitRate(empty_target_action="skip", top_k=k)
    assert scores.recall[k] == pytest.approx(hit_rate(*given).item(), abs=1e-6)
    whole = RetrievalMAP(empty_target_action="skip")
    assert scores.mean_average_precision[400] == pytest.approx(whole(*given).item(), abs=1e-6)


@pytest.mark.parametrize(
    ("totals", "ks", "message"),
    [
        ([1, 0], (), "ks is empty"),
        ([1, 0], (1, 4), "k is 4; allowed is 1 to 3"),
        ([0, 0], (1,), "totals of 1 queries"),
        ([1, 0, 0], (1,), r"totals \(3,\)"),
    ],
)
def test_what_cannot_be_scored_is_refused(totals, ks, message):
    relevant = np.array([[False, True, False], [False, False, False]])
    with pytest.raises(InvalidData, match=message):
        score_rankings(relevant, np.array(totals), ks)


def test_queries_without_any_match_have_no_score():
    with pytest.raises(InvalidData, match="no query has a match"):
        score_rankings(np.zeros((2, 3), bool), np.zeros(2, int), (1,))
