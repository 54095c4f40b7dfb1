"""What is true of searched queries: counted by `search_labelled`, or given by hand."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, ks_2samp

from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import SameLabel, SharedLabel
from rcir.data.within_radius import WithinRadius
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import (
    InvalidConfig,
    InvalidData,
    InvalidRiskLevel,
    RiskUnattainable,
    StaleCalibration,
)
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import load, save
from rcir.risk import LabelledResults


@pytest.fixture
def unlabelled(folder, splits):
    """A gallery without labels, not calibrated."""
    own = load(folder)
    return Retriever(own.encoder, own.preprocessing, own.index, splits.gallery.ids, depth=150)


def by_hand(retriever, splits, queries):
    """Labelled by hand: what is right is known from elsewhere."""
    found = retriever.search(queries.images)
    relevant = splits.gallery.labels[found.positions] == queries.labels[:, None]
    totals = np.array([np.sum(splits.gallery.labels == label) for label in queries.labels])
    return LabelledResults.of(found, relevant, totals)


@pytest.mark.parametrize("depth", [7, 150, 1000])
def test_true_matches_are_counted_one_by_one(retriever, splits, depth):
    deep = Retriever(
        *(retriever.encoder, retriever.preprocessing, retriever.index, splits.gallery.ids),
        labels=splits.gallery.labels,
        depth=depth,
    )
    carried = splits.gallery.labels.tolist()
    # Two labels that no image of the gallery has: below and above, and one in between.
    labels = splits.test.labels.copy()
    strange = [-5, 10_000, next(label for label in range(100) if label not in carried)]
    labels[:3] = strange
    queries = ImageSet(splits.test.images, labels, splits.test.ids, splits.test.attributes)
    labelled = deep.search_labelled(queries, "occluded")
    positions = deep.search(splits.test.images).positions.tolist()
    for row, label in enumerate(labels.tolist()):
        assert labelled.totals[row] == carried.count(label)
        right = [carried[position] == label for position in positions[row]]
        assert labelled.relevant[row].tolist() == right
        assert labelled.ranks[row] == (1 + right.index(True) if any(right) else np.inf)
        assert labelled.groups[row] == str(bool(splits.test.attributes["occluded"][row]))
    assert labelled.totals[:3].tolist() == [0, 0, 0]
    assert np.isinf(labelled.ranks[:3]).all()


@pytest.mark.parametrize("depth", [7, 150])
def test_of_labels_each_counts_once(retriever, splits, depth):
    deep = Retriever(
        *(retriever.encoder, retriever.preprocessing, retriever.index, splits.gallery.ids),
        labels=splits.gallery.labels,
        depth=depth,
    )
    labelled = deep.search_labelled(splits.test, "occluded")
    once = labelled.distinct()
    for row, label in enumerate(splits.test.labels.tolist()):
        seen = {}
        for rank, position in enumerate(labelled.positions[row]):
            seen.setdefault(int(splits.gallery.labels[position]), rank)
        width = len(seen)
        columns = list(seen.values())
        assert once.keys[row, :width].tolist() == list(seen)
        np.testing.assert_array_equal(once.positions[row, :width], labelled.positions[row, columns])
        np.testing.assert_array_equal(once.distances[row, :width], labelled.distances[row, columns])
        assert (once.positions[row, width:] == -1).all()
        assert np.isposinf(once.distances[row, width:]).all()
        assert once.relevant[row].sum() == (label in seen)
        # One label is right, found or not; every one of them is in the gallery.
        assert once.totals[row] == 1
    assert once.groups is labelled.groups
    np.testing.assert_array_equal(once.uncertainty, labelled.uncertainty)


def test_queries_without_the_attribute_are_refused(retriever, splits):
    with pytest.raises(InvalidData, match="no attribute 'camera'; they have occluded"):
        retriever.search_labelled(splits.test, "camera")
    plain = ImageSet(splits.test.images, splits.test.labels, splits.test.ids)
    with pytest.raises(InvalidData, match="no attribute 'camera'; they have none"):
        retriever.search_labelled(plain, "camera")


@pytest.mark.parametrize(
    "change",
    [
        lambda labelled: {"relevant": labelled.relevant[:-1]},
        lambda labelled: {"relevant": labelled.relevant[:, :-1]},
        lambda labelled: {"relevant": labelled.relevant[:, 0]},
        lambda labelled: {"totals": labelled.totals[:-1]},
        lambda labelled: {"totals": labelled.totals[:, None]},
        lambda labelled: {"groups": np.array(["a"] * 99)},
        lambda labelled: {"groups": np.array([["a"]] * 100)},
        lambda labelled: {"vectors": labelled.vectors[:9]},
        lambda labelled: {"queries": labelled.queries[:9]},
    ],
)
def test_parts_that_do_not_fit_together_are_refused(retriever, splits, change):
    labelled = retriever.search_labelled(splits.test)
    with pytest.raises(InvalidData, match="queries, "):
        replace(labelled, **change(labelled))


def test_fewer_matches_in_the_gallery_than_were_found_are_refused(unlabelled, splits):
    labelled = by_hand(unlabelled, splits, splits.calibration)
    with pytest.raises(InvalidData, match="more true matches in the search"):
        replace(labelled, totals=labelled.totals * 0)


def test_a_gallery_without_labels_is_calibrated_with_given_relevance(unlabelled, retriever, splits):
    query = splits.test.images[0]
    with pytest.raises(InvalidData, match="the gallery has no labels"):
        unlabelled.search_labelled(splits.calibration)
    with pytest.raises(InvalidData, match="no keys: label the gallery"):
        unlabelled.search([query]).distinct()
    first, second = (
        by_hand(unlabelled, splits, part) for part in (splits.tuning, splits.calibration)
    )
    report = unlabelled.calibrate(first, second, "quantile")
    assert report.comparison == {None: {}}
    for distinct in ("label", "id"):
        with pytest.raises(InvalidConfig, match=f"distinct is '{distinct}'.*no labels known"):
            unlabelled.retrieve(query, 0.3, 0.1, distinct=distinct)
    # To everything that needs no labels the answers are those of the labelled gallery.
    for options in ({}, {"risk": "recall"}, {"simultaneous": True}):
        found, expected = (
            each.retrieve(query, 0.5, 0.1, **options) for each in (unlabelled, retriever)
        )
        assert found.ids == expected.ids
        assert found.labels is None
        assert found.to_dict()["labels"] is None
        assert found.guarantee == expected.guarantee
    unlabelled.add([query], ["new"])
    with pytest.raises(StaleCalibration, match="gallery, index"):
        unlabelled.retrieve(query, 0.5, 0.1)
    assert unlabelled.ids[unlabelled.search([query]).positions[0, 0]] == "new"


def test_every_score_function_can_be_chosen_without_labels(unlabelled, splits):
    first, second = (
        by_hand(unlabelled, splits, part) for part in (splits.tuning, splits.calibration)
    )
    report = unlabelled.calibrate(first, second, alphas=(0.2, 0.3), delta=0.05)
    (comparison,) = report.comparison.values()
    assert set(comparison) == {"constant", "minmax", "quantile", "learned"}
    assert all(set(sizes) == {0.2, 0.3} for sizes in comparison.values())
    taken = unlabelled.controllers[None].score_function.name
    assert comparison[taken][0.2] <= comparison["constant"][0.2]


def test_queries_like_those_calibrated_with_are_not_contradicted(retriever, splits):
    found = retriever.check(retriever.search_labelled(splits.test), alpha=0.5)
    assert (found.n_recent, found.n_calibration) == (100, 400)
    assert not found.contradicted()
    uncertainty = [
        retriever.search(part.images).uncertainty for part in (splits.calibration, splits.test)
    ]
    expected = ks_2samp(*uncertainty).pvalue
    assert found.p_values["uncertainty"] == pytest.approx(expected)
    assert found.p_value == pytest.approx(min(1, 3 * min(found.p_values.values())))
    answers = retriever.retrieve(list(splits.test.images), alpha=0.5, delta=0.1)
    missed = [
        label not in answer.labels
        for answer, label in zip(answers, splits.test.labels, strict=True)
    ]
    assert found.misses == sum(missed)
    expected = binomtest(found.misses, 100, 0.5, alternative="greater").pvalue
    assert found.p_values["risk"] == pytest.approx(expected)


def test_the_sets_of_a_chosen_retriever_are_checked_as_it_returns_them(folder, splits):
    """Among 50, at a fiftieth of delta: larger sets, fewer misses."""
    own = load(folder)
    recent = own.search_labelled(splits.test)
    before = own.check(recent, alpha=0.5).misses
    own.chosen_among = 50
    answers = own.retrieve(list(splits.test.images), alpha=0.5, delta=0.1)
    missed = [
        label not in answer.labels
        for answer, label in zip(answers, splits.test.labels, strict=True)
    ]
    assert own.check(recent, alpha=0.5).misses == sum(missed) < before


def test_queries_of_another_kind_are_contradicted(retriever, splits):
    clean = splits.calibration.attributes["occluded"] == 0
    part = splits.calibration.subset(np.flatnonzero(clean))
    noise = np.random.default_rng(0).integers(0, 256, part.images.shape, np.uint8)
    other = ImageSet(noise, part.labels, part.ids)
    for queries in (part, other):
        assert retriever.check(retriever.search_labelled(queries), alpha=0.5).contradicted(0.01)
    # Right pictures with wrong labels: the uncertainty is the same, the score is not.
    shuffled = ImageSet(
        splits.calibration.images, np.roll(splits.calibration.labels, 1), splits.calibration.ids
    )
    found = retriever.check(retriever.search_labelled(shuffled), alpha=0.5)
    assert found.p_values["uncertainty"] == 1
    assert found.p_values["score"] < 1e-6


def test_a_check_needs_a_valid_calibration_and_two_queries(folder, unlabelled, splits):
    retriever = load(folder)
    with pytest.raises(InvalidData, match="1 recent queries"):
        retriever.check(retriever.search_labelled(splits.test.subset(np.arange(1))), alpha=0.5)
    with pytest.raises(RiskUnattainable, match="alpha"):
        retriever.check(retriever.search_labelled(splits.test), alpha=0.001)
    with pytest.raises(InvalidRiskLevel, match="delta is 2"):
        retriever.check(retriever.search_labelled(splits.test), alpha=0.5, delta=2)
    with pytest.raises(StaleCalibration, match="not calibrated"):
        unlabelled.check(by_hand(unlabelled, splits, splits.test))
    retriever.add(splits.test.images[:1], ["new"], [1])
    with pytest.raises(StaleCalibration, match="gallery, index"):
        retriever.check(retriever.search_labelled(splits.test))


@pytest.mark.parametrize("method", ["btl", "mc-dropout", "deep-ensemble"])
def test_the_gallerys_own_uncertainties_are_searched(splits, method):
    encoder = build_encoder(EncoderConfig(method, dim=6), 1, (8, 16))
    built = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=20)
    own = encoder.embed(built.preprocessing(splits.gallery.images)).uncertainty.numpy()
    np.testing.assert_allclose(built.item_uncertainty, own, rtol=1e-4)
    found = built.search(splits.test.images[:10])
    np.testing.assert_array_equal(
        found.candidate_uncertainty, built.item_uncertainty[found.positions]
    )
    np.testing.assert_array_equal(found.keys, splits.gallery.labels[found.positions])
    with pytest.raises(ValueError, match="read-only"):
        built.item_uncertainty[0] = 0.0


def test_an_encoder_without_uncertainty_gives_the_gallery_none(splits):
    encoder = build_encoder(EncoderConfig("deterministic", dim=6), 1, (8, 16))
    built = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=20)
    assert built.item_uncertainty is None
    assert built.search(splits.test.images[:2]).candidate_uncertainty is None
    built.add(splits.test.images[:2], ["a", "b"], [1, 2])
    assert built.item_uncertainty is None


def test_the_gallerys_uncertainties_are_kept_and_grow_with_it(folder, retriever, splits, tmp_path):
    loaded = load(folder)
    np.testing.assert_array_equal(loaded.item_uncertainty, retriever.item_uncertainty)
    extra = splits.test.images[:5]
    loaded.add(extra, list("abcde"), [1, 2, 3, 4, 5])
    own = loaded.encoder.embed(loaded.preprocessing(extra)).uncertainty.numpy()
    assert loaded.item_uncertainty.shape == (305,)
    np.testing.assert_array_equal(loaded.item_uncertainty[:300], retriever.item_uncertainty)
    np.testing.assert_allclose(loaded.item_uncertainty[300:], own, rtol=1e-4)
    again = load(save(loaded, tmp_path / "again"))
    np.testing.assert_array_equal(again.item_uncertainty, loaded.item_uncertainty)
    assert again.fingerprints() == loaded.fingerprints()
    found = again.search(extra)
    np.testing.assert_array_equal(
        found.candidate_uncertainty, again.item_uncertainty[found.positions]
    )


def test_other_uncertainties_of_the_gallery_make_the_calibration_stale(folder, splits):
    retriever, image = load(folder), splits.test.images[0]
    retriever.retrieve(image, 0.3, 0.1)
    before = retriever.fingerprints()
    doubled = retriever.item_uncertainty * 2
    retriever.gallery = replace(retriever.gallery, uncertainty=doubled)
    assert {
        name for name, digest in retriever.fingerprints().items() if digest != before[name]
    } == {"gallery"}
    with pytest.raises(StaleCalibration, match="changed since calibration: gallery"):
        retriever.retrieve(image, 0.3, 0.1)


@pytest.mark.parametrize("name", ["ids", "labels", "item_uncertainty"])
def test_a_fact_for_each_image_of_the_gallery_is_needed(retriever, splits, name):
    facts = {"ids": splits.gallery.ids, "labels": splits.gallery.labels}
    facts["item_uncertainty"] = np.array(retriever.item_uncertainty)
    with pytest.raises(
        InvalidData,
        match=r"299 .*300 .*; give one each|300 .*299 .*; give one each",
    ):
        Retriever(
            *(retriever.encoder, retriever.preprocessing, retriever.index),
            **(facts | {name: facts[name][:-1]}),
        )


@pytest.mark.parametrize("kind", [np.int64, np.uint8, float])
def test_truths_that_are_not_yes_or_no_are_refused(retriever, splits, kind):
    labelled = retriever.search_labelled(splits.test)
    with pytest.raises(InvalidData, match=r"relevant is of type .*; it must be bool"):
        replace(labelled, relevant=labelled.relevant.astype(kind))


def test_groups_that_are_no_names_are_refused(retriever, splits):
    labelled = retriever.search_labelled(splits.test)
    with pytest.raises(InvalidData, match=r"groups \(100,\) of type int64: give each a string"):
        replace(labelled, groups=np.arange(100) % 2)


def test_queries_that_another_retriever_searched_are_not_compared(retriever, splits):
    encoder = build_encoder(EncoderConfig("deterministic"), 1, (8, 16))
    other = Retriever.build(encoder, Preprocessing(), splits.gallery, depth=150)
    with pytest.raises(StaleCalibration, match="searched by another retriever"):
        retriever.check(other.search_labelled(splits.test))


def test_a_bound_that_does_not_exist_is_refused_before_anything_is_fitted(folder, splits):
    own = load(folder)
    with pytest.raises(InvalidConfig, match="bound 'chernoff' is unknown"):
        own.calibrate(
            own.search_labelled(splits.tuning),
            own.search_labelled(splits.calibration),
            bound="chernoff",
        )


def matching_by(kind, numbers):
    """What two-digit numbers match by, and the arrays that may be written to."""
    if kind == "label":
        relevance = SameLabel(np.array(numbers))
        return relevance, [relevance.labels]
    if kind == "shared labels":
        digits = np.c_[numbers // 10, 10 + numbers % 10]
        relevance = SharedLabel.of_lists(digits.tolist(), 20)
        return relevance, [getattr(relevance.labels, name) for name in ("data", "indices")]
    relevance = WithinRadius(np.c_[numbers // 10, numbers % 10].astype(float), 1.0)
    return relevance, [relevance.places]


@pytest.mark.parametrize("kind", ["label", "shared labels", "places"])
def test_what_the_gallery_matches_is_a_copy_that_cannot_be_written_to(retriever, splits, kind):
    gallery, test = splits.gallery, splits.test
    known, given = matching_by(kind, gallery.labels)
    asked, _ = matching_by(kind, test.labels)
    built = Retriever.build(
        retriever.encoder,
        Preprocessing(),
        ImageSet(gallery.images, None, gallery.ids, {}, known),
        depth=20,
    )
    queries = ImageSet(test.images, None, test.ids, {}, asked)
    before = built.search_labelled(queries)
    for values in given:
        values[:] = 0
    after = built.search_labelled(queries)
    assert before.relevant.any()
    np.testing.assert_array_equal(after.relevant, before.relevant)
    np.testing.assert_array_equal(after.totals, before.totals)
    own = built.relevance.places if kind == "places" else built.relevance.labels
    for values in (own.data, own.indices, own.indptr) if kind == "shared labels" else (own,):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1


def test_the_gallerys_uncertainties_are_a_copy(retriever, splits):
    given = np.linspace(0, 1, len(splits.gallery))
    built = Retriever(
        *(retriever.encoder, retriever.preprocessing, retriever.index, splits.gallery.ids),
        item_uncertainty=given,
    )
    given[0] = 99.0
    assert built.item_uncertainty[0] == 0.0
