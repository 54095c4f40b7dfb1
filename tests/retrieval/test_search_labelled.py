"""True matches of queries: counted by `search_labelled`, or given by hand; and checks with them."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, ks_2samp

from rcir.data import ImageSet
from rcir.data.relevance import SameLabel, SharedLabel, WithinRadius
from rcir.errors import (
    InvalidConfig,
    InvalidData,
    InvalidRiskLevel,
    RiskUnattainable,
    StaleCalibration,
)
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults
from tests.retrieval.retrievers import build, calibrate, missed, retrieve, search
from tests.retrieval.whole_numbers import CALIBRATION, FURTHER, GALLERY, TEST


@pytest.mark.parametrize("depth", [7, 150, 1000])
def test_true_matches_are_counted_one_by_one(depth):
    # Labels that no item of the gallery has: below, above, and one that was removed in between.
    labels = TEST.labels.copy()
    labels[:3] = strange = [-5, 10_000, 3]
    gallery = np.where(GALLERY.labels == 3, 4, GALLERY.labels)
    own = build(gallery, depth=depth)
    found = search(own, replace(TEST, labels=labels))
    assert found.results.positions.shape == (100, min(depth, 300))
    for row, label in enumerate(labels.tolist()):
        assert found.n_relevant[row] == gallery.tolist().count(label)
        right = [gallery[position] == label for position in found.results.positions[row]]
        assert found.relevant[row].tolist() == right
        assert found.ranks[row] == (1 + right.index(True) if any(right) else np.inf)
        assert found.population.groups[row] == ("hard" if TEST.uncertainty[row] > 50 else "easy")
    assert not np.isin(strange, gallery).any()
    assert (found.n_relevant[:3] == 0).all()


@pytest.mark.parametrize("depth", [7, 150])
def test_each_label_counts_once_among_distinct_labels(depth):
    found = search(build(depth=depth), TEST)
    labelled = found.first_of_each_label()
    once = labelled.results
    for row, label in enumerate(TEST.labels.tolist()):
        seen = {}
        for rank, position in enumerate(TEST.order[row, :depth]):
            seen.setdefault(int(GALLERY.labels[position]), rank)
        width, columns = len(seen), list(seen.values())
        assert once.labels[row, :width].tolist() == list(seen)
        np.testing.assert_array_equal(once.positions[row, :width], TEST.order[row, columns])
        np.testing.assert_array_equal(
            once.distances[row, :width], found.results.distances[row, columns]
        )
        assert (once.positions[row, width:] == -1).all()
        assert np.isposinf(once.distances[row, width:]).all()
        assert labelled.relevant[row].sum() == (label in seen)
    assert (labelled.n_relevant == 1).all()
    np.testing.assert_array_equal(labelled.population.groups, found.population.groups)
    np.testing.assert_array_equal(once.uncertainty, TEST.uncertainty)


def test_attributes_of_images_name_their_groups(retriever, splits):
    found = retriever.search_labelled(splits.test, "occluded")
    assert (
        found.population.groups.tolist() == splits.test.attributes["occluded"].astype(str).tolist()
    )
    with pytest.raises(InvalidData, match="occluded"):
        retriever.search_labelled(splits.test, "camera")
    bare = ImageSet(splits.test.images, splits.test.labels, splits.test.ids)
    with pytest.raises(InvalidData, match="none"):
        retriever.search_labelled(bare, "camera")


@pytest.mark.parametrize(
    "change",
    [
        lambda found: {"relevant": found.relevant[:-1]},
        lambda found: {"relevant": found.relevant[:, :-1]},
        lambda found: {"relevant": found.relevant[:, 0]},
        lambda found: {"relevant": found.relevant.astype(np.uint8)},
        lambda found: {"relevant": found.relevant.astype(float)},
        lambda found: {"n_relevant": found.n_relevant[:-1]},
        lambda found: {"n_relevant": found.n_relevant[:, None]},
        lambda found: {"n_relevant": found.n_relevant * 0},
        lambda found: {"population": found.population[1:]},
        lambda found: {"results": found.results[:9]},
    ],
)
def test_parts_of_labelled_results_that_do_not_fit_together_are_refused(certified, change):
    found = search(certified, TEST)
    with pytest.raises(InvalidData, match=r"queries|bool|string|relevant|shape"):
        replace(found, **change(found))


# Relevance of other kinds


def matching_by(kind, numbers):
    """The relevance of two-digit numbers."""
    digits = np.c_[numbers // 10, numbers % 10]
    if kind == "label":
        return SameLabel(np.array(numbers))
    if kind == "places":
        return WithinRadius(digits.astype(float), 1.0)
    return SharedLabel.from_lists((digits + np.array([0, 10])).tolist(), 20)


def arrays_of(relevance):
    if isinstance(relevance, SharedLabel):
        return relevance.labels.data, relevance.labels.indices
    return [relevance.places if isinstance(relevance, WithinRadius) else relevance.labels]


@pytest.mark.parametrize("kind", ["label", "shared labels", "places"])
def test_the_relevance_of_the_gallery_is_a_copy_that_cannot_be_written_to(kind):
    relevance = matching_by(kind, GALLERY.labels)
    own = build(relevance, uncertainty=None)
    ids, asked = [str(row) for row in range(100)], matching_by(kind, TEST.labels)
    queries = ImageSet(TEST.vectors, None, ids, {}, asked)
    before = own.search_labelled(queries)
    for values in arrays_of(relevance):
        values[:] = 0
    after = own.search_labelled(queries)
    assert before.relevant.any()
    np.testing.assert_array_equal(after.relevant, before.relevant)
    np.testing.assert_array_equal(after.n_relevant, before.n_relevant)
    for values in arrays_of(own.relevance):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1


def by_hand(retriever, splits, queries):
    """True matches that are known from elsewhere."""
    found = retriever.search(queries.images)
    relevant = splits.gallery.labels[found.positions] == queries.labels[:, None]
    totals = np.array([np.sum(splits.gallery.labels == label) for label in queries.labels])
    return LabelledResults(found, relevant, totals)


@pytest.fixture
def unlabelled(retriever, splits):
    """A gallery of images without labels, not calibrated."""
    gallery = replace(retriever.searcher.gallery, relevance=None)
    return Retriever(replace(retriever.searcher, gallery=gallery))


def test_a_gallery_without_labels_is_calibrated_with_relevance_given_by_hand(
    unlabelled, retriever, splits, tmp_path
):
    query = splits.test.images[0]
    with pytest.raises(InvalidData, match="labels"):
        unlabelled.search_labelled(splits.calibration)
    with pytest.raises(InvalidData, match="label"):
        unlabelled.search([query]).first_of_each_label()
    parts = [by_hand(unlabelled, splits, part) for part in (splits.tuning, splits.calibration)]
    unlabelled.calibrate_splits(*parts, "quantile", query_uncertainty="encoder")
    with pytest.raises(InvalidConfig, match="no single label each"):
        unlabelled.retrieve(query, 0.3, 0.1, distinct="label")
    # Requests that need no labels get the answers of the labelled gallery.
    for one in (unlabelled, Retriever.load(unlabelled.save(tmp_path / "unlabelled"))):
        assert one.labels is None
        for options in ({}, {"risk": "recall"}, {"simultaneous": True}):
            found, expected = (
                each.retrieve(query, 0.5, 0.1, **options) for each in (one, retriever)
            )
            assert found.ids == expected.ids
            assert found.labels is None
            assert found.guarantee.certificate == expected.guarantee.certificate


def test_auto_compares_every_score_function_that_needs_no_labels(unlabelled, splits):
    parts = [by_hand(unlabelled, splits, part) for part in (splits.tuning, splits.calibration)]
    report = unlabelled.calibrate_splits(*parts, alphas=(0.2, 0.3), delta=0.05)
    (comparison,) = report.comparison.values()
    assert set(comparison) == {"constant", "minmax", "quantile", "learned"}
    assert all(set(sizes) == {0.2, 0.3} for sizes in comparison.values())
    chosen = unlabelled.guarantee(0.3, 0.05).score_function
    assert comparison[chosen][0.2] <= comparison["constant"][0.2]


# Checks of recent queries


def test_queries_like_the_calibration_queries_are_not_contradicted(certified):
    found = certified.check(search(certified, TEST), alpha=0.3)
    assert (found.n_recent, found.n_calibration) == (100, 400)
    assert not found.contradicted()
    expected = ks_2samp(CALIBRATION.uncertainty, TEST.uncertainty).pvalue
    assert found.p_values["uncertainty"] == pytest.approx(expected)
    assert found.p_value == pytest.approx(min(1, 3 * min(found.p_values.values())))
    assert found.misses == missed(retrieve(certified, 0.3), TEST).sum()
    expected = binomtest(found.misses, 100, 0.3, alternative="greater").pvalue
    assert found.p_values["risk"] == pytest.approx(expected)


def test_a_chosen_retriever_is_checked_with_the_sets_it_returns():
    """Chosen among 50, it certifies at a fiftieth of delta: larger sets, fewer misses."""
    own = calibrate(build())
    recent = search(own, FURTHER)
    before = own.check(recent, alpha=0.3).misses
    own.calibration = replace(own.calibration, chosen_among=50)
    answers = retrieve(own, 0.3, part=FURTHER)
    assert own.check(recent, alpha=0.3).misses == missed(answers, FURTHER).sum() < before


def test_queries_of_another_kind_are_contradicted(certified):
    easy = CALIBRATION[CALIBRATION.groups == "easy"]
    assert certified.check(search(certified, easy), alpha=0.3).contradicted(0.01)
    # Right vectors with wrong labels: the uncertainty is the same, the score is not.
    shuffled = replace(CALIBRATION, labels=np.roll(CALIBRATION.labels, 1))
    found = certified.check(search(certified, shuffled), alpha=0.3)
    assert found.p_values["uncertainty"] == 1
    assert found.p_values["score"] < 1e-6


def test_a_check_needs_a_valid_calibration_and_two_queries():
    own = calibrate(build())
    recent = search(own, TEST)
    for queries, options, error, word in (
        (search(own, TEST[:1]), {"alpha": 0.5}, InvalidData, "1 recent"),
        (recent, {"alpha": 0.001}, RiskUnattainable, "alpha"),
        (recent, {"alpha": 0.5, "delta": 2}, InvalidRiskLevel, "delta"),
        (search(build(depth=9), TEST), {}, StaleCalibration, "another retriever"),
    ):
        with pytest.raises(error, match=word):
            own.check(queries, **options)
    own.remove(["7"])
    with pytest.raises(StaleCalibration, match="gallery, index"):
        own.check(search(own, TEST))
