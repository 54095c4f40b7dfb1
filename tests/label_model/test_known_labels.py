"""Likelihood ratios of labels over a new one, against normal densities of SciPy."""

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from rcir.label_model import Items, KnownLabels
from rcir.label_model.experts import Discriminants, Moments

L, D = 12, 5


@pytest.fixture(scope="module")
def gallery():
    """Vectors of labels with different numbers of items, and their labels."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(L), rng.integers(1, 9, size=L))
    vectors = 4 * rng.standard_normal((L, D))[labels] + rng.standard_normal((len(labels), D))
    return vectors.astype(np.float32), labels


@pytest.fixture(scope="module")
def fitted(gallery):
    vectors, labels = gallery
    items = Items(labels, np.arange(len(labels)), vectors.__getitem__)
    model = Discriminants.fit(items, Moments.of(items))
    return KnownLabels.fit(model)


def log_ratio(known, vector, items):
    """Log ratio of the densities of a vector given the items of its label, and given none.

    The vector and the items are jointly normal, since they share the mean of their label.
    """
    back = np.linalg.pinv(known.directions)  # from whitened axes to vectors
    within = back.T @ back
    between = back.T @ np.diag(known.spread) @ back
    n, d = len(items), len(vector)
    joint = np.kron(np.ones((n + 1, n + 1)), between) + np.kron(np.eye(n + 1), within)
    flat = np.concatenate([vector, *items]) - np.tile(known.centre, n + 1)
    whole, rest, one = (
        multivariate_normal.logpdf(flat[part], cov=joint[part, part], allow_singular=True)
        for part in (slice(None), slice(d, None), slice(d))
    )
    return whole - rest - one


def test_the_odds_are_the_mean_ratio_of_conditional_densities(gallery, fitted):
    (vectors, labels), known = gallery, fitted
    assert len(known.spread) == D  # so that the axes span all dimensions
    queries = vectors[::5] + 0.3
    expected = [
        logsumexp([log_ratio(known, query, vectors[labels == y]) for y in range(L)])
        for query in queries.astype(np.float64)
    ]
    assert known.log_odds(queries) == pytest.approx(np.array(expected) - np.log(L), rel=1e-5)


@pytest.mark.parametrize("leave_out", ["label", "item"])
def test_an_item_or_its_label_can_be_left_out(gallery, fitted, leave_out):
    (vectors, labels), known = gallery, fitted
    rows = np.arange(0, len(vectors), 4)
    expected = []
    for row in rows:
        ratios = []
        for y in range(L):
            items = vectors[(labels == y) & (np.arange(len(vectors)) != row)]
            if len(items) and not (leave_out == "label" and y == labels[row]):
                ratios.append(log_ratio(known, vectors[row].astype(np.float64), items))
        expected.append(logsumexp(ratios) - np.log(L))
    odds = known.log_odds(vectors[rows], labels[rows], leave_out)
    assert odds == pytest.approx(np.array(expected), rel=1e-5, abs=1e-6)


def test_labels_are_told_from_new_ones(gallery):
    rng = np.random.default_rng(1)
    centres, labels = 3 * rng.standard_normal((30, 8)), np.arange(300) % 20
    vectors = (centres[labels] + rng.standard_normal((300, 8))).astype(np.float32)
    items = Items(labels, np.arange(300), vectors.__getitem__)
    known = KnownLabels.fit(Discriminants.fit(items, Moments.of(items)))
    odds = known.log_odds(centres + rng.standard_normal(centres.shape))
    assert np.median(odds[:20]) > 0 > np.median(odds[20:])
