"""Vectors of any model: indexed, calibrated, asked, and refused in words."""

import warnings

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

import rcir
from rcir.data.within_radius import WithinRadius
from rcir.embedding import Embedding
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable, StaleCalibration
from rcir.risk import LabelledResults

DIM, CLASSES = 6, 10
CENTRES = np.random.default_rng(0).standard_normal((CLASSES, DIM))
NAMES = np.array([f"kind {number}" for number in range(CLASSES)])


def drawn(n, seed, spread=0.5):
    """Vectors of any length around the centres, with the number of each one's."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=n)
    vectors = CENTRES[labels] + spread * rng.standard_normal((n, DIM))
    return (vectors * rng.uniform(0.5, 2, (n, 1))).astype(np.float32), labels


def named(n, prefix="item"):
    return [f"{prefix} {row}" for row in range(n)]


GALLERY, LABELS = drawn(300, 1)
ASKED, ASKED_LABELS = drawn(500, 2)


@pytest.fixture
def built():
    return rcir.Retriever.from_embeddings(GALLERY, named(300), NAMES[LABELS])


@pytest.fixture
def calibrated(built):
    built.calibrate(ASKED, NAMES[ASKED_LABELS])
    return built


def test_candidates_under_cosine_are_those_of_scipy(built):
    found = built.search(ASKED)
    apart = cdist(ASKED, GALLERY, "cosine")
    np.testing.assert_array_equal(found.positions[:, 0], apart.argmin(1))
    np.testing.assert_allclose(found.distances[:, 0], np.sqrt(2 * apart.min(1)), atol=1e-4)


def test_candidates_under_euclidean_are_those_of_scipy():
    own = rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, metric="euclidean")
    apart = cdist(ASKED, GALLERY)
    found = own.search(ASKED)
    np.testing.assert_array_equal(found.positions[:, 0], apart.argmin(1))
    np.testing.assert_allclose(found.distances[:, 0], apart.min(1), rtol=1e-4)
    assert own.ids[:2].tolist() == ["0", "1"]


def test_the_length_of_a_query_does_not_matter_under_cosine(calibrated):
    for query in ASKED[:5]:
        first, second = (calibrated.retrieve(scale * query, 0.2, 0.1) for scale in (1, 40))
        assert first.ids == second.ids


def test_embeddings_of_any_length_are_asked_as_vectors_are(calibrated):
    embedded = Embedding(torch.from_numpy(7 * ASKED[:5]))
    expected = calibrated.retrieve(ASKED[:5], 0.2, 0.1)
    for answer, other in zip(calibrated.retrieve(embedded, 0.2, 0.1), expected, strict=True):
        assert answer.ids == other.ids
        np.testing.assert_allclose(answer.distances, other.distances, atol=1e-5)


def test_a_calibration_is_that_of_the_same_queries_as_an_image_set(built):
    """Searched by hand: the relevance of names is that of numbers."""
    report = built.calibrate(ASKED, NAMES[ASKED_LABELS], "constant")
    assert (report.n_tuning, report.n_calibration) == (150, 350)
    by_number = rcir.Retriever.from_embeddings(GALLERY, named(300), LABELS)
    rows = np.random.default_rng(0).permutation(500)  # as divided with seed 0
    parts = []
    for part in np.split(rows, [150]):
        found = by_number.search(ASKED[part])
        relevant = LABELS[found.positions] == ASKED_LABELS[part][:, None]
        totals = (ASKED_LABELS[part][:, None] == LABELS).sum(1)
        parts.append(LabelledResults.of(found, relevant, totals))
    expected = by_number.calibrate(*parts, "constant")
    assert [row.mean_size for row in report.rows] == [row.mean_size for row in expected.rows]


def test_a_report_shows_a_sentence_and_a_table(built):
    text = str(built.calibrate(ASKED, NAMES[ASKED_LABELS], alphas=(0.001, 0.2)))
    assert text.startswith("With probability at least 0.9, a true match is missing from at most")
    assert "350 calibration queries; 150 others" in text
    assert "0.001          -" in text
    assert "not certified; from 0.0" in text


def test_sizes_are_certified_on_queries_that_did_not_calibrate(calibrated):
    further, labels = drawn(2000, 9)
    answers = calibrated.retrieve(further, 0.2, 0.1)
    missed = [
        name not in answer.labels for name, answer in zip(NAMES[labels], answers, strict=True)
    ]
    assert np.mean(missed) < 0.25
    assert np.mean([answer.size for answer in answers]) < 3


def test_another_seed_divides_otherwise(built):
    first = built.calibrate(ASKED, NAMES[ASKED_LABELS], "constant")
    kept = built.tuning_queries.vectors
    second = built.calibrate(ASKED, NAMES[ASKED_LABELS], "constant", seed=1)
    assert first.n_tuning == second.n_tuning
    assert not np.array_equal(kept, built.tuning_queries.vectors)


def test_uncertainties_of_their_own_are_asked_for_throughout(built, tmp_path):
    stated = np.linalg.norm(ASKED, axis=1)
    built.calibrate(ASKED, NAMES[ASKED_LABELS], "minmax", uncertainty=stated)
    np.testing.assert_array_equal(
        np.sort(built.controller.calibration.uncertainty),
        np.sort(stated[np.random.default_rng(0).permutation(500)[150:]].astype(np.float64)),
    )
    for own in (built, rcir.load(built.save(tmp_path / "own"))):
        assert own.retrieve(ASKED[0], 0.3, 0.1, uncertainty=0.5).uncertainty == 0.5
        answers = own.retrieve(ASKED[:2], 0.3, 0.1, uncertainty=[0.5, 0.7])
        assert [answer.uncertainty for answer in answers] == [0.5, 0.7]
        with pytest.raises(InvalidData, match=r"calibrated with uncertainties .* ask with them"):
            own.retrieve(ASKED[0], 0.3, 0.1)


def test_an_uncertainty_that_was_not_calibrated_with_is_refused(calibrated):
    with pytest.raises(InvalidData, match="calibrated without uncertainties"):
        calibrated.retrieve(ASKED[0], 0.3, 0.1, uncertainty=0.5)
    with pytest.raises(InvalidData, match=r"2 queries, uncertainty of 1: give each one"):
        calibrated.retrieve(ASKED[:2], 0.3, 0.1, uncertainty=0.5)


def test_queries_with_and_without_uncertainties_are_not_mixed(built):
    stated = np.linspace(0, 1, 200)
    with_own = built.search_labelled(built.labelled(ASKED[:200], NAMES[ASKED_LABELS[:200]], stated))
    without = built.search_labelled(built.labelled(ASKED[200:], NAMES[ASKED_LABELS[200:]]))
    for parts in ((with_own, without), (without, with_own)):
        with pytest.raises(InvalidData, match="uncertainties of the queries' own"):
            built.calibrate(*parts)
    assert not built.controllers
    built.calibrate(ASKED[200:], NAMES[ASKED_LABELS[200:]])
    for call in (built.extend_calibration, built.check):
        with pytest.raises(InvalidData, match="calibrated without uncertainties"):
            call(with_own)


def test_items_match_that_share_a_label():
    lists = [[NAMES[label], "all" if row % 7 == 0 else "odd"] for row, label in enumerate(LABELS)]
    own = rcir.Retriever.from_embeddings(GALLERY, labels=lists)
    asked = [[NAMES[label], "unheard of"] for label in ASKED_LABELS]
    labelled = own.search_labelled(own.labelled(ASKED, asked))
    expected = LABELS[labelled.positions] == ASKED_LABELS[:, None]
    np.testing.assert_array_equal(labelled.relevant, expected)
    own.calibrate(ASKED, asked)
    assert own.retrieve(ASKED[0], 0.3, 0.1).labels is None


def test_places_match_within_a_radius(tmp_path):
    rng = np.random.default_rng(3)
    places, asked = rng.uniform(0, 30, (300, 2)), rng.uniform(0, 30, (500, 2))
    # What is seen of a place, in five more dimensions.
    vectors, queries = (
        np.concatenate([each, rng.standard_normal((len(each), 5))], axis=1)
        for each in (places, asked)
    )
    own = rcir.Retriever.from_embeddings(
        vectors, labels=WithinRadius(places, 5.0), metric="euclidean"
    )
    own.calibrate(queries, WithinRadius(asked, 5.0))
    labelled = own.search_labelled(own.labelled(queries, WithinRadius(asked, 5.0)))
    expected = np.take_along_axis(cdist(asked, places), labelled.positions, axis=1) <= 5
    np.testing.assert_array_equal(labelled.relevant, expected)
    loaded = rcir.load(own.save(tmp_path / "places"))
    assert loaded.recalibrate() == own.recalibrate()


def table(n):
    """Ids of the true matches of each query: by label, told as a table."""
    return [
        [f"item {row}" for row in np.flatnonzero(label == LABELS)] for label in ASKED_LABELS[:n]
    ]


def test_a_table_of_matches_is_the_truth(tmp_path):
    by_label = rcir.Retriever.from_embeddings(GALLERY, named(300), NAMES[LABELS])
    own = rcir.Retriever.from_embeddings(GALLERY, named(300))
    found, expected = (
        one.search_labelled(one.labelled(ASKED, labels))
        for one, labels in ((own, table(500)), (by_label, NAMES[ASKED_LABELS]))
    )
    np.testing.assert_array_equal(found.relevant, expected.relevant)
    np.testing.assert_array_equal(found.totals, expected.totals)
    own.calibrate(ASKED, table(500))
    loaded = rcir.load(own.save(tmp_path / "table"))
    assert loaded.recalibrate() == own.recalibrate()
    answer = loaded.retrieve(ASKED[0], 0.3, 0.1)
    assert answer.labels is None


def test_a_table_of_matches_does_not_know_new_items():
    own = rcir.Retriever.from_embeddings(GALLERY, named(300))
    own.calibrate(ASKED, table(500))
    own.remove(named(20))
    own.recalibrate()
    further, _ = drawn(10, 5)
    own.add(further, named(10, "new"))
    with pytest.raises(InvalidData, match="10 items came into the gallery after the table of true"):
        own.recalibrate()
    with pytest.raises(StaleCalibration, match="gallery, index"):
        own.retrieve(ASKED[0], 0.3, 0.1)
    with pytest.raises(InvalidData, match=r"1 true matches are no gallery items \(item 999\)"):
        own.calibrate(ASKED[:1], [["item 999"]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vectors": np.where(np.arange(300)[:, None] == 7, np.nan, GALLERY)}, "NaN or infinite"),
        ({"vectors": np.where(np.arange(300)[:, None] == 7, 0, GALLERY)}, "first in row 7"),
        ({"vectors": GALLERY[0]}, r"shape \(6,\); needed is \(n, d\)"),
        ({"vectors": GALLERY[:0], "ids": [], "labels": []}, "the gallery is empty"),
        ({"vectors": np.array([["a", "b"]] * 300)}, "must be real numbers"),
        ({"vectors": [[1.0, 2.0], [3.0]]}, r"vectors are no array \(n, d\) of numbers"),
        ({"uncertainty": ["high"] * 300}, "uncertainty holds what is no number"),
        ({"vectors": GALLERY[[7] * 300], "leave_one_out": True}, "of 300 gallery items nothing is"),
        ({"ids": named(299)}, "300 images, 299 ids: give one id per image"),
        ({"ids": ["twice"] * 2 + named(298)}, r"ids stand more than once \(twice\)"),
        ({"ids": list(range(300))}, "300 ids are no texts"),
        ({"labels": LABELS[:7]}, "300 gallery images: .*7 relevance"),
        ({"labels": LABELS / 2}, "give whole numbers, texts, or lists of texts"),
        ({"labels": [*NAMES[LABELS[:299]], 5]}, "give whole numbers, texts, or lists of texts"),
        ({"labels": "kind"}, "labels is a str"),
        ({"uncertainty": np.ones(5)}, "5 uncertainty"),
        ({"uncertainty": np.full(300, np.inf)}, "some are NaN or infinite"),
    ],
)
def test_galleries_that_cannot_be_are_refused(change, said):
    given = {"vectors": GALLERY, "ids": named(300), "labels": LABELS} | change
    with pytest.raises(InvalidData, match=said):
        rcir.Retriever.from_embeddings(**given)


def test_an_unknown_metric_is_refused():
    with pytest.raises(InvalidConfig, match="metric 'dot' is unknown; choose one of cosine, eucl"):
        rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, metric="dot")


@pytest.mark.parametrize(
    ("vectors", "labels", "known", "said"),
    [
        (ASKED[:, :5], NAMES[ASKED_LABELS], {}, r", 5\); needed is \(n, 6\)"),
        (np.full_like(ASKED, np.nan), NAMES[ASKED_LABELS], {}, "NaN or infinite"),
        (np.zeros_like(ASKED), NAMES[ASKED_LABELS], {}, "500 of 500 vectors are zero"),
        (ASKED, NAMES[ASKED_LABELS][:9], {}, "500 queries, relevance of 9"),
        (ASKED, None, {}, "the queries have no labels"),
        (ASKED, ASKED_LABELS / 3, {}, "give whole numbers, texts, or lists"),
        (ASKED, [["kind 1"]] * 500, {}, "labels of the queries are of type lists"),
        (ASKED, WithinRadius(np.zeros((500, 2)), 1.0), {}, "the queries as WithinRadius"),
        (ASKED, NAMES[ASKED_LABELS], {"uncertainty": ["high"] * 500}, "holds what is no number"),
        (ASKED, NAMES[ASKED_LABELS], {"uncertainty": [1.0]}, "uncertainty of 1"),
        (ASKED, NAMES[ASKED_LABELS], {"uncertainty": np.full(500, np.nan)}, "500 of 500 uncert"),
        (ASKED, NAMES[ASKED_LABELS], {"groups": ["a"]}, "groups of 1"),
        (
            np.concatenate([GALLERY[:9], ASKED]),
            [*NAMES[LABELS[:9]], *NAMES[ASKED_LABELS]],
            {},
            "gal",
        ),
        (ASKED[:1], NAMES[:1], {}, "1 queries: some must tune and others calibrate"),
        (
            np.concatenate([ASKED, ASKED[:300]]),
            NAMES[[*ASKED_LABELS, *ASKED_LABELS[:300]]],
            {},
            "in",
        ),
    ],
)
def test_queries_that_cannot_calibrate_are_refused(built, vectors, labels, known, said):
    with pytest.raises(InvalidData, match=said):
        built.calibrate(vectors, labels, **known)
    assert not built.controllers


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"seed": -1}, "seed is -1; it must be a whole number, at least 0"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"alphas": 0.1}, "alphas is 0.1; give a list"),
        ({"alphas": ()}, "give a list of at least one"),
    ],
)
def test_options_that_cannot_be_are_refused(built, known, said):
    with pytest.raises(InvalidConfig, match=said):
        built.calibrate(ASKED, NAMES[ASKED_LABELS], **known)
    assert not built.controllers


def test_an_index_by_its_name_alone_is_refused():
    with pytest.raises(InvalidConfig, match="index is 'hnsw'; give an IndexConfig"):
        rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, index="hnsw")


def test_places_of_another_radius_or_of_more_coordinates_are_refused():
    own = rcir.Retriever.from_embeddings(GALLERY, labels=WithinRadius(GALLERY[:, :2], 1.0))
    for places, said in (
        (WithinRadius(ASKED[:, :2], 50.0), "a radius of 50.0 and places of 2 coordinates, the gal"),
        (WithinRadius(ASKED[:, :3], 1.0), "places of 3 coordinates, the gallery 1.0 and 2"),
    ):
        with pytest.raises(InvalidData, match=said):
            own.calibrate(ASKED, places)


def test_labels_of_another_type_than_the_gallery_s_are_refused():
    own = rcir.Retriever.from_embeddings(GALLERY, labels=LABELS)
    with pytest.raises(InvalidData, match=r"of type <U6, and the gallery's images match as Same"):
        own.calibrate(ASKED, NAMES[ASKED_LABELS])


def test_items_to_add_with_labels_of_another_type_are_refused(built):
    before = built.fingerprints()
    with pytest.raises(InvalidData, match="of type int64"):
        built.add(ASKED[:2], named(2, "new"), [1, 2])
    assert built.fingerprints() == before


def test_five_queries_certify_nothing(built):
    report = built.calibrate(ASKED[:7], NAMES[ASKED_LABELS[:7]])
    assert [row.mean_size for row in report.rows] == [None] * 3
    with pytest.raises(RiskUnattainable) as caught:
        built.retrieve(ASKED[9], 0.1, 0.1)
    assert caught.value.required_calibration == 22


def test_vectors_of_another_model_are_refused(tmp_path):
    own = rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, model="clip-1")
    with pytest.raises(InvalidData, match="of clip-2, those of the gallery of clip-1"):
        own.calibrate(ASKED, ASKED_LABELS, model="clip-2")
    own.calibrate(ASKED, ASKED_LABELS, model="clip-1")
    own = rcir.load(own.save(tmp_path / "own"))
    with pytest.raises(InvalidData, match="of clip-2, those of the gallery of clip-1"):
        own.retrieve(ASKED[0], 0.2, 0.1, model="clip-2")
    with pytest.raises(InvalidData, match="of clip-2, those of the gallery of clip-1"):
        own.add(ASKED[:1], ["new"], [1], model="clip-2")
    assert own.retrieve(ASKED[0], 0.2, 0.1, model="clip-1").size >= 1


def test_another_metric_makes_a_calibration_stale(calibrated):
    from rcir.retrieval.vector_options import VectorOptions

    calibrated.options = VectorOptions("euclidean")
    with pytest.raises(StaleCalibration, match="options"):
        calibrated.retrieve(ASKED[0], 0.3, 0.1)


def test_clusters_are_divided_and_counted_as_a_whole(built):
    clusters = np.repeat(np.arange(100), 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = built.calibrate(ASKED, NAMES[ASKED_LABELS], clusters=clusters, cluster="video")
    assert "350 calibration queries by video, 70 of them, each counted alike" in str(report)
    tuned, calibrated = (
        set(one.clusters.tolist()) for one in (built.tuning_queries, built.calibration_queries)
    )
    assert not tuned & calibrated
    assert built.controller.calibration.units == len(calibrated) == 70
    assert "any further video" in str(built.retrieve(ASKED[0] + 0.01, 0.5, 0.1).guarantee)


def frames(seed):
    """A hundred videos of five frames."""
    vectors, labels = drawn(100, seed)
    noise = 0.1 * np.random.default_rng(seed).standard_normal((500, DIM))
    return np.repeat(vectors, 5, axis=0) + noise, np.repeat(labels, 5)


def test_frames_of_videos_are_warned_of_unless_their_clusters_are_named(built):
    vectors, labels = frames(11)
    with pytest.warns(UserWarning, match="frames of one video.*say of each which cluster"):
        built.calibrate(vectors, NAMES[labels])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built.calibrate(vectors, NAMES[labels], clusters=np.repeat(np.arange(100), 5))
        built.calibrate(ASKED, NAMES[ASKED_LABELS])
