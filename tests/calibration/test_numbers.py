"""What is reported, computed again with nothing but searches, NumPy and SciPy."""

import json

import numpy as np
import pytest
from scipy.stats import binom
from sklearn.metrics import roc_auc_score

import rcir
from rcir.data import load_splits

DEPTH, DELTA = 150, 0.05


@pytest.fixture(scope="module")
def searched(outcome, trained):
    """Uncertainty and first-match rank of each query of the three splits, by name."""
    retriever = rcir.load(outcome.folder)
    splits = load_splits(trained.data)
    found = {}
    for name in ("adapter", "calibration", "test"):
        queries = getattr(splits, name)
        result = retriever.search(queries.images)
        ranks = np.full(len(queries), np.inf)
        for i, label in enumerate(queries.labels):
            for rank, position in enumerate(result.positions[i], 1):
                if splits.gallery.labels[position] == label:
                    ranks[i] = rank
                    break
        found[name] = (result.uncertainty, ranks)
    return found


def scale(uncertainty, adapter):
    """The min-max scale that a fit on the uncertainties `adapter` gives."""
    low, high = adapter.min(), adapter.max()
    return np.clip((uncertainty - low) / (high - low), 1 / len(adapter), 1)


def calibrated(ranks, scales, alpha):
    """The smallest kappa that the exact binomial bound certifies, by trying all candidates."""
    for kappa in np.unique((ranks - 1) / scales):
        misses = np.sum((ranks - 1) / scales > kappa)
        if np.isfinite(kappa) and binom.cdf(misses, len(ranks), alpha) <= DELTA:
            return kappa
    return None


@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_row_follows_from_the_three_splits(outcome, searched, number):
    """The adapter sees the adapter split alone, the controller the calibration split alone."""
    row = outcome.evaluation.rows[number]
    adapter = searched["adapter"][0]
    uncertainty, ranks = searched["calibration"]
    kappa = calibrated(ranks, scale(uncertainty, adapter), row.alpha)
    constant = calibrated(ranks, np.ones(len(ranks)), row.alpha)
    if row.alpha == 0.001:
        assert (kappa, constant) == (None, None)
        assert (row.kappa, row.test_risk, row.mean_size, row.constant_size) == (None,) * 4
        return
    assert row.kappa == pytest.approx(kappa, rel=1e-9)
    uncertainty, ranks = searched["test"]
    # Kappa pays for K images if it is at least the kappa that asks for them.
    paid = np.arange(DEPTH) / scale(uncertainty, adapter)[:, None] <= kappa
    sizes = paid.sum(axis=1)
    assert row.test_risk == np.mean(ranks > sizes)
    assert row.mean_size == pytest.approx(sizes.mean())
    assert row.constant_size == 1 + constant
    assert (row.delta, row.adapter, row.bound) == (DELTA, "minmax", "binomial")


def test_recall_and_aurocs_are_those_of_the_test_split(outcome, searched, trained):
    uncertainty, ranks = searched["test"]
    occluded = load_splits(trained.data).test.attributes["occluded"]
    evaluation = outcome.evaluation
    assert evaluation.recall_at_1 == np.mean(ranks == 1)
    assert evaluation.auroc_miss == pytest.approx(roc_auc_score(ranks > 1, uncertainty))
    assert evaluation.auroc_occlusion == pytest.approx(roc_auc_score(occluded, uncertainty))
    assert evaluation.unmatched == np.isinf(ranks).sum()
    assert (evaluation.n_calibration, evaluation.n_test) == (300, 300)


def test_reliability_is_scaled_by_the_adapter_split(outcome, searched):
    uncertainty, ranks = searched["test"]
    adapter = searched["adapter"][0]
    sure = 1 - np.clip((uncertainty - adapter.min()) / np.ptp(adapter), 0, 1)
    bins = np.minimum((sure * 10).astype(int), 9)
    np.testing.assert_array_equal(
        outcome.evaluation.reliability.count, np.bincount(bins, minlength=10)
    )
    for number in np.unique(bins):
        expected = np.mean(ranks[bins == number] == 1)
        assert outcome.evaluation.reliability.recall[number] == pytest.approx(expected)


def test_the_retriever_on_disk_returns_the_measured_sets(outcome, trained):
    row = outcome.evaluation.rows[1]
    test = load_splits(trained.data).test
    answers = rcir.load(outcome.folder).retrieve(list(test.images), row.alpha, row.delta)
    missed = [
        label not in set(each.labels) for each, label in zip(answers, test.labels, strict=True)
    ]
    assert np.mean(missed) == row.test_risk
    assert np.mean([each.size for each in answers]) == pytest.approx(row.mean_size)


def test_results_json_has_these_keys_and_the_same_numbers(outcome):
    results = json.loads((outcome.folder.parent / "results.json").read_text())
    evaluation = outcome.evaluation
    assert results.pop("seconds") > 0
    rows = results.pop("rows")
    names = ("recall_at_1", "n_calibration", "n_test", "auroc_miss", "auroc_occlusion")
    assert results == {
        "dataset": "digits",
        "encoder": "btl",
        **{name: getattr(evaluation, name) for name in names},
    }
    keys = ("alpha", "delta", "adapter", "bound", "kappa", "test_risk", "mean_size")
    keys = (*keys, "constant_size")
    assert rows == [{key: getattr(row, key) for key in keys} for row in evaluation.rows]
    assert rows[0]["kappa"] is None
