"""Validation against brute force."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier, get_ident

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import WithinRadius
from rcir.embedding import Embedding
from rcir.encoders import EncoderConfig
from rcir.encoders.base import Encoder
from rcir.encoders.batches import embed
from rcir.errors import InvalidData, TrainingDiverged
from rcir.metrics import first_match_ranks
from tests.training.helpers import certified_size, match_rank_bounds
from training.validation import assign_fold_roles, certify_folds, validate
from training.workers import CPU, Workers


class Pixels(Encoder):
    """An encoder whose embedding is the picture itself."""

    def __init__(self, spread=None):
        super().__init__(EncoderConfig())
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.spread = spread

    def forward(self, images):
        mean = images.flatten(1) + self.anchor
        uncertainty = None if self.spread is None else self.spread * mean.sum(1)
        return Embedding(mean, None, uncertainty)


def validated(encoder, images):
    """Validate the embeddings of images, as training does."""
    return validate(embed(encoder, Preprocessing((2, 3)), images.images), images)


def draw(n, copies):
    """n random pictures of three labels, the first `copies` of them the same picture."""
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 256, (n, 2, 3), dtype=np.uint8)
    pixels[:copies] = pixels[0]
    return ImageSet(pixels, rng.integers(0, 3, n), [str(i) for i in range(n)])


def dots(labels):
    """Six pictures, the first three of them alike."""
    pixels = np.zeros((6, 2, 3), np.uint8)
    pixels[3:] = np.arange(3, dtype=np.uint8)[:, None, None] * 50 + 100
    return ImageSet(pixels, np.array(labels), list("abcdef"))


def test_ranks_are_those_of_a_search_among_all_others():
    """Vectors are integers, of which float32 has exact distances; ties may come in any order."""
    n = 1100
    images = draw(n, copies=0)
    vectors = images.images.reshape(n, -1).astype(np.float64)
    validation = validate(Embedding(torch.from_numpy(vectors).float()), images)
    bounds = []
    for row, label in enumerate(images.labels):
        others = np.arange(n) != row
        distances = np.square(vectors[others] - vectors[row]).sum(1)
        bounds.append(match_rank_bounds(distances, images.labels[others] == label, 0))
    lowest, highest = np.array(bounds).T
    assert np.mean(lowest == highest) > 0.95
    assert ((lowest <= validation.ranks) & (validation.ranks <= highest)).all()
    metrics = validation.metrics()
    assert metrics["validation/recall_at_1"] == np.mean(validation.ranks == 1)


def test_an_image_is_left_out_of_its_own_search_even_among_its_copies():
    """Copies of one picture: whoever drops the nearest drops a copy."""
    apart = validated(Pixels(), dots([0, 1, 2, 3, 4, 4]))
    assert apart.ranks[:3].tolist() == [np.inf] * 3
    twins = validated(Pixels(), dots([0, 0, 0, 3, 4, 5]))
    np.testing.assert_array_equal(twins.ranks, [1, 1, 1, *[np.inf] * 3])
    # Recall is of the images that another one matches.
    assert twins.metrics()["validation/recall_at_1"] == 1
    assert twins.matched.tolist() == [True] * 3 + [False] * 3


def test_without_an_uncertainty_the_angle_to_the_nearest_other_is_used():
    images = draw(40, copies=3)
    validation = validated(Pixels(), images)
    vectors = images.images.reshape(40, -1) / 255
    apart = np.linalg.norm(vectors[:, None] - vectors, axis=2) + np.diag(np.full(40, np.inf))
    nearest = vectors[apart.argmin(1)]
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(nearest, axis=1)
    expected = 1 - (vectors * nearest).sum(1) / lengths
    np.testing.assert_allclose(validation.uncertainty, expected, atol=1e-4)


def test_the_encoders_uncertainty_is_judged_by_how_it_ranks_misses():
    images = draw(60, copies=0)
    validation = validated(Pixels(spread=2.0), images)
    stated = images.images.reshape(60, -1).sum(1) / 255 * 2
    np.testing.assert_allclose(validation.uncertainty, stated, rtol=1e-4)
    expected = roc_auc_score(validation.ranks != 1, validation.uncertainty)
    assert validation.metrics()["validation/auroc_miss"] == pytest.approx(expected)


def test_embeddings_that_cannot_be_validated_are_refused():
    encoder = Pixels()
    with pytest.raises(InvalidData, match="2"):
        validated(encoder, draw(2, copies=0))
    with pytest.raises(InvalidData, match="matches"):
        validated(encoder, dots(range(6)))
    encoder.anchor.data.fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match=r"optimizer\.lr"):
        validated(encoder, draw(5, copies=0))


@pytest.mark.parametrize(("n", "copies", "n_certified"), [(8, 3, 0), (100, 50, 2), (240, 60, 3)])
def test_sizes_are_those_that_the_images_certify(n, copies, n_certified):
    """A size that cannot be certified is left out."""
    validation = validated(Pixels(spread=1.0), draw(n, copies))
    parts = [(part.scores, part.candidate_scores) for part in validation.certified]
    sizes = [certified_size(parts, alpha, 0.1) if parts else None for alpha in (0.05, 0.1, 0.2)]
    metrics = validation.metrics()
    names = [f"validation/certified_size_{alpha}" for alpha in ("0.05", "0.1", "0.2")]
    assert [metrics.get(name) for name in names] == pytest.approx(sizes)
    certified = [size for size in sizes if size is not None]
    assert len(certified) == n_certified
    assert [n / 4, *certified, 1] == sorted([n / 4, *certified, 1], reverse=True)


def test_sizes_depend_on_the_uncertainty_of_the_encoder():
    images = draw(240, copies=0)
    embedding = embed(Pixels(1.0), Preprocessing((2, 3)), images.images)
    vectors, stated = embedding.vectors.numpy(), embedding.uncertainty.double().numpy()
    expected, other = (certify_folds(vectors, each, images) for each in (stated, None))
    certified = validate(embedding, images).certified
    for ours, theirs, wrong in zip(certified, expected, other, strict=True):
        np.testing.assert_array_equal(ours.scores, theirs.scores)
        np.testing.assert_array_equal(ours.candidate_scores, theirs.candidate_scores)
        assert not np.array_equal(ours.candidate_scores, wrong.candidate_scores)


@pytest.mark.parametrize(("n", "folds"), [(7, 0), (60, 4)])
def test_results_name_their_queries(n, folds):
    images = draw(n, copies=3)
    validation = validated(Pixels(spread=2.0), images)
    assert validation.depth == n - 1
    results = validation.to_results(images)
    assert len(results.parts) == folds
    names = json.dumps([str(number) for number in range(n)]).encode()
    assert results.queries == hashlib.sha256(names).hexdigest()
    assert results.metrics["recall_at_1"] == np.mean(validation.ranks[validation.matched] == 1)


def street(n=60):
    """Each query stands 12 m from an image of the database; its four views are one place."""
    database = np.column_stack([np.arange(n) * 100.0, np.zeros(n)])
    queries = np.repeat(database + np.array([0.0, 12.0]), 4, axis=0)
    places = np.concatenate([database, queries])
    names = [str(number) for number in range(len(places))]
    relevance = WithinRadius(places, 25.0, 10.0, np.arange(len(places)) < n)
    return ImageSet(np.zeros((len(places), 2, 2), np.uint8), None, names, {}, relevance)


@pytest.mark.parametrize("of", [street, partial(draw, 250, 50)], ids=["places", "labels"])
def test_workers_search_a_part_of_the_queries_each_and_return_the_same(of, monkeypatch):
    images, barrier, exchanged = of(), Barrier(3), {}
    vectors = torch.randn(len(images), 8, generator=torch.Generator().manual_seed(0))
    embedding = Embedding(vectors, None, vectors.square().sum(1))
    n_ranked = {}

    def counted(relevant):
        n_ranked[get_ident()] = n_ranked.get(get_ident(), 0) + len(relevant)
        return first_match_ranks(relevant)

    class InThread(Workers):
        def share(self, n, function):
            own = {number: function(number) for number in range(self.rank, n, self.count)}
            exchanged.update(own)
            barrier.wait(60)
            everyone = [exchanged[number] for number in range(n)]
            barrier.wait(60)
            return everyone

    def work(rank):
        return get_ident(), validate(embedding, images, InThread(rank, 3, CPU))

    expected = validate(embedding, images)
    monkeypatch.setattr("training.validation.QUERY_BATCH_SIZE", 25)
    monkeypatch.setattr("training.validation.certify_folds", lambda *args: [])
    monkeypatch.setattr("training.validation.first_match_ranks", counted)
    with ThreadPoolExecutor(3) as pool:
        threads, validations = zip(*pool.map(work, range(3)), strict=True)
    n_queries = len(expected.ranks)
    assert sum(n_ranked[thread] for thread in threads) == n_queries
    assert max(n_ranked.values()) <= 4 * 25 < n_queries
    for name in ("ranks", "uncertainty", "matched", "precision"):
        first, *others = (getattr(validation, name) for validation in validations)
        for other in others:
            np.testing.assert_array_equal(other, first)
        # In a block of another size, rounding may swap candidates that are equally far.
        assert np.isclose(first, getattr(expected, name), atol=1e-4).mean() > 0.97


def test_queries_are_searched_for_in_the_database_alone():
    """A query does not find other views of its place, which are queries too."""
    images, n, rng = street(), 60, np.random.default_rng(0)
    database, place = rng.normal(size=(2, n, 16))  # nothing to do with each other
    views = np.repeat(place, 4, axis=0) + rng.normal(size=(4 * n, 16)) * 1e-3
    vectors = np.concatenate([database, views])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    embedding = Embedding(torch.from_numpy(vectors).float())
    validation = validate(embedding, images)
    nearest = (vectors[n:] @ vectors[:n].T).argmax(1)
    np.testing.assert_array_equal(validation.correct, nearest == np.arange(n).repeat(4))
    assert validation.metrics()["validation/recall_at_1"] < 0.2
    # Among themselves every view finds another one of its place.
    plain = replace(images, relevance=WithinRadius(images.relevance.places, 25.0))
    assert validate(embedding, plain).correct[n:].all()


def test_folds_search_the_database_and_measure_every_query_once():
    roles = assign_fold_roles(street())
    assert len(roles) == 3
    for role in roles:
        np.testing.assert_array_equal(role.searched, np.arange(60))
        queries = np.concatenate([role.tuning, role.calibration, role.measured])
        assert sorted(queries.tolist()) == list(range(60, 300))
    measured = np.concatenate([role.measured for role in roles])
    assert sorted(measured.tolist()) == list(range(60, 300))
