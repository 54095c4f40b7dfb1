"""Calibration queries that are added in use: guarantees at every moment, and no others."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad

from rcir.data import DataConfig, ImageSet, load_splits
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable, StaleCalibration
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import load, save

DELTA = 0.1
GROWING = "added one by one, so that a guarantee has to hold at every moment: ask with anytime=True"


@pytest.fixture
def own(folder):
    return load(folder)


@pytest.fixture(scope="module")
def further(splits):
    """500 further queries of the same gallery."""
    parts = {"train": 400, "validation": 100, "gallery": 300, "tuning": 200, "test": 600}
    drawn = load_splits(DataConfig("digits", options={**parts, "calibration": 400})).test
    seen = np.concatenate([part.images for part in vars(splits).values()])
    new = ~(drawn.images[:, None] == seen[None]).all(axis=(2, 3)).any(axis=1)
    return drawn.subset(np.flatnonzero(new)[:500])


@pytest.fixture
def grown(own, further):
    """With 400 calibration queries, and 500 that were added."""
    own.extend_calibration(own.search_labelled(further, "occluded"))
    return own


def wealth(misses, n, alpha):
    """What a bet against "the risk is alpha" is worth, the risk uniform below it, by quadrature."""

    def ratio(risk):
        return (risk / alpha) ** misses * ((1 - risk) / (1 - alpha)) ** (n - misses)

    return quad(ratio, 0, alpha, points=[misses / n], limit=200)[0] / alpha


def prices(own, splits, queries):
    """The smallest threshold that serves each query, by the tuning split's quantiles."""
    sample = own.search(splits.tuning.images).uncertainty
    found = own.search(queries.images)
    # Of the sample counts what is up to a thousandth above, which rounding may do to a picture.
    scale = np.array([max(1, np.sum(sample <= 1.001 * u)) / 200 for u in found.uncertainty])
    relevant = splits.gallery.labels[found.positions] == queries.labels[:, None]
    return np.where(relevant.any(1), relevant.argmax(1) / scale, np.inf)


def threshold(scores, alpha, delta=DELTA):
    """The smallest threshold at which the bet against its misses wins, by trying all of them."""
    for level in np.unique(scores[np.isfinite(scores)]):
        misses = np.sum(scores > level)
        if misses < alpha * len(scores) and wealth(misses, len(scores), alpha) >= 1 / delta:
            return level
    return None


@pytest.mark.parametrize("alpha", [0.2, 0.4])
def test_guarantees_at_every_moment_rest_on_all_queries_so_far(own, splits, further, alpha):
    image = splits.test.images[0]
    first = prices(own, splits, splits.calibration)
    before = own.retrieve(image, alpha, DELTA, anytime=True).guarantee
    assert before.threshold == pytest.approx(threshold(first, alpha), rel=1e-6)
    assert (before.n_calibration, before.bound, before.anytime) == (400, "anytime", True)
    own.extend_calibration(own.search_labelled(further, "occluded"))
    both = np.concatenate([first, prices(own, splits, further)])
    after = own.retrieve(image, alpha, DELTA, anytime=True).guarantee
    assert after.threshold == pytest.approx(threshold(both, alpha), rel=1e-6)
    assert (after.n_calibration, after.risk_bound) == (900, alpha)


def test_more_queries_certify_what_fewer_did_not(own, splits, further):
    image = splits.test.images[0]
    ask = {"alpha": 0.028, "delta": DELTA, "anytime": True, "distinct": "label"}
    with pytest.raises(RiskUnattainable):
        own.retrieve(image, **ask)
    own.extend_calibration(own.search_labelled(further, "occluded"))
    guarantee = own.retrieve(image, **ask).guarantee
    assert (guarantee.n_calibration, guarantee.distinct) == (900, "label")


def test_the_sentence_says_at_every_moment(grown, splits):
    guarantee = grown.retrieve(splits.test.images[0], 0.3, DELTA, anytime=True).guarantee
    assert str(guarantee) == (
        "With probability at least 0.9, at every moment since calibration began, a true match is "
        "missing from at most 0.3 of the sets returned to queries like the 900 calibration queries "
        f"(quantile sizes, anytime bound, threshold = {guarantee.threshold:.4g})."
    )


@pytest.mark.parametrize(
    ("alpha", "delta", "options"),
    [
        (0.3, DELTA, {}),
        (0.3, None, {}),
        (0.3, DELTA, {"simultaneous": True}),
        (0.3, DELTA, {"group": "True"}),
        (0.3, DELTA, {"mix": "any"}),
        (0.3, DELTA, {"mix": {"True": 0.5, "False": 0.5}}),
        (0.3, DELTA, {"distinct": "label"}),
        (0.9, DELTA, {"risk": "recall"}),
        (0.9, DELTA, {"risk": "false-discovery"}),
        ({"miss": 0.5, "recall": 0.9}, DELTA, {}),
        (0.5, DELTA, {"abstain": True}),
    ],
    ids=str,
)
def test_everything_else_is_refused_in_words(grown, splits, alpha, delta, options):
    image = splits.test.images[0]
    with pytest.raises(InvalidConfig, match=GROWING):
        grown.retrieve(image, alpha, delta, **options)


@pytest.mark.parametrize(
    ("alpha", "delta", "options", "said"),
    [
        (0.9, DELTA, {"risk": "recall"}, "anytime=True is for the miss risk alone, of all answers"),
        ({"miss": 0.5, "recall": 0.9}, DELTA, {}, "anytime=True is for the miss risk alone"),
        (0.5, DELTA, {"abstain": True}, "anytime=True is for the miss risk alone"),
        (0.5, DELTA, {"simultaneous": True}, "simultaneous=True and anytime=True exclude each oth"),
        (0.5, DELTA, {"mix": {"True": 1.0}}, "goes with neither simultaneous nor anytime"),
        (0.5, None, {}, "delta=None is for the miss or the recall risk alone: give a delta"),
    ],
    ids=str,
)
def test_what_never_holds_at_every_moment_is_refused(grown, splits, alpha, delta, options, said):
    with pytest.raises(InvalidConfig, match=said):
        grown.retrieve(splits.test.images[0], alpha, delta, anytime=True, **options)


def test_groups_grow_with_their_own_queries(grown, splits, further):
    image = splits.test.images[0]
    parts = (splits.calibration, further)
    scores = np.concatenate([prices(grown, splits, part) for part in parts])
    occluded = np.concatenate([part.attributes["occluded"].astype(bool) for part in parts])
    thresholds = []
    for group in (True, False):
        answer = grown.retrieve(image, 0.4, DELTA, group=str(group), anytime=True)
        assert answer.guarantee.n_calibration == np.sum(occluded == group)
        expected = threshold(scores[occluded == group], 0.4)
        assert answer.guarantee.threshold == pytest.approx(expected, rel=1e-6)
        thresholds.append(threshold(scores[occluded == group], 0.4, DELTA / 2))
    mixed = grown.retrieve(image, 0.4, DELTA, mix="any", anytime=True).guarantee
    assert mixed.threshold == pytest.approx(max(thresholds), rel=1e-6)


def test_queries_that_come_in_two_parts_are_those_that_come_at_once(folder, grown, splits, further):
    twice = load(folder)
    for rows in (np.arange(200), np.arange(200, 500)):
        twice.extend_calibration(twice.search_labelled(further.subset(rows), "occluded"))
    for options in ({}, {"distinct": "label"}, {"group": "True"}):
        first, second = (
            each.retrieve(splits.test.images[0], 0.3, DELTA, anytime=True, **options)
            for each in (grown, twice)
        )
        assert first.to_dict() == second.to_dict()


def test_what_grew_is_saved_and_loaded_and_grows_on(folder, grown, splits, further, tmp_path):
    images = list(splits.test.images[:20])
    loaded = load(save(grown, tmp_path / "grown"))
    for options in ({}, {"distinct": "label"}, {"group": "False"}, {"mix": "any"}):
        before, after = (
            [each.to_dict() for each in one.retrieve(images, 0.3, DELTA, anytime=True, **options)]
            for one in (grown, loaded)
        )
        assert after == before
    with pytest.raises(InvalidConfig, match=GROWING):
        loaded.retrieve(images[0], 0.3, DELTA)
    np.testing.assert_array_equal(loaded.query_digests, grown.query_digests)
    with pytest.raises(InvalidData, match="500 of 500 queries to add were tuned or calibrated wi"):
        loaded.extend_calibration(loaded.search_labelled(further, "occluded"))
    loaded.extend_calibration(loaded.search_labelled(splits.test, "occluded"))
    answer = loaded.retrieve(images[0], 0.3, DELTA, anytime=True)
    assert answer.guarantee.n_calibration == 1000
    # As it was stored before, it did not grow.
    assert load(folder).retrieve(images[0], 0.3, DELTA).guarantee.n_calibration == 400


def test_a_new_calibration_ends_it(grown, splits):
    grown.calibrate(
        grown.search_labelled(splits.tuning), grown.search_labelled(splits.calibration), "quantile"
    )
    assert grown.retrieve(splits.test.images[0], 0.3, DELTA).guarantee.n_calibration == 400
    grown.extend_calibration(grown.search_labelled(splits.test))
    assert len(grown.query_digests) == 200 + 400 + 100


def test_recent_queries_are_checked_at_the_guarantee_they_were_answered_with(grown, splits):
    found = grown.check(grown.search_labelled(splits.test), alpha=0.4, delta=DELTA)
    answers = grown.retrieve(list(splits.test.images), 0.4, DELTA, anytime=True)
    missed = [
        label not in answer.labels
        for answer, label in zip(answers, splits.test.labels, strict=True)
    ]
    assert (found.misses, found.n_calibration) == (sum(missed), 900)
    assert not found.contradicted()


def both(first, second):
    """The images of two sets, one after the other."""
    attributes = {
        name: np.concatenate([first.attributes[name], second.attributes[name]])
        for name in first.attributes.keys() & second.attributes.keys()
    }
    return ImageSet(
        np.concatenate([first.images, second.images]),
        np.concatenate([first.labels, second.labels]),
        [*first.ids, *(f"again-{name}" for name in second.ids)],
        attributes,
    )


@pytest.mark.parametrize("recurring", [False, True])
def test_pictures_of_the_gallery_are_never_added(own, splits, recurring):
    plain = ImageSet(splits.test.images, splits.test.labels, splits.test.ids)
    queries = own.search_labelled(both(plain, splits.gallery.subset(np.arange(3))))
    with pytest.raises(
        InvalidData,
        match=r"3 of 103 queries to add are pictures of the gallery \(rows 100, 101, 102\), and ea",
    ):
        own.extend_calibration(queries, recurring)


@pytest.mark.parametrize("part", ["tuning", "calibration"])
def test_pictures_that_tuned_or_calibrated_are_added_if_they_recur_only(own, splits, part):
    known = getattr(splits, part).subset(np.arange(2))
    queries = own.search_labelled(both(splits.test, known), "occluded")
    with pytest.raises(InvalidData, match=r"2 of 102 .* calibrated with before \(rows 100, 101\)"):
        own.extend_calibration(queries)
    # Nothing was changed by a refusal.
    assert own.retrieve(splits.test.images[0], 0.3, DELTA).guarantee.n_calibration == 400
    assert len(own.query_digests) == 600
    own.extend_calibration(queries, recurring=True)
    answer = own.retrieve(splits.test.images[0], 0.3, DELTA, anytime=True)
    assert answer.guarantee.n_calibration == 502


def test_the_same_picture_is_added_twice_if_it_recurs_only(own, splits):
    twice = own.search_labelled(both(splits.test, splits.test.subset(np.arange(1))), "occluded")
    with pytest.raises(
        InvalidData,
        match=r"1 of 101 queries to add came before among them \(row 100\), so that there are few",
    ):
        own.extend_calibration(twice)
    own.extend_calibration(twice, recurring=True)
    with pytest.raises(InvalidData, match="100 of 100 queries to add were tuned or calibrated wit"):
        own.extend_calibration(own.search_labelled(splits.test, "occluded"))


def test_copies_encoded_anew_are_warned_of(own, splits):
    """One grey level apart in one pixel: another digest, nearly the same embedding."""
    copies = splits.gallery.images[:4].copy()
    copies[:, 0, 0] ^= 1
    queries = ImageSet(
        np.concatenate([splits.test.images, copies]),
        np.concatenate([splits.test.labels, splits.gallery.labels[:4]]),
        [str(row) for row in range(104)],
        {"occluded": np.zeros(104, bool)},
    )
    with pytest.warns(UserWarning, match=r"4 of 104 queries to add \(rows 100, 101, 102, 103\) li"):
        own.extend_calibration(own.search_labelled(queries, "occluded"))


def test_queries_without_the_groups_of_the_others_are_not_added(own, splits):
    with pytest.raises(InvalidData, match="and those to add all need a group, or none"):
        own.extend_calibration(own.search_labelled(splits.test))
    own.calibrate(
        own.search_labelled(splits.tuning), own.search_labelled(splits.calibration), "constant"
    )
    with pytest.raises(InvalidData, match="and those to add all need a group, or none"):
        own.extend_calibration(own.search_labelled(splits.test, "occluded"))


def test_queries_in_clusters_are_not_added(own, splits):
    judged = own.search_labelled(splits.test, "occluded")
    clusters = np.repeat([str(number) for number in range(10)], 10)
    with pytest.raises(InvalidData, match="no queries can be added where they come in clusters"):
        own.extend_calibration(replace(judged, clusters=clusters, cluster="drawer"))


def test_only_a_valid_calibration_grows_by_what_it_searched(own, splits):
    bare = Retriever(own.encoder, own.preprocessing, own.index, splits.gallery.ids, own.relevance)
    with pytest.raises(StaleCalibration, match="not calibrated"):
        bare.extend_calibration(bare.search_labelled(splits.test))
    before = own.search_labelled(splits.test, "occluded")
    own.add(splits.calibration.images[:1], ["new"], [7])
    with pytest.raises(StaleCalibration, match="gallery, index"):
        own.extend_calibration(own.search_labelled(splits.test, "occluded"))
    with pytest.raises(StaleCalibration):
        own.extend_calibration(before)


def test_a_chosen_retriever_that_grows_stays_chosen(grown, splits):
    """Among 4, at a quarter of delta."""
    grown.chosen_among = 4
    image = splits.test.images[0]
    chosen = grown.retrieve(image, 0.4, DELTA, anytime=True).guarantee
    assert str(chosen).startswith("Chosen among 4 retrievers after looking: with probability")
    grown.chosen_among = 1
    alone = grown.retrieve(image, 0.4, DELTA / 4, anytime=True).guarantee
    assert chosen.threshold == alone.threshold


def test_a_folder_without_the_queries_digests_is_refused(grown, tmp_path):
    """Nothing could tell whether queries to add are known."""
    from rcir.errors import CorruptRetriever

    folder = save(grown, tmp_path / "grown")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["queries.npy"]
    (folder / "queries.npy").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    with pytest.raises(CorruptRetriever, match="calibrate again"):
        load(folder)
