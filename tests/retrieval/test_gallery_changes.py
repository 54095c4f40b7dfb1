"""Galleries that grow and shrink, and the calibration that follows them."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

import rcir
from rcir.data.relevance import SameLabel, SharedLabel, WithinRadius
from rcir.errors import InvalidConfig, InvalidData, InvalidImage, StaleCalibration
from rcir.index import IndexConfig
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults
from tests.index.brute import BruteIndex
from tests.retrieval.retrievers import build, calibrate, guarantee, plain, retrieve, search
from tests.retrieval.whole_numbers import CALIBRATION, FURTHER, GALLERY, STEP, TEST, TUNING, Part


@pytest.fixture
def own():
    """A calibrated retriever of whole numbers that the test may change."""
    return calibrate(build())


def new_items(n=80):
    """Items beyond the end of the gallery's line, with labels from all over it."""
    vectors = np.zeros((n, 4), np.float32)
    vectors[:, 0] = STEP * np.arange(301, 301 + n)
    return Part(vectors, GALLERY.labels[:: 300 // n][:n], np.arange(1, n + 1))


def names(n):
    return [f"new {row}" for row in range(n)]


def grow(retriever, n=80):
    """Add items and remove the first 40."""
    items = new_items(n)
    retriever.add(items.vectors, names(n), items.labels, items.uncertainty)
    retriever.remove([str(row) for row in range(40)])
    return retriever


def state(retriever):
    return retriever.searcher.fingerprints() | {
        "ids": retriever.ids.tolist(),
        "labels": retriever.labels.tolist(),
        "n": len(retriever.index),
    }


@pytest.mark.parametrize("kind", ["numbers", "texts", "lists"])
@pytest.mark.parametrize("images", [np.empty((0, 2)), []], ids=["array", "list"])
def test_adding_nothing_changes_nothing(kind, images):
    labels = {"numbers": [1, 2], "texts": ["a", "b"], "lists": [["a"], ["a", "b"]]}[kind]
    own = rcir.Retriever.from_embeddings(np.eye(2), labels=labels)
    before = own.searcher
    own.add(images, [], np.array([], int))
    own.add(images, [])
    own.remove([])
    assert own.searcher.fingerprints() == before.fingerprints()
    with pytest.raises(InvalidData, match="labels"):
        own.add(images, [], labels)


# Items that cannot be added or removed


@pytest.mark.parametrize(
    ("ids", "word"),
    [
        (["new", "7"], "already"),
        (["7", "8"], "2 of 2"),
        (["a", "a"], "more than once"),
        ("ab", "str"),
        (None, "NoneType"),
        (["a"], "one id per image"),
        (["a", 3], "strings"),
        (["a", "caf\udce9"], "UTF-8"),
        (np.array([[1, 2], [3, 4]]), "strings"),
    ],
    ids=str,
)
def test_ids_that_cannot_be_added_are_refused(own, ids, word):
    before = state(own)
    with pytest.raises(InvalidData, match=word):
        own.add(new_items(2).vectors, ids, [1, 2], [1, 1])
    assert state(own) == before


@pytest.mark.parametrize(
    "labels",
    [
        *(None, [1], [], 5, "12", ["person 3", "person 4"], [1.0, 2.5], [True, False], [1, None]),
        *([[1], [2]], [[1], [2, 3]], [2**70, 1], np.array([2**63, 1], np.uint64)),
        SharedLabel.from_lists([[1], [2]], 3),
    ],
    ids=str,
)
def test_labels_of_another_kind_or_number_are_refused(own, labels):
    before = state(own)
    with pytest.raises(InvalidData, match=r"labels|joined"):
        own.add(new_items(2).vectors, ["a", "b"], labels, [1, 1])
    assert state(own) == before


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"images": np.zeros((2, 3))}, "expected"),
        ({"images": np.full((2, 4), np.nan)}, "NaN"),
        ({"images": "ab"}, "list"),
        ({"uncertainty": None}, "uncertainties"),
        ({"uncertainty": [1.0]}, "1 uncertainties"),
        ({"model": "clip-2"}, "clip-1"),
    ],
    ids=str,
)
def test_vectors_that_cannot_be_added_are_refused(change, word):
    own = build(model="clip-1")
    before = state(own)
    arguments = {"images": new_items(2).vectors, "labels": [1, 2], "uncertainty": [1, 1]}
    with pytest.raises(InvalidData, match=word):
        own.add(ids=["a", "b"], **(arguments | change))
    assert state(own) == before


def test_images_that_cannot_be_added_change_nothing(loaded, splits):
    image = splits.test.images[0]
    before, answer = state(loaded), loaded.retrieve(image, 0.3, 0.1).to_dict()
    loaded.add([], [], [])
    with pytest.raises(InvalidImage):
        loaded.add([np.zeros((3,), np.uint8)], ["a"], [1])
    assert state(loaded) == before
    assert loaded.retrieve(image, 0.3, 0.1).to_dict() == answer


@pytest.mark.parametrize("kind", ["shared labels", "places"])
def test_galleries_without_plain_labels_accept_their_own_kind_only(kind):
    def relevance(n):
        if kind == "places":
            return WithinRadius(np.arange(2.0 * n).reshape(n, 2), 5.0)
        return SharedLabel.from_lists([[row % 3] for row in range(n)], 3)

    own = build(relevance(300), uncertainty=None)
    item = new_items(1).vectors
    other = WithinRadius(np.zeros((1, 3)), 5.0)
    for labels in ([1], SameLabel(np.array([1])), other, "a"):
        with pytest.raises(InvalidData):
            own.add(item, ["a"], labels)
    own.add(item, ["a"], relevance(1))
    assert len(own.relevance) == len(own.index) == 301


@pytest.mark.parametrize(
    ("ids", "word"), [(["nobody"], "nobody"), ("nobody", "str"), (None, "NoneType"), ([3], "3")]
)
def test_items_that_are_not_there_cannot_be_removed(own, ids, word):
    before = state(own)
    with pytest.raises(InvalidData, match=word):
        own.remove(ids)
    assert state(own) == before


def test_the_last_item_cannot_be_removed(own):
    with pytest.raises(InvalidData, match="all gallery items"):
        own.remove(own.ids.tolist())
    own.remove(own.ids[1:].tolist())
    assert own.depth == len(own.index) == 1


class LockedIndex(BruteIndex):
    def __init__(self, vectors, options):
        super().__init__(vectors, options)
        self.lock = threading.Lock()


class CopiedIndex(LockedIndex):
    def __deepcopy__(self, memo):
        return type(self)(self.vectors, self.options)


def changes_with(index):
    retriever = build(index=IndexConfig(f"{__name__}:{index.__name__}"))
    return (
        lambda: retriever.add(new_items(1).vectors, ["new"], [1], [1]),
        lambda: retriever.remove(["0"]),
        lambda: len(retriever.index),
    )


def test_an_index_that_cannot_be_copied_is_refused_before_it_changes():
    add, remove, n_items = changes_with(LockedIndex)
    for change in (add, remove):
        with pytest.raises(InvalidConfig, match=r"LockedIndex .*lock.*__deepcopy__"):
            change()
    assert n_items() == 300
    add, remove, n_items = changes_with(CopiedIndex)
    add()
    assert n_items() == 301
    remove()
    assert n_items() == 300


# What follows from a change


def test_an_added_image_makes_the_calibration_stale_until_it_is_redone(loaded, splits, tmp_path):
    image = splits.test.images[0]
    loaded.add([image], ["new"], [7])
    for one in (loaded, Retriever.load(loaded.save(tmp_path / "added"))):
        with pytest.raises(StaleCalibration, match="recalibrate"):
            one.retrieve(image, 0.3, 0.1)
        found = one.search([image])
        assert one.ids[found.positions[0, 0]] == "new"
        assert found.distances[0, 0] == pytest.approx(0, abs=1e-3)
        assert one.labels.tolist() == [*splits.gallery.labels.tolist(), 7]
        one.recalibrate()
        answer = one.retrieve(image, 0.3, 0.1)
        assert (answer.ids[0], answer.labels[0]) == ("new", 7)


def test_removing_what_was_added_restores_the_calibration(own):
    before, answers = state(own), plain(retrieve(own, 0.3))
    items = new_items(2)
    own.add(items.vectors, ["a", "b"], items.labels, items.uncertainty)
    assert own.ids[-2:].tolist() == ["a", "b"]
    own.remove(["b", "a"])
    assert state(own) == before
    assert plain(retrieve(own, 0.3)) == answers


def test_a_removed_image_is_no_longer_found(loaded, splits, tmp_path):
    image, name = splits.gallery.images[7], splits.gallery.ids[7]
    assert loaded.ids[loaded.search([image]).positions[0, 0]] == name
    loaded.remove([name])
    rest = splits.gallery.subset(np.delete(np.arange(300), 7))
    expected = Retriever.build(loaded.encoder, loaded.preprocessing, rest, depth=150)
    assert state(loaded) | {"encoder": 0} == state(expected) | {"encoder": 0}
    assert (loaded.searcher.digests == expected.searcher.digests).all()
    assert state(Retriever.load(loaded.save(tmp_path / "fewer"))) == state(loaded)
    loaded.add([image], [name], [splits.gallery.labels[7]])
    assert loaded.ids[loaded.search([image]).positions[0, 0]] == name


def test_a_gallery_that_grows_is_searched_as_deep_as_requested():
    small = rcir.Retriever.from_embeddings(GALLERY.vectors[1:6], labels=[1] * 5, depth=20)
    assert small.depth == 5
    small.add(GALLERY.vectors[6:60], names(54), [2] * 54)
    assert small.search(TEST.vectors[:2]).positions.shape == (2, 20)


@pytest.mark.filterwarnings("ignore:.*labels of the gallery")
def test_uncertainties_of_images_follow_the_gallery(loaded, splits, tmp_path):
    extra = splits.test.images[:5]
    loaded.add(extra, list("abcde"), [1, 2, 3, 4, 5])
    images = np.concatenate([splits.gallery.images, extra])
    expected = loaded.embed(images).uncertainty.numpy()
    np.testing.assert_allclose(loaded.searcher.gallery.uncertainty, expected, rtol=1e-3)
    again = Retriever.load(loaded.save(tmp_path / "again"))
    np.testing.assert_array_equal(
        again.searcher.gallery.uncertainty, loaded.searcher.gallery.uncertainty
    )
    found = again.search(extra)
    expected = again.searcher.gallery.uncertainty[found.positions]
    np.testing.assert_array_equal(found.candidate_uncertainty, expected)


def test_lengths_of_vectors_follow_the_gallery(tmp_path):
    def vectors(n, seed):
        rng = np.random.default_rng(seed)
        return (rng.standard_normal((n, 6)) * rng.uniform(0.1, 10, (n, 1))).astype(np.float32)

    ids = [str(row) for row in range(200)]
    own = rcir.Retriever.from_embeddings(vectors(200, 1), ids, metric="euclidean")
    own.add(vectors(30, 2), names(30))
    own.remove(ids[:100])
    gallery, queries = np.concatenate([vectors(200, 1)[100:], vectors(30, 2)]), vectors(40, 3)
    expected = np.take_along_axis(
        cdist(queries, gallery, "cosine"), cdist(queries, gallery).argmin(1)[:, None], 1
    )
    for one in (own, Retriever.load(own.save(tmp_path / "own"))):
        np.testing.assert_allclose(one.search(queries).uncertainty, expected[:, 0], atol=1e-4)


# Recalibration


def grown_from_scratch(**options):
    """The gallery that `grow` makes, calibrated from scratch."""
    items = new_items()
    built = rcir.Retriever.from_embeddings(
        np.concatenate([GALLERY.vectors[40:], items.vectors]),
        [*map(str, range(40, 300)), *names(80)],
        np.concatenate([GALLERY.labels[40:], items.labels]),
        metric="euclidean",
        uncertainty=np.concatenate([GALLERY.uncertainty[40:], items.uncertainty]),
        depth=options.pop("depth", 150),
    )
    return calibrate(built, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 30, "score_function": "learned"},
        {"depth": 30, "score_function": "auto"},
        {"score_function": "minmax", "bound": "hoeffding"},
    ],
    ids=lambda options: options["score_function"],
)
@pytest.mark.filterwarnings("ignore:calibration queries have on average")  # far from the gallery
def test_a_recalibrated_retriever_is_one_calibrated_from_scratch(options, tmp_path):
    depth = options.get("depth", 150)
    own = build(depth=depth)
    calibrate(own, **{name: value for name, value in options.items() if name != "depth"})
    loaded = Retriever.load(own.save(tmp_path / "own"))
    fresh = grown_from_scratch(**options)
    for one in (own, loaded):
        with pytest.raises(StaleCalibration, match="recalibrate"):
            retrieve(grow(one), 0.3)
        one.recalibrate()
        for request in ({}, {"group": "hard"}, {"distinct": "label"}):
            assert plain(retrieve(one, 0.3, **request)) == plain(retrieve(fresh, 0.3, **request))
    reports = [one.recalibrate() for one in (own, fresh, loaded)]
    assert len(set(map(str, reports))) == 1
    assert reports[0].rows == reports[1].rows == reports[2].rows


def test_recalibration_keeps_the_score_functions_that_auto_chose():
    own = calibrate(build(depth=30), "auto", groups=False)
    risks = ("miss", "recall", "false-discovery")
    requests = [{"distinct": kind, "risk": risk} for kind in (None, "label") for risk in risks]
    before = [guarantee(own, 0.95, **request).score_function for request in requests]
    grow(own).recalibrate()
    assert [guarantee(own, 0.95, **request).score_function for request in requests] == before


def test_images_of_queries_are_not_needed_again(retriever, splits, tmp_path):
    own = Retriever.build(retriever.encoder, retriever.preprocessing, splits.gallery, 50)

    def calibrated(one):
        parts = map(one.search_labelled, (splits.tuning, splits.calibration))
        one.calibrate_splits(*parts, "quantile", recurring=True)
        return one

    def answers(one):
        return plain(one.retrieve(list(splits.test.images[20:30]), 0.3, 0.1))

    own = Retriever.load(calibrated(own).save(tmp_path / "own"))
    own.add(splits.test.images[:9], names(9), splits.test.labels[:9])
    own.recalibrate()
    assert answers(own) == answers(calibrated(own))


@pytest.mark.filterwarnings("ignore:.*labels of the gallery")
def test_a_label_that_only_queries_had_is_matched_by_new_items():
    labels = np.array([f"kind {label}" for label in CALIBRATION.labels])
    labels[:100] = "kind 99"  # which no item of the gallery has yet
    own = build([f"kind {label}" for label in GALLERY.labels], uncertainty=None)
    with pytest.warns(UserWarning, match="kind 99"):
        own.calibrate(CALIBRATION.vectors, labels, "constant")
    before = own.calibration.calibration_queries.relevance.totals(own.relevance)
    own.add(new_items().vectors, names(80), ["kind 98"] * 40 + ["kind 99"] * 40)
    own.recalibrate()
    totals = own.calibration.calibration_queries.relevance.totals(own.relevance)
    assert set(totals - before) == {0, 40}
    assert (totals[before == 0] == 40).all()


def test_clusters_and_the_number_of_retrievers_chosen_among_are_kept(tmp_path):
    own = build(uncertainty=None)
    options = {"clusters": np.tile(np.arange(80), 5), "cluster": "drive"}
    options["groups"] = CALIBRATION.groups
    own.calibrate(CALIBRATION.vectors, CALIBRATION.labels, "minmax", **options)
    own.calibration = replace(own.calibration, chosen_among=4)
    loaded = Retriever.load(own.save(tmp_path / "own"))
    for alpha in np.linspace(0.3, 0.7, 17):
        assert guarantee(loaded, alpha, 0.9, group="hard") == guarantee(
            own, alpha, 0.9, group="hard"
        )
    loaded.remove(["3"])
    loaded.recalibrate()
    found = loaded.guarantee(0.7, 0.1)
    assert (found.cluster, found.n_clusters, found.chosen_among) == ("drive", 56, 4)


def test_added_queries_calibrate_with_the_others(own, tmp_path):
    own.extend_calibration(search(own, FURTHER))
    loaded = Retriever.load(own.save(tmp_path / "own"))
    before = plain(retrieve(own, 0.3, anytime=True))
    own.recalibrate()
    assert plain(retrieve(own, 0.3, anytime=True)) == before  # the gallery is as it was
    assert str(grow(loaded).recalibrate()) == str(grow(own).recalibrate())
    assert guarantee(own, 0.3, anytime=True).n_calibration == 900
    with pytest.raises(InvalidConfig, match="anytime"):
        guarantee(own, 0.3)


@pytest.mark.parametrize("among", [1, 4])
@pytest.mark.parametrize("growing", [False, True])
def test_the_report_describes_the_guarantees_that_are_given(growing, among):
    own = calibrate(build(), alphas=(0.3,))
    part = CALIBRATION + FURTHER if growing else CALIBRATION
    if growing:
        own.extend_calibration(search(own, FURTHER))
    own.calibration = replace(own.calibration, chosen_among=among)
    report = grow(own).recalibrate()
    answers = retrieve(own, 0.3, part=part, anytime=growing)
    assert report.rows[0].mean_size == pytest.approx(np.mean([one.size for one in answers]))
    assert ("at every moment" in str(report)) == growing
    assert ("Chosen among 4 retrievers" in str(report)) == (among > 1)


def test_relevance_given_by_hand_cannot_be_recalibrated():
    own = build(uncertainty=None)
    parts = []
    for part in (TUNING, CALIBRATION):
        found = own.search(part.vectors)
        parts.append(LabelledResults(found, part.relevant, part.n_relevant))
    corrected = search(own, replace(CALIBRATION, labels=np.roll(CALIBRATION.labels, 1)), False)
    corrected = replace(corrected, relevant=CALIBRATION.relevant, n_relevant=CALIBRATION.n_relevant)
    stated = search(own, TUNING, groups=False), corrected
    for queries in (parts, stated):
        own.calibrate_splits(*queries, "constant")
        with pytest.raises(InvalidData, match="known"):
            own.recalibrate()


def test_a_changed_encoder_needs_its_queries_searched_again(loaded):
    with torch.no_grad():
        next(loaded.encoder.parameters()).mul_(2)
    with pytest.raises(StaleCalibration, match="encoder"):
        loaded.recalibrate()


@pytest.mark.filterwarnings("ignore:calibration queries have on average")
def test_queries_searched_before_a_change_calibrate_nothing(own):
    before = [search(own, part) for part in (TUNING, CALIBRATION)]
    grow(own)
    after = [search(own, part) for part in (TUNING, CALIBRATION)]
    for tuning, calibration in ((0, 0), (0, 1), (1, 0)):
        queries = (before, after)[tuning][0], (before, after)[calibration][1]
        with pytest.raises(StaleCalibration, match="again"):
            own.calibrate_splits(*queries, "constant")
    own.calibrate_splits(*after, "constant")
    own.searcher = replace(own.searcher, max_depth=20)
    with pytest.raises(StaleCalibration, match="again"):
        own.calibrate_splits(*after, "constant")
