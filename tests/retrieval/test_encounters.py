"""Several pictures of one encounter are one query."""

import numpy as np
import pytest

import rcir
from rcir.data import Preprocessing
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import InvalidConfig, InvalidData
from rcir.serving.store import _decode, _encode

LABELS, DIM = 12, 6
CENTRES = np.random.default_rng(5).normal(size=(LABELS, DIM))


def draw(n, seed):
    """Vectors, labels and encounters of n encounters with one to three pictures each, mixed."""
    rng = np.random.default_rng(seed)
    labels, encounter = rng.integers(LABELS, size=n), np.repeat(np.arange(n), rng.integers(1, 4, n))
    encounter = rng.permutation(encounter)
    vectors = CENTRES[labels[encounter]] + 0.8 * rng.normal(size=(len(encounter), DIM))
    return (
        vectors.astype(np.float32),
        labels[encounter],
        np.char.add("visit ", encounter.astype(str)),
    )


GALLERY, GALLERY_LABELS = draw(90, 0)[:2]


def build(**options):
    return rcir.Retriever.from_embeddings(GALLERY, labels=GALLERY_LABELS, clusters=None, **options)


@pytest.fixture(scope="module")
def retriever():
    vectors, labels, encounters = draw(200, 1)
    retriever = build()
    retriever.calibrate(vectors, labels, encounters=encounters)
    return retriever


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_vectors_and_uncertainties_are_averaged(metric):
    vectors, labels, encounters = draw(20, 2)
    stated = np.random.default_rng(0).gamma(2.0, size=len(vectors))
    queries = build(metric=metric).labelled(vectors, labels, stated, encounters=encounters)
    names = list(dict.fromkeys(encounters.tolist()))
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for row, name in enumerate(names):
        pictures = encounters == name
        mean = vectors[pictures].mean(axis=0)
        expected = mean / np.linalg.norm(mean) if metric == "cosine" else mean
        np.testing.assert_allclose(queries.vectors[row], expected, atol=1e-6)
        assert queries.uncertainty[row] == pytest.approx(stated[pictures].mean())
        assert queries.pictures[row] == pictures.sum()
        assert (queries.population.labels[row] == labels[pictures]).all()


def test_answers_are_in_the_order_of_the_first_pictures(retriever):
    vectors, _, encounters = draw(30, 3)
    answers = retriever.retrieve(vectors, 0.2, 0.1, together=encounters.tolist())
    names = list(dict.fromkeys(encounters.tolist()))
    assert len(answers) == len(names) == 30
    for name, answer in zip(names, answers, strict=True):
        alone = retriever.retrieve(vectors[encounters == name], 0.2, 0.1, together=True)
        assert alone.ids == answer.ids
        assert "encounter" in str(alone.guarantee)


def test_the_number_of_encounters_calibrates(retriever):
    assert len(retriever.require_calibration().calibration_queries) == 200
    assert retriever.guarantee(0.2, 0.1).n_calibration == 200


def test_single_pictures_need_a_calibration_of_single_pictures(retriever):
    vectors, labels, encounters = draw(100, 4)
    with pytest.raises(InvalidData, match="encounters"):
        retriever.retrieve(vectors[0], 0.2, 0.1)
    with pytest.raises(InvalidData, match="encounters"):
        retriever.extend_calibration(vectors, labels)
    single = build()
    single.calibrate(vectors, labels, clusters=encounters)
    with pytest.raises(InvalidData, match="encounters"):
        single.retrieve(vectors[:3], 0.2, 0.1, together=True)
    assert retriever.retrieve(vectors[:1], 0.2, 0.1, together=True).size > 0


def test_pictures_of_an_encounter_that_differ_are_refused():
    vectors, labels, encounters = draw(40, 5)
    name = next(each for each in encounters if np.count_nonzero(encounters == each) > 1)
    row = np.flatnonzero(encounters == name)[-1]
    wrong = labels.copy()
    wrong[row] = (wrong[row] + 1) % LABELS
    with pytest.raises(InvalidData, match="labels"):
        build().calibrate(vectors, wrong, encounters=encounters)
    groups = np.where(np.arange(len(labels)) == row, "a", "b")
    with pytest.raises(InvalidData, match="groups"):
        build().calibrate(vectors, labels, groups=groups, encounters=encounters)
    keyed = build(keys=np.resize(["a", "b"], len(GALLERY)))
    with pytest.raises(InvalidData, match="keys"):
        keyed.calibrate(vectors, labels, keys=groups, encounters=encounters)
    with pytest.raises(InvalidData, match="2 encounters"):
        build().calibrate(vectors, labels, encounters=["a", "b"])
    with pytest.raises(InvalidData, match="leave_one_out"):
        build(leave_one_out=True).calibrate(vectors, labels, encounters=encounters)


def test_pictures_that_find_themselves_or_come_twice_are_refused():
    vectors, labels, encounters = draw(100, 10)
    single = build()
    vectors[:20], labels[:20] = GALLERY[:20], GALLERY_LABELS[:20]
    labels = np.array([labels[np.flatnonzero(encounters == name)[0]] for name in encounters])
    with pytest.raises(InvalidData, match="20 are pictures of the gallery"):
        single.calibrate(vectors, labels, encounters=encounters)
    vectors, labels, encounters = draw(100, 11)
    twice = np.concatenate([vectors, vectors[:3]]), np.append(labels, labels[:3])
    with pytest.raises(InvalidData, match="twice"):
        single.calibrate(*twice, encounters=np.append(encounters, ["x", "y", "z"]))


def test_the_metric_decides_the_length_of_a_mean():
    """Not the other pictures of the call: here two are of unit length, in another call too."""
    one_hot = np.eye(DIM, dtype=np.float32)
    retriever = build(metric="euclidean")
    alone = retriever.searcher.together(retriever.searcher.prepare(one_hot[:2]), np.full(2, "a"))
    np.testing.assert_allclose(alone.vectors[0], one_hot[:2].mean(axis=0))


def test_encounters_are_stored_and_recalibrated(retriever, tmp_path):
    vectors, labels, encounters = draw(30, 6)
    loaded = rcir.load(retriever.save(tmp_path / "retriever"))
    new, new_labels, _ = draw(1, 9)
    loaded.add(new[:1], ["new"], new_labels[:1])
    loaded.recalibrate()
    assert loaded.guarantee(0.2, 0.1).encounters
    loaded.extend_calibration(vectors, labels, encounters=encounters)
    assert loaded.guarantee(0.2, 0.1, anytime=True).n_calibration == 230


def test_queries_of_answers_are_stored_with_keys_and_pictures():
    vectors, labels, encounters = draw(5, 7)
    retriever = build(keys=np.resize(["a", "Süd"], len(GALLERY)))
    keys = np.where(encounters == encounters[0], "Süd", "a")
    queries = retriever.labelled(vectors, labels, keys=keys, encounters=encounters)
    for row, stored in enumerate(map(_decode, _encode(queries))):
        assert stored.keys[0] == queries.keys[row]
        assert stored.pictures[0] == queries.pictures[row]


def test_embeddings_are_fused_by_their_variances():
    images = np.random.default_rng(0).integers(0, 255, (60, 8, 16), dtype=np.uint8)
    labels = np.arange(60) % 3
    encoder = build_encoder(EncoderConfig("btl"), channels=1, size=(8, 16))
    gallery = rcir.data.ImageSet(images[:30], labels[:30], [str(n) for n in range(30)])
    retriever = rcir.Retriever.build(encoder, Preprocessing(), gallery)
    queries = retriever.searcher.prepare(list(images[30:33]))
    fused = retriever.searcher.together(queries, np.array(["a", "a", "b"]))
    means, variance = queries.embedding.vectors.numpy(), queries.embedding.variance.numpy()
    weights = 1 / variance[:2]
    expected = (weights * means[:2]).sum(axis=0) / np.broadcast_to(weights, means[:2].shape).sum(0)
    expected /= np.linalg.norm(expected)
    np.testing.assert_allclose(fused.vectors[0], expected, atol=1e-5)
    np.testing.assert_allclose(fused.vectors[1], queries.vectors[2], atol=1e-6)


def test_probabilities_of_pictures_cannot_be_combined():
    vectors, labels, encounters = draw(20, 8)
    table = np.full((len(vectors), LABELS), 1 / LABELS)
    with pytest.raises((InvalidData, InvalidConfig), match="encounter"):
        build().calibrate(vectors, labels, probabilities=table, encounters=encounters)
