"""The half-whitened distances of galleries without labels, against scikit-learn."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.covariance import ledoit_wolf

import rcir
from rcir.retrieval import whitening

N, DIM = 300, 12


@pytest.fixture(scope="module")
def vectors():
    """Of 40 kinds; some directions vary much and tell little."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(40, size=1500)
    spread = np.repeat([3.0, 0.5], DIM // 2)
    centres = rng.normal(size=(40, DIM))
    return (centres[kinds] + spread * rng.normal(size=(1500, DIM)) + 5).astype(np.float32), kinds


def lists(kinds):
    return [[f"kind {kind}"] for kind in kinds]


def build(vectors, labels, **options):
    values, kinds = vectors
    return rcir.Retriever.from_embeddings(values[:N], labels=labels(kinds[:N]), **options)


@pytest.fixture(scope="module")
def calibrated(vectors):
    retriever = build(vectors, lists)
    retriever.calibrate(vectors[0][N:1000], lists(vectors[1][N:1000]))
    return retriever


def test_distances_are_cosines_after_dividing_by_the_fourth_root_of_variances(calibrated, vectors):
    searcher, fitted = calibrated.searcher, calibrated._state.calibration.whitening
    results = searcher.search(vectors[0][1000:1020])
    gallery = searcher.index.vectors_at(np.arange(N)).astype(float)
    centre = gallery.mean(axis=0)
    values, directions = np.linalg.eigh(ledoit_wolf(gallery)[0])
    transform = directions / values**0.25
    items, queries = ((x - centre) @ transform for x in (gallery, results.vectors))
    items, queries = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (items, queries))
    expected = 1 - np.einsum("nd,nkd->nk", queries, items[results.positions])
    beyond = expected[:, :50].mean(axis=1)
    expected[:, 50:] = beyond[:, None]
    actual = fitted.add_to(searcher, results).whitened_distances
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_missing_candidates_get_the_mean_and_every_query_its_own_distances(calibrated, vectors):
    searcher, fitted = calibrated.searcher, calibrated._state.calibration.whitening
    results = searcher.search(vectors[0][1000:1008])
    distances = fitted.add_to(searcher, results).whitened_distances
    positions = results.positions.copy()
    positions[2, 10:] = -1
    missing = fitted.add_to(searcher, replace(results, positions=positions)).whitened_distances
    np.testing.assert_allclose(missing[2, 10:], distances[2, :10].mean(), rtol=1e-5)
    np.testing.assert_allclose(np.delete(missing, 2, 0), np.delete(distances, 2, 0), rtol=1e-5)
    alone = fitted.add_to(searcher, results[3:4]).whitened_distances
    np.testing.assert_allclose(alone[0], distances[3], rtol=1e-5)


def test_blocks_do_not_change_distances(calibrated, vectors, monkeypatch):
    searcher, fitted = calibrated.searcher, calibrated._state.calibration.whitening
    results = searcher.search(vectors[0][1000:1010])
    whole = fitted.add_to(searcher, results).whitened_distances
    monkeypatch.setattr(whitening, "BLOCK_VALUES", 3 * 50 * DIM)
    np.testing.assert_allclose(
        fitted.add_to(searcher, results).whitened_distances, whole, rtol=1e-5
    )


def test_sets_are_smaller_than_without(calibrated, vectors, tmp_path, monkeypatch):
    values, kinds = vectors[0][1000:], vectors[1][1000:]
    answers = calibrated.retrieve(values, 0.2, 0.1)
    found = [vectors[1][list(map(int, answer.ids))] for answer in answers]
    missed = np.mean([kind not in each for each, kind in zip(found, kinds, strict=True)])
    assert missed < 0.2 + 3 * np.sqrt(0.2 * 0.8 / len(kinds))
    calibrated.save(tmp_path / "folder")
    loaded = rcir.Retriever.load(tmp_path / "folder")
    assert [a.to_dict() for a in loaded.retrieve(values[:9], 0.2, 0.1)] == [
        a.to_dict() for a in calibrated.retrieve(values[:9], 0.2, 0.1)
    ]
    monkeypatch.setattr("rcir.retrieval.calibrate.fit_whitening", lambda _: None)
    without = build(vectors, lists)
    without.calibrate(vectors[0][N:1000], lists(vectors[1][N:1000]))
    sizes = [np.mean([a.size for a in r]) for r in (answers, without.retrieve(values, 0.2, 0.1))]
    assert sizes[0] < 0.9 * sizes[1], sizes


def test_only_galleries_without_labels_that_give_vectors_back_are_whitened(vectors):
    assert whitening.fit_whitening(build(vectors, lists).searcher) is not None
    assert whitening.fit_whitening(build(vectors, list).searcher) is None


@pytest.mark.parametrize(("n", "tuned"), [(199, 24), (200, 60)])
def test_few_queries_mostly_calibrate(vectors, n, tuned):
    retriever = build(vectors, lists)
    report = retriever.calibrate(vectors[0][N : N + n], lists(vectors[1][N : N + n]))
    assert (report.n_tuning, report.n_calibration) == (tuned, n - tuned)
