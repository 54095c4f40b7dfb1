"""Embedding and searching apart: vectors of any length, with and without an encoder."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from rcir.data import ImageSet, Preprocessing
from rcir.embedding import Embedding
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import InvalidConfig, InvalidData, InvalidImage, StaleCalibration
from rcir.index import build_index, find_index, lengths, one_minus_cosine
from rcir.retrieval.retriever import Retriever

DEPTH = 50


def drawn(n, seed, dim=6):
    """Vectors of every length from 0.1 to 10, in 10 clusters, with the number of each one's."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).standard_normal((10, dim))
    labels = rng.integers(10, size=n)
    vectors = centres[labels] + 0.3 * rng.standard_normal((n, dim))
    return (vectors * rng.uniform(0.1, 10, (n, 1))).astype(np.float32), labels


def part(n, seed):
    vectors, labels = drawn(n, seed)
    return ImageSet(vectors, labels, [f"{seed}-{row}" for row in range(n)])


@pytest.fixture(scope="module")
def bare():
    """A retriever of vectors alone, calibrated."""
    vectors, labels = drawn(200, 1)
    names = [f"item {row}" for row in range(200)]
    made = Retriever(
        *(None, None, build_index(vectors), names, labels, DEPTH), norms=lengths(vectors)
    )
    made.calibrate(made.search_labelled(part(150, 2)), made.search_labelled(part(300, 3)))
    return made


def test_cosines_of_vectors_of_any_length_are_scipy_s():
    (first, _), (second, _) = drawn(30, 5), drawn(40, 6)
    apart = cdist(first, second)
    found = one_minus_cosine(apart, lengths(first)[:, None], lengths(second)[None])
    np.testing.assert_allclose(found, cdist(first, second, "cosine"), atol=1e-5)


def test_cosines_of_unit_vectors_are_half_the_squared_distance():
    vectors, _ = drawn(30, 5)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert (lengths(unit) == 1).all()
    apart = cdist(unit, unit)
    np.testing.assert_array_equal(one_minus_cosine(apart, 1, 1), np.clip(apart**2 / 2, 0, 2))


def test_a_zero_vector_is_at_a_right_angle():
    assert one_minus_cosine(np.array([2.0, 0.0]), [0.0, 0.0], [2.0, 0.0]).tolist() == [1.0, 1.0]


def test_the_uncertainty_of_vectors_is_one_minus_the_cosine_to_the_nearest(bare):
    queries, _ = drawn(40, 7)
    gallery, _ = drawn(200, 1)
    found = bare.search(queries)
    nearest = cdist(queries, gallery).argmin(1)
    np.testing.assert_array_equal(found.positions[:, 0], nearest)
    expected = cdist(queries, gallery, "cosine")[np.arange(40), nearest]
    np.testing.assert_allclose(found.uncertainty, expected, atol=1e-5)
    assert not np.allclose(found.uncertainty, found.distances[:, 0] ** 2 / 2, rtol=0.1)


def test_vectors_are_answered_one_by_one_and_together(bare):
    queries, _ = drawn(12, 7)
    answers = bare.retrieve(queries, 0.3, 0.1)
    assert [answer.to_dict() for answer in answers] == [
        bare.retrieve(query, 0.3, 0.1).to_dict() for query in queries
    ]
    embedded = bare.retrieve(Embedding(torch.from_numpy(queries)), 0.3, 0.1)
    assert [answer.to_dict() for answer in embedded] == [answer.to_dict() for answer in answers]
    assert answers[0].ids[0].startswith("item ")


def test_a_retriever_of_vectors_survives_saving(bare, tmp_path):
    folder = bare.save(tmp_path / "vectors")
    assert not (folder / "encoder.safetensors").exists()
    loaded = Retriever.load(folder)
    assert loaded.encoder is None
    assert loaded.fingerprints() == bare.fingerprints()
    queries, _ = drawn(12, 7)
    for options in ({}, {"distinct": "label"}):
        before, after = (
            [answer.to_dict() for answer in one.retrieve(queries, 0.3, 0.1, **options)]
            for one in (bare, loaded)
        )
        assert before == after
    assert loaded.controller is loaded.controllers[None]


def test_lengths_are_kept_as_images_come_and_go(bare, tmp_path):
    own = Retriever.load(bare.save(tmp_path / "vectors"))
    further, labels = drawn(30, 8)
    own.add(further, [f"new {row}" for row in range(30)], labels)
    own.remove([f"item {row}" for row in range(100)])
    gallery = np.concatenate([drawn(200, 1)[0][100:], further])
    queries, _ = drawn(40, 9)
    found = own.search(queries)
    nearest = cdist(queries, gallery).argmin(1)
    expected = cdist(queries, gallery, "cosine")[np.arange(40), nearest]
    np.testing.assert_allclose(found.uncertainty, expected, atol=1e-5)
    with pytest.raises(StaleCalibration, match="gallery, index"):
        own.retrieve(queries, 0.3, 0.1)
    assert Retriever.load(own.save(tmp_path / "vectors")).fingerprints() == own.fingerprints()


def test_queries_that_were_tuned_with_are_known_by_their_vectors(bare):
    with pytest.raises(InvalidData, match="150 of 150 calibration queries are in the tuning split"):
        bare.calibrate(bare.search_labelled(part(150, 2)), bare.search_labelled(part(150, 2)))


@pytest.mark.parametrize(
    ("query", "error", "said"),
    [
        (np.zeros(5), InvalidData, r"needed is \(n, 6\)"),
        (np.zeros((2, 7)), InvalidData, r"needed is \(n, 6\)"),
        (np.full(6, np.nan), InvalidData, "NaN or infinite"),
        (np.zeros((8, 16), np.uint8), InvalidConfig, "has no encoder, and takes vectors only"),
        ("picture.png", InvalidConfig, "has no encoder, and takes vectors only"),
        (["picture.png"], InvalidConfig, "has no encoder, and takes vectors only"),
    ],
    ids=str,
)
def test_what_is_no_vector_is_refused(bare, query, error, said):
    with pytest.raises(error, match=said):
        bare.retrieve(query, 0.3, 0.1)


def test_an_encoder_needs_its_preprocessing(retriever, splits):
    for encoder, preprocessing in (
        (retriever.encoder, None),
        (None, retriever.preprocessing),
    ):
        with pytest.raises(InvalidConfig, match="give an encoder and its preprocessing, or neith"):
            Retriever(encoder, preprocessing, retriever.index, splits.gallery.ids)


def test_pictures_embedded_first_are_searched_as_the_pictures_are(retriever, splits):
    images = splits.test.images[:20]
    embedding = retriever.embed(images)
    assert isinstance(embedding, Embedding)
    found, expected = retriever.search(embedding), retriever.search(images)
    np.testing.assert_array_equal(found.positions, expected.positions)
    np.testing.assert_array_equal(found.distances, expected.distances)
    np.testing.assert_array_equal(found.uncertainty, expected.uncertainty)
    answers = retriever.retrieve(embedding, 0.3, 0.1)
    assert [answer.to_dict() for answer in answers] == [
        answer.to_dict() for answer in retriever.retrieve(list(images), 0.3, 0.1)
    ]


def test_vectors_are_no_pictures_where_there_is_an_encoder(retriever):
    with pytest.raises(InvalidImage):
        retriever.retrieve(np.zeros((8, 16), np.float32), 0.3, 0.1)


def test_an_encoder_of_longer_vectors_has_the_same_uncertainties(splits):
    encoder = build_encoder(EncoderConfig("deterministic", dim=6), 1, (8, 16))
    usual = Retriever.build(encoder, Preprocessing(), splits.gallery, DEPTH)
    before = usual.search(splits.test.images)

    def longer(encoder, preprocessing, images):
        embedding = usual.embed(images)
        return replace(embedding, vectors=3 * embedding.vectors)

    own = Retriever.build(encoder, Preprocessing(), splits.gallery, DEPTH, longer)
    after = own.search(splits.test.images, longer)
    np.testing.assert_allclose(after.distances, 3 * before.distances, rtol=1e-4)
    np.testing.assert_allclose(after.uncertainty, before.uncertainty, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"labels": [1, 2]},
        {"ids": ["a"] * 20},
        {"uncertainty": np.full(20, np.nan)},
        {"depth": 0},
    ],
)
def test_an_index_is_built_when_all_else_is_right(wrong, monkeypatch):
    """It may be a table on a server, which would be left there."""
    built = []
    whole = find_index("flat").build.__func__
    monkeypatch.setattr(
        find_index("flat"),
        "build",
        classmethod(lambda kind, *given: built.append(1) or whole(kind, *given)),
    )
    vectors, labels = drawn(20, 0)
    with pytest.raises((InvalidData, InvalidConfig)):
        Retriever.from_embeddings(vectors, **({"labels": labels} | wrong))
    assert not built
    Retriever.from_embeddings(vectors, labels=labels)
    assert built


def test_an_index_that_holds_others_than_the_gallery_is_refused(monkeypatch):
    flat = find_index("flat")
    whole = flat.build.__func__
    less = classmethod(lambda kind, vectors, options: whole(kind, vectors[1:], options))
    monkeypatch.setattr(flat, "build", less)
    vectors, labels = drawn(20, 0)
    with pytest.raises(InvalidData, match="the index holds 19 images, and of 20 there are ids"):
        Retriever.from_embeddings(vectors, labels=labels)
