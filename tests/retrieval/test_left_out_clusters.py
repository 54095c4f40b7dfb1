"""Queries that are gallery items are searched without their whole cluster, which counts once."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist

import rcir
from rcir.errors import InvalidData

rng = np.random.default_rng(0)
CENTRES = 2 * rng.standard_normal((8, 6))
SIZES = rng.choice([1, 1, 1, 2, 5], 160)
MOMENTS = np.repeat(np.arange(160), SIZES)
LABELS = rng.integers(8, size=160)[MOMENTS]
VECTORS = (
    CENTRES[LABELS]
    + rng.standard_normal((160, 6))[MOMENTS]
    + 0.3 * rng.standard_normal((len(MOMENTS), 6))
)
NAMES = np.array([f"encounter {number}" for number in range(160)])[MOMENTS]


def built(vectors=VECTORS, labels=LABELS, clusters=NAMES, **options):
    return rcir.Retriever.from_embeddings(
        vectors,
        labels=labels,
        metric="euclidean",
        leave_one_out=True,
        clusters=clusters,
        cluster="encounter",
        **options,
    )


@pytest.mark.parametrize("named", [True, False])
def test_an_item_finds_nothing_of_its_cluster_and_other_queries_find_all(named):
    retriever = built(depth=20)
    inside, outside = np.arange(0, len(VECTORS), 3), VECTORS[:40] + 0.2
    queries = np.concatenate([VECTORS[inside], outside])
    labels = np.concatenate([LABELS[inside], LABELS[:40]])
    clusters = np.concatenate([NAMES[inside], np.repeat("another one", 40)]) if named else None
    results = retriever.search_labelled(
        retriever.labelled(queries, labels, clusters=clusters, cluster="encounter")
    )
    apart = cdist(queries, VECTORS)
    left_out = np.zeros(apart.shape, bool)
    left_out[: len(inside)] = MOMENTS[inside, None] == MOMENTS
    expected = np.sort(np.where(left_out, np.inf, apart), axis=1)[:, :20]
    np.testing.assert_allclose(results.results.distances, expected, rtol=1e-4)
    matches = (labels[:, None] == LABELS) & ~left_out
    np.testing.assert_array_equal(results.n_relevant, matches.sum(axis=1))
    assert results.population.clusters is None  # their queries are not yet one of each


def test_a_query_that_is_no_item_is_left_out_with_the_cluster_that_it_names():
    retriever = built(depth=20)
    queries = retriever.labelled(
        VECTORS[:9] + 1e-3, LABELS[:9], clusters=NAMES[:9], cluster="encounter"
    )
    positions = retriever.search_labelled(queries).results.positions
    assert (MOMENTS[positions] != MOMENTS[:9, None]).all()
    plain = retriever.labelled(VECTORS[:9] + 1e-3, LABELS[:9])
    assert (retriever.search_labelled(plain).results.positions[:, 0] == np.arange(9)).all()


def test_clusters_stay_whole_and_one_query_of_each_calibrates():
    retriever = built()
    report = retriever.calibrate(VECTORS, LABELS, "constant")
    calibration = retriever.calibration
    rows = {tuple(vector): row for row, vector in enumerate(VECTORS.astype(np.float32).tolist())}
    tuned, calibrated = (
        MOMENTS[[rows[tuple(vector)] for vector in part.vectors.tolist()]]
        for part in (calibration.tuning_queries, calibration.calibration_queries)
    )
    assert not set(tuned) & set(calibrated)
    assert sorted(calibrated) == sorted(set(range(160)) - set(tuned))
    assert len(tuned) == len(set(tuned))
    assert report.n_calibration == len(calibrated)
    assert retriever.guarantee(0.3, 0.1).left_out == "encounter"


def test_splits_that_share_a_cluster_are_refused():
    retriever = built()
    halves = [
        retriever.search_labelled(retriever.labelled(VECTORS[rows], LABELS[rows]))
        for rows in (slice(0, None, 2), slice(1, None, 2))
    ]
    with pytest.raises(InvalidData, match="encounter"):
        retriever.calibrate_splits(*halves, "constant")


def test_further_queries_count_each_cluster_once_and_none_again():
    retriever = built()
    late = np.isin(MOMENTS, np.flatnonzero(SIZES > 1)[:2])
    late |= MOMENTS > 150
    retriever.calibrate(VECTORS[~late], LABELS[~late], "constant")
    units = MOMENTS[late]
    added = retriever.search_labelled(retriever.labelled(VECTORS[late], LABELS[late]))
    before = len(retriever.calibration.calibration_queries)
    retriever.extend_calibration(added)
    assert len(retriever.calibration.calibration_queries) == before + len(set(units))
    again = retriever.search_labelled(retriever.labelled(VECTORS[~late], LABELS[~late]))
    with pytest.raises(InvalidData):
        retriever.extend_calibration(again)


@pytest.mark.filterwarnings("ignore:.*nearer than all others")  # encounters that are not found
@pytest.mark.parametrize("clusters", ["auto", NAMES])
def test_clusters_are_stored_and_follow_changes_of_the_gallery(clusters, tmp_path):
    copies = VECTORS + 1e-3  # near-copies, which are found; those of 40 items come later
    vectors = np.concatenate([VECTORS, copies])
    labels = np.tile(LABELS, 2)
    names = np.tile(NAMES, 2)
    first = len(VECTORS) + 100
    passed = "auto" if isinstance(clusters, str) else names[:first]
    retriever = built(vectors[:first], labels[:first], passed)
    retriever.calibrate(vectors[:first], labels[:first], "constant")
    loaded = rcir.load(retriever.save(tmp_path / "own"))
    assert loaded.changes() == []
    assert loaded.guarantee(0.4, 0.1) == retriever.guarantee(0.4, 0.1)
    later = None if isinstance(clusters, str) else names[first:]
    for each in (retriever, loaded):
        ids = [f"new {row}" for row in range(len(vectors) - first)]
        each.add(vectors[first:], ids, labels[first:], clusters=later)
        units = each.searcher.gallery.units
        np.testing.assert_array_equal(units[: len(VECTORS)], units[len(VECTORS) :])
        each.remove(["0", "new 3"])
        assert len(each.searcher.gallery.units) == len(vectors) - 2
    assert str(loaded.recalibrate()) == str(retriever.recalibrate())


def test_unsuitable_clusters_are_refused():
    plain = {"labels": LABELS, "metric": "euclidean"}
    with pytest.raises(InvalidData, match="leave_one_out"):
        rcir.Retriever.from_embeddings(VECTORS, clusters=NAMES, **plain)
    for wrong in (NAMES[:-1], NAMES[:, None], ["", *NAMES[1:]]):
        with pytest.raises(InvalidData, match="clusters"):
            built(clusters=wrong)
    found = rcir.Retriever.from_embeddings(VECTORS, leave_one_out=True, **plain)
    with pytest.raises(InvalidData, match="from_embeddings"):
        found.calibrate(VECTORS, LABELS, clusters=NAMES)
    with pytest.raises(InvalidData, match="another encounter"):
        built().calibrate(VECTORS, LABELS, clusters=NAMES[::-1], cluster="encounter")
    with pytest.raises(InvalidData, match="clusters"):
        built().add(VECTORS[:1] + 9, ["new"], LABELS[:1])
    with pytest.raises(InvalidData, match="times"):
        built(clusters="auto", times=[0.0])


def test_capture_times_make_moments():
    seconds = np.where(MOMENTS < 80, 1000.0 * MOMENTS, np.nan)
    retriever = built(clusters="auto", times=seconds)
    units = retriever.searcher.gallery.units
    known = MOMENTS < 80
    for moment in range(80):
        assert len(set(units[moment == MOMENTS].tolist())) == 1
    assert len(set(units[known].tolist())) >= 70  # few others look like near-copies


def test_moments_are_found_however_many_items_are_in_pairs():
    rng = np.random.default_rng(1)
    for share in (0.3, 1.0):
        labels = rng.integers(30, size=600)
        scenes = rng.standard_normal((30, 16))[labels] + rng.standard_normal((600, 16))
        moments = np.r_[np.arange(600), np.flatnonzero(rng.random(600) < share)]
        vectors = scenes[moments] + 0.02 * rng.standard_normal((len(moments), 16))
        own = built(vectors, labels[moments], "auto")
        units = own.searcher.gallery.units
        assert (units[600:] == units[moments[600:]]).all()
        assert len(np.unique(units)) >= 570


@pytest.mark.filterwarnings("ignore:.*nearer than all others")  # encounters that are not found
def test_queries_whose_items_were_removed_calibrate_no_more():
    """They would find the other photographs of their cluster."""
    for clusters in ("auto", NAMES):
        retriever = built(clusters=clusters)
        retriever.calibrate(VECTORS, LABELS, "constant")
        removed = np.flatnonzero(np.isin(MOMENTS, np.flatnonzero(SIZES > 1)))[::2]
        retriever.remove([str(row) for row in removed])
        retriever.recalibrate()
        for queries in (
            retriever.calibration.calibration_queries,
            retriever.calibration.tuning_queries,
        ):
            assert len(queries)
            assert (retriever.searcher.gallery.units_of(queries.digests) >= 0).all()


def test_recurring_queries_of_one_cluster_count_once():
    retriever = built()
    report = retriever.calibrate(VECTORS, LABELS, "constant", recurring=True)
    assert report.n_calibration + report.n_tuning == 160


def test_a_guarantee_covers_items_of_the_gallery_or_other_queries():
    outside = VECTORS + 0.3
    other = built()
    other.calibrate(outside, LABELS, "constant")
    assert other.guarantee(0.4, 0.1).left_out is None
    mixed = np.concatenate([VECTORS[:200], outside[200:]])
    with pytest.raises(InvalidData, match="items of the gallery"):
        built().calibrate(mixed, LABELS, "constant")
    retriever = built()
    retriever.calibrate(VECTORS, LABELS, "constant")
    further = retriever.search_labelled(retriever.labelled(outside[:9], LABELS[:9]))
    with pytest.raises(InvalidData, match="calibrate anew"):
        retriever.extend_calibration(further)


def test_an_item_that_takes_a_removed_id_is_of_its_own_cluster():
    vectors = np.concatenate([VECTORS, VECTORS[:30] + 1e-3])
    retriever = built(vectors, np.concatenate([LABELS, LABELS[:30]]), "auto")
    retriever.remove(["0"])
    retriever.add(50 + VECTORS[:1], ["0"], LABELS[:1])
    units = retriever.searcher.gallery.units
    assert np.count_nonzero(units == units[-1]) == 1


def test_labels_divide_queries_only_if_clusters_lie_within_labels():
    retriever = built()
    retriever.calibrate(VECTORS, LABELS, "constant", tuning="labels")
    tuned, calibrated = (
        set(part.population.known_labels.tolist())
        for part in (
            retriever.calibration.tuning_queries,
            retriever.calibration.calibration_queries,
        )
    )
    assert not tuned & calibrated
    across = built(clusters=np.arange(len(VECTORS)) // 2)
    with pytest.raises(InvalidData, match="several labels"):
        across.calibrate(VECTORS, LABELS, "constant", tuning="labels")
