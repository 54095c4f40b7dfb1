"""Experts without the items of a unit are those of models that were fitted without them."""

import numpy as np
import pytest

from rcir.label_model import Items, LabelModel

L = 8


def make_items(n=60, d=6):
    """Items of 8 labels, the last of which has a single item, and the others at least three."""
    rng = np.random.default_rng(0)
    several = np.arange(L - 1).repeat(3)
    labels = np.concatenate([several, rng.integers(L - 1, size=n - len(several) - 1), [L - 1]])
    means = rng.normal(size=(L, d))
    vectors = (
        means[labels] + 0.7 * rng.normal(size=(len(labels), d)) * np.linspace(0.3, 1.5, d)
    ).astype(np.float32)
    return Items(labels, np.arange(n), vectors.__getitem__), vectors


def search(items, vectors, queries, left_out):
    """All other items, nearest by cosine distance first, without those of a unit."""
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)  # noqa: E731
    distances = 1 - unit(queries.astype(float)) @ unit(vectors.astype(float)).T
    distances[items.units[None] == left_out[:, None]] = np.inf
    order = np.argsort(distances, axis=1)
    return np.where(np.isfinite(np.take_along_axis(distances, order, axis=1)), order, -1)


def refitted_experts(model, items, vectors, i):
    """Experts of item i by covariances and means that are computed anew."""
    lda = model.discriminants
    keep = items.units != items.units[i]
    x = vectors.astype(float)
    labels = items.labels
    scatter, means = np.zeros((x.shape[1],) * 2), {}
    for label in np.unique(labels[keep]):
        of_label = x[keep & (labels == label)]
        means[label] = of_label.mean(axis=0), len(of_label)
        scatter += (of_label - means[label][0]).T @ (of_label - means[label][0])
    full = np.zeros_like(scatter)
    for label in np.unique(labels):
        centred = x[labels == label] - x[labels == label].mean(axis=0)
        full += centred.T @ centred
    experts = np.full((6, L), -np.inf)
    inverses = []
    for number, r in enumerate(lda.shrinkages):
        target = np.trace(full) / lda.freedom / x.shape[1]
        sigma = (1 - r) * scatter / lda.freedom + r * target * np.eye(x.shape[1])
        inverses.append(np.linalg.inv(sigma))
        for label, (mean, n) in means.items():
            gap = x[i] - mean
            experts[number, label] = -0.5 * gap @ inverses[-1] @ gap / (1 + 1 / n)
    half = model.neighbours.half
    z = (x - half.centre) @ half.transform
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    y = x / np.linalg.norm(x, axis=1, keepdims=True)
    for label in means:
        others = np.flatnonzero(keep & (labels == label))
        experts[3, label] = -np.log((1 - y[others] @ y[i]).min())
        experts[4, label] = -((1 - z[others] @ z[i]).min() ** 2)
        gaps = x[others] - x[i]
        squares = np.einsum("nd,de,ne->n", gaps, inverses[0], gaps) / x.shape[1]
        experts[5, label] = -np.log(squares.min())
    return experts


def units_of(kind, n):
    rng = np.random.default_rng(1)
    if kind == "items":
        return np.arange(n)
    return rng.permutation(np.arange(n) // (2 if kind == "pairs" else 4))  # also across labels


@pytest.mark.parametrize("kind", ["items", "pairs", "clusters"])
def test_experts_without_a_unit_are_those_of_a_refit(kind):
    items, vectors = make_items()
    items = Items(items.labels, units_of(kind, len(vectors)), items.vectors_at)
    rows = np.arange(len(vectors))
    candidates = search(items, vectors, vectors, items.units)
    model = LabelModel.fit(items, rows, candidates)
    assert model.discriminants is not None
    checked = 0
    for block, experts in model._experts(items, vectors, candidates, items.units):
        for i, found in zip(block, experts.transpose(1, 0, 2), strict=True):
            expected = refitted_experts(model, items, vectors, i)
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
            checked += 1
    assert checked == len(vectors)
