"""A retriever of vectors with the encoder that made them, and calibration on sets of images."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

import rcir
from rcir.data import ImageSet, Preprocessing
from rcir.encoders import EncoderConfig
from rcir.encoders.batches import embed
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.retrieval.fingerprints import model_digest
from tests.encoders.small import build

PREPROCESSING = Preprocessing()
NAMES = np.array([f"kind {number}" for number in range(5)])


def draw(n, seed):
    """Images (n, 8, 16) of five noisy patterns, and the number of each pattern."""
    patterns = np.random.default_rng(0).integers(0, 200, (5, 8, 16))
    rng = np.random.default_rng(seed)
    labels = rng.integers(5, size=n)
    return (patterns[labels] + rng.integers(0, 56, (n, 8, 16))).astype(np.uint8), labels


GALLERY, GALLERY_LABELS = draw(100, 1)
QUERIES, QUERY_LABELS = draw(300, 2)


@pytest.fixture(scope="module")
def encoder():
    return build(EncoderConfig("deterministic")).eval()


def vectors(encoder, images):
    return embed(encoder, PREPROCESSING, images).vectors.numpy()


@pytest.fixture
def retriever(encoder):
    made = rcir.Retriever.from_embeddings(
        vectors(encoder, GALLERY),
        labels=NAMES[GALLERY_LABELS],
        model=f"small@{model_digest(encoder, PREPROCESSING)}",
    )
    made.calibrate(vectors(encoder, QUERIES), NAMES[QUERY_LABELS])
    return made


def test_images_get_the_answers_of_their_vectors_and_the_calibration_holds(
    retriever, encoder, tmp_path
):
    images = draw(20, 3)[0]
    expected = retriever.retrieve(vectors(encoder, images), 0.2, 0.1)
    with pytest.raises(InvalidConfig, match="no encoder"):
        retriever.retrieve([tmp_path / "photo.jpg"], 0.2, 0.1)
    retriever.attach_encoder(encoder, PREPROCESSING)
    retriever.save(tmp_path / "retriever")
    for each in (retriever, rcir.load(tmp_path / "retriever")):
        assert not each.changes()
        for queries in (list(images), vectors(encoder, images), each.embed(images)):
            answers = each.retrieve(queries, 0.2, 0.1)
            assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
        assert each.retrieve(images[0], 0.2, 0.1).ids == expected[0].ids
    added = draw(2, 4)[0]
    retriever.add(list(added), ["new 1", "new 2"], NAMES[:2].tolist())
    assert retriever.search(list(added)).positions[:, 0].tolist() == [100, 101]


def test_pictures_of_the_gallery_and_of_earlier_queries_are_recognised(retriever, encoder):
    retriever.attach_encoder(encoder, PREPROCESSING)
    with pytest.raises(InvalidData, match="gallery"):
        retriever.calibrate(list(GALLERY), NAMES[GALLERY_LABELS])
    asked = retriever.calibration.query_digests
    queries = retriever.labelled(list(QUERIES), NAMES[QUERY_LABELS])
    assert np.isin(queries.digests, asked).all()
    one_by_one = [retriever.searcher.prepare([image]).digests[0] for image in GALLERY]
    assert np.isin(one_by_one, retriever.searcher.gallery.digests).all()


def test_a_changed_weight_makes_the_calibration_stale(retriever, encoder):
    changed = deepcopy(encoder)
    retriever.attach_encoder(changed, PREPROCESSING)
    retriever.retrieve(QUERIES[0], 0.2, 0.1)
    with torch.no_grad():
        next(changed.parameters()).mul_(2)
    with pytest.raises(StaleCalibration, match="options"):
        retriever.retrieve(QUERIES[0], 0.2, 0.1)


def test_other_encoders_are_refused(retriever, encoder):
    with pytest.raises(InvalidData, match="digest"):
        retriever.attach_encoder(build(EncoderConfig("deterministic"), seed=1), PREPROCESSING)
    with pytest.raises(InvalidData, match="digest"):
        retriever.attach_encoder(encoder, replace(PREPROCESSING, interpolation="bicubic"))
    with pytest.raises(InvalidConfig, match="vectors"):
        retriever.attach_encoder(build(EncoderConfig("hib")), PREPROCESSING)
    scaled = build(EncoderConfig("deterministic", options={"unit": False})).eval()
    scaled.load_state_dict(encoder.state_dict())
    with pytest.raises(InvalidData, match="digest"):
        retriever.attach_encoder(scaled, PREPROCESSING)
    unnamed = rcir.Retriever.from_embeddings(vectors(encoder, GALLERY))
    with pytest.raises(InvalidConfig, match="model"):
        unnamed.attach_encoder(encoder, PREPROCESSING)
    assert retriever.encoder is None


def test_sets_of_images_calibrate_with_their_labels_by_name(retriever, encoder):
    expected = retriever.calibration.miss_rule.evidence.match_score
    retriever.attach_encoder(encoder, PREPROCESSING)
    numbers = 4 - QUERY_LABELS  # other numbers for the same names
    ids = [str(row) for row in range(len(QUERIES))]
    images = ImageSet(QUERIES, numbers, ids, {"class": NAMES[QUERY_LABELS]})
    built = rcir.Retriever.build(
        encoder,
        PREPROCESSING,
        ImageSet(GALLERY, GALLERY_LABELS, ids[:100], {"class": NAMES[GALLERY_LABELS]}),
    )
    for each in (retriever, built):
        assert each.calibrate(images, recurring=True).n_calibration == len(expected)
        scores = each.calibration.miss_rule.evidence.match_score
        np.testing.assert_allclose(np.sort(scores), np.sort(expected), rtol=1e-4)
    with pytest.raises(InvalidData, match="names"):
        retriever.calibrate(replace(images, attributes={}))
    groups = np.array([f"person {row % 60}" for row in range(300)])
    clustered = replace(images, attributes={**images.attributes, "by": groups}, cluster="by")
    built.calibrate(clustered, recurring=True)
    evidence = built.calibration.miss_rule.evidence.population
    assert (evidence.cluster_word, evidence.n_units) == ("by", 42)  # three tenths tune
