"""Queries that come in clusters, such as all that one person drew."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from rcir.data import ImageSet
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.retrieval.retriever import Retriever
from tests.populations import in_population
from tests.retrieval.retrievers import (
    build,
    calibrate,
    guarantee,
    name_case,
    plain,
    retrieve,
    search,
)
from tests.retrieval.whole_numbers import (
    CALIBRATION,
    DELTA,
    FURTHER,
    TEST,
    TUNING,
    hoeffding_bentkus,
)


def drawers(n, first, people):
    """Return the drawer of each query; numbers start at `first` and shares are unequal."""
    number = np.sort(np.random.default_rng(first).integers(0, people, n))
    return np.array([f"d{first + each}" for each in number])


TUNING_DRAWERS, DRAWERS = drawers(200, 0, 30), drawers(400, 100, 80)
N_DRAWERS = len(set(DRAWERS.tolist()))
HARD = CALIBRATION.groups == "hard"


def by_drawers(retriever, part=CALIBRATION, names=DRAWERS, groups=False):
    return search(retriever, part, groups, clusters=names, cluster="drawer")


def clustered(groups=False, score_function="quantile", **options):
    retriever = build(**({"depth": 30} if score_function == "auto" else {}))
    first = by_drawers(retriever, TUNING, TUNING_DRAWERS, groups)
    retriever.calibrate_splits(
        first, by_drawers(retriever, groups=groups), score_function, **options
    )
    return retriever


def shares(threshold):
    """The share of missed queries of each drawer, a thousandth above the threshold allowed."""
    missed = CALIBRATION.scores > threshold * (1 + 1e-3)
    return np.array([missed[name == DRAWERS].mean() for name in sorted(set(DRAWERS.tolist()))])


@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_clusters_are_counted_and_weigh_alike(alpha):
    found = guarantee(clustered(bound="hoeffding-bentkus"), alpha)
    thresholds = np.unique(CALIBRATION.scores)
    expected = next(x for x in thresholds if hoeffding_bentkus(shares(x), alpha) <= DELTA)
    assert found.threshold == pytest.approx(expected, rel=2e-3)
    assert (found.cluster, found.n_clusters, found.n_calibration) == ("drawer", N_DRAWERS, 400)
    # As many independent queries would certify it with smaller sets.
    plain = calibrate(build(), bound="hoeffding-bentkus", groups=False)
    assert guarantee(plain, alpha).threshold < found.threshold


def test_the_sentence_is_about_further_clusters():
    found = guarantee(clustered(), 0.4)
    assert f"any further drawer like the {N_DRAWERS} of the 400" in str(found)
    assert found.bound == "betting"
    assert 0 < shares(found.threshold).mean() < 0.4


def test_a_group_has_the_clusters_of_its_own_queries():
    own = clustered(groups=True)
    found = guarantee(own, 0.6, group="hard")
    n = len(set(DRAWERS[HARD].tolist()))
    assert (found.n_calibration, found.n_clusters) == (HARD.sum(), n)
    assert f"any further drawer like the {n} of the {HARD.sum()}" in str(found)
    with pytest.raises(InvalidConfig, match=r"drawer.* several groups"):
        guarantee(own, 0.6, mix="any")


@pytest.mark.parametrize(
    "options",
    [{"abstain": True}, {"simultaneous": True}, {"anytime": True}, {"mix": {"hard": 1.0}}],
    ids=name_case,
)
def test_requests_that_need_independent_queries_are_refused(options):
    with pytest.raises(InvalidConfig, match="drawer"):
        guarantee(clustered(groups=True), 0.5, **options)


REQUESTS = (
    (0.4, DELTA, {}),
    (0.5, DELTA, {"distinct": "label"}),
    (0.9, DELTA, {"risk": "recall"}),
    (0.95, DELTA, {"risk": "false-discovery"}),
    ({"miss": 0.6, "false-discovery": 0.98}, DELTA, {}),
    (0.4, None, {}),
    (0.6, DELTA, {"group": "easy"}),
)


@pytest.mark.parametrize("score_function", ["quantile", "auto"])
def test_every_other_answer_is_the_same_after_loading(tmp_path, score_function):
    own = clustered(groups=True, score_function=score_function)
    loaded = Retriever.load(own.save(tmp_path / "clustered"))
    for alpha, delta, options in REQUESTS:
        before, after = (retrieve(one, alpha, delta, **options) for one in (own, loaded))
        assert plain(after) == plain(before)
        assert "any further drawer" in str(after[0].guarantee)
    with pytest.raises(RiskUnattainable):
        guarantee(loaded, 0.001)


# Clusters that are named


def test_clusters_of_images_are_named_by_an_attribute(retriever, splits):
    images = replace(
        splits.calibration, attributes={**splits.calibration.attributes, "drawer": DRAWERS}
    )
    found = retriever.search_labelled(images, "occluded", cluster="drawer")
    assert found.population.clusters.tolist() == DRAWERS.tolist()
    assert found.population.groups.tolist() == images.attributes["occluded"].astype(str).tolist()
    with pytest.raises(InvalidData, match="drawer"):
        retriever.search_labelled(images, cluster="video")
    known = replace(images, cluster="drawer")
    with pytest.warns(UserWarning, match="clusters") as caught:
        assert retriever.search_labelled(known).population.clusters is None
    assert caught[0].filename == __file__
    assert retriever.search_labelled(known, cluster="drawer").population.cluster_word == "drawer"


@pytest.mark.parametrize(
    "change",
    [
        {"clusters": np.array(["a"] * 99)},
        {"clusters": np.arange(400) / 7},
        {"clusters": None},
        {"cluster_word": None},
    ],
    ids=["few", "numbers", "unnamed", "missing"],
)
def test_clusters_that_do_not_name_each_query_are_refused(change):
    with pytest.raises(InvalidData, match="cluster"):
        in_population(by_drawers(build()), **change)


def test_vectors_are_divided_and_counted_by_whole_clusters():
    own = build(uncertainty=None)
    report = own.calibrate(
        CALIBRATION.vectors, CALIBRATION.labels, clusters=np.arange(400) // 5, cluster="video"
    )
    assert "280 calibration queries in 56 clusters (video)" in str(report)
    tuned, calibrated = (
        set(one.population.clusters.tolist())
        for one in (own.calibration.tuning_queries, own.calibration.calibration_queries)
    )
    assert not tuned & calibrated
    assert own.guarantee(0.6, 0.1).n_clusters == len(calibrated) == 56


def test_frames_of_videos_cause_a_warning_unless_their_clusters_are_named():
    rng = np.random.default_rng(0)
    vectors = np.repeat(FURTHER.vectors[:100], 5, axis=0) + rng.integers(-1, 2, (500, 4)) / 2
    _, rows = np.unique(vectors, axis=0, return_index=True)
    frames = ImageSet(vectors[rows], np.repeat(FURTHER.labels[:100], 5)[rows], rows)
    with pytest.warns(UserWarning, match="frames of one video"):
        build(uncertainty=None).calibrate(frames.images, frames.labels, "constant")
    own = build(uncertainty=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.calibrate(frames.images, frames.labels, "constant", clusters=rows // 5)
        build(uncertainty=None).calibrate(FURTHER.vectors, FURTHER.labels, "constant")


# Clusters that must stay apart


def test_a_cluster_in_both_splits_is_refused():
    own = calibrate(build())
    names = DRAWERS.copy()
    names[:9] = TUNING_DRAWERS[0]
    with pytest.raises(InvalidData, match="1 clusters"):
        own.calibrate_splits(by_drawers(own, TUNING, TUNING_DRAWERS), by_drawers(own, names=names))
    # The refusal changed nothing.
    assert guarantee(own, 0.4).cluster is None


def test_both_splits_come_in_the_same_kind_of_clusters_or_in_none():
    own = build()
    first, second = by_drawers(own, TUNING, TUNING_DRAWERS), by_drawers(own)
    for tuning, calibration in (
        (search(own, TUNING, groups=False), second),
        (first, search(own, CALIBRATION, groups=False)),
        (first, in_population(second, cluster_word="video")),
    ):
        with pytest.raises(InvalidData, match="drawer"):
            own.calibrate_splits(tuning, calibration)


def test_queries_in_clusters_are_neither_checked_nor_added_as_independent_ones():
    plain, own = calibrate(build(), groups=False), clustered()
    recent = by_drawers(plain, TEST, drawers(100, 200, 20))
    independent = search(own, TEST, groups=False)
    for call, queries in (
        (plain.check, recent),
        (plain.extend_calibration, recent),
        (own.check, independent),
        (own.extend_calibration, independent),
    ):
        with pytest.raises(InvalidData, match="clusters"):
            call(queries)
