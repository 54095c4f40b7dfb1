"""Moments, shrinkage and discriminants against scikit-learn, and galleries at the limits."""

import numpy as np
import pytest
from sklearn.covariance import ledoit_wolf_shrinkage
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from rcir.label_model import Items, LabelModel
from rcir.label_model import experts as experts_module
from rcir.label_model import model as model_module
from rcir.label_model.experts import Discriminants, Moments, shrinkage
from rcir.store.codec import read, write


def gallery(labels, d=6, seed=0, noise=0.7):
    """Items around the means of their labels, and their vectors."""
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(labels.max() + 1, d))
    spread = noise * np.linspace(0.3, 1.5, d)
    vectors = (means[labels] + spread * rng.normal(size=(len(labels), d))).astype(np.float32)
    return Items(labels, np.arange(len(labels)), vectors.__getitem__), vectors


def others(items, vectors, k=50):
    """The nearest items of other units of all items."""
    distances = np.linalg.norm(vectors[:, None] - vectors, axis=2)
    distances[items.units[:, None] == items.units] = np.inf
    order = np.argsort(distances, axis=1)[:, :k]
    return np.where(np.isinf(np.take_along_axis(distances, order, axis=1)), -1, order)


def fit(items, vectors):
    return LabelModel.fit(items, np.arange(len(items)), others(items, vectors))


@pytest.mark.parametrize(("n", "d"), [(300, 5), (40, 90), (3, 2)])
def test_shrinkage_is_scikit_learns(n, d):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, d)) * np.linspace(0.1, 3, d)
    expected = ledoit_wolf_shrinkage(x, assume_centered=True)
    assert shrinkage(iter(np.array_split(x, 3))) == pytest.approx(expected, rel=1e-9)


def test_moments_do_not_depend_on_blocks(monkeypatch):
    labels = np.random.default_rng(0).integers(9, size=200)
    items, vectors = gallery(labels)
    moments = Moments.of(items)
    monkeypatch.setattr(experts_module, "BLOCK_VALUES", 50)
    blocks = Moments.of(items)
    for name in ("centre", "means", "within", "total"):
        np.testing.assert_allclose(getattr(blocks, name), getattr(moments, name), atol=1e-9)
    assert blocks.within_shrinkage(items) == pytest.approx(moments.within_shrinkage(items))
    x = vectors.astype(float)
    np.testing.assert_allclose(moments.total, np.cov(x.T, bias=True) * 200, atol=1e-8)
    for label in range(9):
        np.testing.assert_allclose(
            moments.means[label] + moments.centre, x[labels == label].mean(axis=0), atol=1e-9
        )


def test_discriminants_are_scikit_learns():
    """With equally many items per label, and its covariance, which divides by N, not N - L."""
    labels = np.arange(120) % 6
    items, vectors = gallery(labels)
    model = Discriminants.fit(items, Moments.of(items))
    logs = model.scores(model.project(vectors.astype(float)))
    for expert, r in zip(logs, model.shrinkages, strict=True):
        lda = LinearDiscriminantAnalysis(
            solver="lsqr", covariance_estimator=Pooled(r, vectors, labels), priors=np.full(6, 1 / 6)
        )
        decision = lda.fit(vectors.astype(float), labels).decision_function(vectors)
        difference = expert * (1 + 1 / 20) - decision
        np.testing.assert_allclose(difference, difference[:, :1].repeat(6, axis=1), atol=1e-8)


class Pooled:
    """The shrunk covariance of all residuals, whatever scikit-learn passes."""

    def __init__(self, r, vectors, labels):
        self.r, self.vectors, self.labels = r, vectors.astype(float), labels

    def get_params(self, deep=True):
        return {"r": self.r, "vectors": self.vectors, "labels": self.labels}

    def fit(self, _):
        x, names = self.vectors, np.unique(self.labels)
        residuals = np.concatenate(
            [x[self.labels == k] - x[self.labels == k].mean(axis=0) for k in names]
        )
        s = residuals.T @ residuals / (len(x) - len(names))
        self.covariance_ = (1 - self.r) * s + self.r * np.trace(s) / len(s) * np.eye(len(s))
        return self


GALLERIES = {
    "more dimensions than items": (np.arange(60) % 12, 150, 0.7),
    "one item per label": (np.arange(60), 6, 0.7),
    "one label": (np.zeros(40, np.int64), 6, 0.7),
    "one item": (np.zeros(1, np.int64), 6, 0.7),
    "copies of one vector per label": (np.arange(60) % 12, 6, 0.0),
    "few labels with two items": (np.concatenate([np.arange(30), np.arange(12)]), 6, 0.7),
    "two items of one label": (np.concatenate([np.arange(30), [3]]), 6, 0.7),
}


@pytest.mark.parametrize("name", GALLERIES)
def test_galleries_at_the_limits(name):
    labels, d, noise = GALLERIES[name]
    items, vectors = gallery(labels, d, noise=noise)
    model, of_query = fit(items, vectors), labels[:5]
    queries = vectors[:5] + np.float32(0.01)
    nearest = np.argsort(np.linalg.norm(queries[:, None] - vectors, axis=2), axis=1)
    logs = model.log_probabilities(items, queries, nearest)
    assert (logs.argmax(axis=1) == of_query).all()
    without = model.log_probabilities(items, queries, nearest, items.units[:5])
    alone = np.bincount(labels)[of_query, None] == 1
    without_item = alone & (of_query[:, None] == range(logs.shape[1]))
    np.testing.assert_array_equal(np.isneginf(without), without_item)
    for values in (logs, without):
        possible = np.isfinite(values).any(axis=1)
        np.testing.assert_allclose(np.exp(values).sum(axis=1)[possible], 1)


@pytest.mark.parametrize("far", [0, 30])
def test_single_precision_is_precise_enough_for_answers(far, monkeypatch):
    labels = np.random.default_rng(1).integers(30, size=900)  # in numbers that differ
    items, vectors = gallery(labels, 60, noise=1.5)
    items = Items(labels, items.units, (vectors + np.float32(far)).__getitem__)
    model, candidates = fit(items, vectors), others(items, vectors)
    queries = items.vectors(np.arange(900)) + np.float32(0.2)
    quick = model.log_probabilities(items, queries, candidates)
    monkeypatch.setattr(model_module, "MAX_QUICK_NORM", 0)
    precise = model.log_probabilities(items, queries, candidates)
    assert 0 < np.abs(quick - precise).max() < 1e-3 / 4  # of scores, which are at least 1/2


def test_constant_vectors_and_no_candidates():
    labels = np.arange(60) % 12
    vectors = np.ones((60, 4), np.float32)
    items = Items(labels, np.arange(60), vectors.__getitem__)
    model = fit(items, vectors)
    logs = model.log_probabilities(items, vectors[:3], np.full((3, 4), -1))
    np.testing.assert_allclose(logs, -np.log(12))


@pytest.mark.parametrize("name", ["two items of one label", "few labels with two items"])
def test_stored_models_answer_alike(name, tmp_path):
    labels, d, noise = GALLERIES[name]
    items, vectors = gallery(labels, d, noise=noise)
    model = fit(items, vectors)
    write(model, tmp_path, "model")
    restored = read(LabelModel, tmp_path, "model")
    logs = [m.log_probabilities(items, vectors, others(items, vectors)) for m in (model, restored)]
    np.testing.assert_array_equal(*logs)


def test_the_fit_does_not_depend_on_the_order_of_items_in_units_of_several():
    items, vectors = gallery(np.random.default_rng(0).integers(8, size=160))
    units = np.where(np.arange(160) % 7 < 2, np.arange(160) // 7 * 7, np.arange(160))
    items = Items(items.labels, units, items.vectors_at)
    candidates = others(items, vectors)
    models = []
    for seed in range(3):
        rows = np.random.default_rng(seed).permutation(160)
        models.append(LabelModel.fit(items, rows, candidates[rows]))
    assert models[0].fusion.temperatures.min() > 0.1
    for model in models[1:]:
        for name in ("temperatures", "weights"):
            values, first = (getattr(each.fusion, name) for each in (model, models[0]))
            np.testing.assert_allclose(values, first, rtol=1e-3)


def test_one_item_per_label_is_compared_by_the_whitened_cosine():
    items, vectors = gallery(np.arange(40))
    model = fit(items, vectors)
    assert model.discriminants is None
    queries = vectors[:7] + np.float32(0.3)
    logs = model.log_probabilities(items, queries, np.tile(np.arange(40), (7, 1)))
    x = vectors.astype(float) - vectors.astype(float).mean(axis=0)
    covariance, rho = x.T @ x / 40, ledoit_wolf_shrinkage(x, assume_centered=True)
    shrunk = (1 - rho) * covariance + rho * np.trace(covariance) / 6 * np.eye(6)
    values, turn = np.linalg.eigh(shrunk)
    white = turn * values**-0.125
    q = (queries - vectors.astype(float).mean(axis=0)) @ white
    q, items_ = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (q, x @ white))
    logits = 8 * q @ items_.T
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(logs, np.log(0.998 * shares + 0.002 / 40), atol=1e-5)


def test_the_likeliest_labels_suffice_for_the_fit(monkeypatch):
    labels = np.arange(300) % 100
    items, vectors = gallery(labels, d=10)
    every = fit(items, vectors)
    monkeypatch.setattr(model_module, "MAX_FITTED_LABELS", 40)
    some = fit(items, vectors)
    assert (some.fusion.temperatures != every.fusion.temperatures).any()
    np.testing.assert_allclose(some.fusion.temperatures, every.fusion.temperatures, rtol=0.15)
    monkeypatch.setattr(model_module, "MAX_VALUES", 5_000)  # some items at a time
    blocks = fit(items, vectors)
    np.testing.assert_allclose(blocks.fusion.temperatures, some.fusion.temperatures, rtol=1e-6)
    logs = [m.log_probabilities(items, vectors, others(items, vectors)) for m in (every, some)]
    assert np.abs(np.exp(logs[0]) - np.exp(logs[1])).max() < 0.05
