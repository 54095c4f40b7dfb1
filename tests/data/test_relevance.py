"""When images match: by label, by shared labels, or within a radius; and sets of images."""

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from rcir.data import ImageSet
from rcir.data.labelling import gallery_relevance, reported_relevance
from rcir.data.relevance import (
    Relevance,
    SameLabel,
    SharedLabel,
    StoredLabels,
    WithinRadius,
    count_matches,
    same_relevance,
)
from rcir.errors import InvalidData
from rcir.store.codec import decode, encode

N_QUERIES, N_GALLERY = 23, 41


class Kind:
    """A kind of relevance: `draw` labels or places of n images, `make` it, `match` two images."""

    def __init__(self, draw, make, match):
        self.draw, self.make, self.match = draw, make, match


def draw_lists(rng, n):
    """Up to four of nine labels each; some none at all, some the same ones."""
    lists = [rng.choice(9, rng.integers(0, 5), replace=False).tolist() for _ in range(n)]
    lists[0], lists[3], lists[-1] = [], [8, 2], [2, 8]
    return lists


def within(dim):
    """Places on a grid of whole metres, where 25 m is met exactly: 7-24-25, 15-20-25 and others."""

    def draw(rng, n):
        places = rng.integers(0, 50, (n, dim))
        places[:5] = 0
        places[:5, :2] = np.array([[0, 0], [7, 24], [15, 20], [25, 0], [25, 1]])[:, :dim]
        return places.tolist()

    return Kind(
        draw,
        lambda places: WithinRadius(np.array(places, np.float64).reshape(-1, dim), 25.0),
        lambda one, other: sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) <= 25**2,
    )


SAME = Kind(
    lambda rng, n: rng.integers(0, 12, n).tolist(),
    lambda labels: SameLabel(np.array(labels, np.int64)),
    lambda one, other: one == other,
)
SHARED = Kind(
    draw_lists,
    lambda lists: SharedLabel.from_lists(lists, 9),
    lambda one, other: bool(set(one) & set(other)),
)
KINDS = {"same label": SAME, "shared label": SHARED}
KINDS |= {f"radius in {dim} dimensions": within(dim) for dim in (1, 2, 3, 5)}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=range(2))
def facts(kind, request):
    """The labels or places of the queries and of the gallery, as plain lists."""
    rng = np.random.default_rng(request.param)
    return kind.draw(rng, N_QUERIES), kind.draw(rng, N_GALLERY)


def dense(relevance, rows):
    """(m, n) the pairs of some rows as a table; each once, and ascending."""
    indptr, columns = relevance.pairs(rows)
    assert indptr.dtype == columns.dtype == np.int64
    assert indptr[0] == 0
    assert indptr[-1] == len(columns)
    table = np.zeros((len(rows), len(relevance)), bool)
    for row, (start, stop) in zip(table, itertools.pairwise(indptr), strict=True):
        assert (np.diff(columns[start:stop]) > 0).all()
        row[columns[start:stop]] = True
    return table


def naive(kind, queries, gallery):
    return np.array([[kind.match(one, other) for other in gallery] for one in queries], bool)


def all_positions(relevance, n):
    """(n, size) the positions of all images, for n queries."""
    return np.broadcast_to(np.arange(len(relevance)), (n, len(relevance)))


def test_candidates_match_as_in_a_loop(kind, facts):
    queries, gallery = facts
    positions = np.random.default_rng(7).integers(-1, N_GALLERY, (N_QUERIES, 30))
    # NumPy would read position -1 as the last image, which matches here.
    gallery[-1], positions[3, 4] = queries[3], -1
    assert kind.match(queries[3], gallery[-1])
    relevant = kind.make(queries).matches(kind.make(gallery), positions)
    expected = [
        [p >= 0 and kind.match(one, gallery[p]) for p in row]
        for one, row in zip(queries, positions.tolist(), strict=True)
    ]
    assert relevant.dtype == bool
    assert relevant.tolist() == expected
    assert 0 < relevant.sum() < relevant.size


def test_totals_and_pairs_are_those_of_a_loop(kind, facts):
    queries, gallery = facts
    images = kind.make(gallery)
    totals = kind.make(queries).totals(images)
    assert totals.dtype == np.int64
    assert totals.tolist() == naive(kind, queries, gallery).sum(1).tolist()
    rows = np.array([5, 0, 5, N_GALLERY - 1])
    expected = naive(kind, [gallery[row] for row in rows], gallery)
    np.testing.assert_array_equal(dense(images, rows), expected)
    assert dense(images, rows[:0]).shape == (0, N_GALLERY)


def test_without_candidates_or_gallery_nothing_matches(kind, facts):
    queries, gallery = map(kind.make, facts)
    assert queries.matches(gallery, np.empty((N_QUERIES, 0), np.int64)).shape == (N_QUERIES, 0)
    nothing = queries.subset(np.arange(0))
    assert len(nothing) == 0
    assert queries.totals(nothing).tolist() == [0] * N_QUERIES
    for others in (gallery, nothing):
        relevant = queries.matches(others, np.full((N_QUERIES, 3), -1))
        assert relevant.dtype == bool
        assert relevant.tolist() == [[False] * 3] * N_QUERIES


def test_subsets_and_unions_keep_their_matches(kind, facts):
    queries, gallery = facts
    rows = np.array([9, 0, 9, 2])
    subset, images = kind.make(queries).subset(rows), kind.make(gallery)
    expected = naive(kind, [queries[row] for row in rows], gallery)
    np.testing.assert_array_equal(subset.matches(images, all_positions(images, 4)), expected)
    both = images.joined(kind.make(queries))
    assert (len(both), len(images)) == (N_GALLERY + N_QUERIES, N_GALLERY)
    expected = naive(kind, queries, gallery + queries)
    relevant = kind.make(queries).matches(both, all_positions(both, N_QUERIES))
    np.testing.assert_array_equal(relevant, expected)
    assert kind.make(queries).totals(both).tolist() == expected.sum(1).tolist()


def test_a_relevance_is_read_as_it_was_written(kind, facts):
    queries, gallery = facts
    restored = decode(Relevance, *encode(kind.make(gallery), Relevance))
    assert type(restored) is type(kind.make(gallery))
    assert same_relevance(restored, kind.make(gallery))
    assert not same_relevance(restored, kind.make(gallery[::-1]))
    expected = naive(kind, gallery, gallery)
    np.testing.assert_array_equal(dense(restored, np.arange(N_GALLERY)), expected)
    totals = kind.make(queries).totals(restored)
    assert totals.tolist() == naive(kind, queries, gallery).sum(1).tolist()


@pytest.mark.parametrize(
    "change",
    [
        *({"indices": np.array(indices)} for indices in ([0, 2], [-1, 0], [0])),
        *({"indptr": np.array(indptr)} for indptr in ([0, 2, 1], [0, 3, 2], [0, 2])),
        *({"shape": shape} for shape in ((2, 0), (-2, 2))),
    ],
)
def test_an_invalid_table_of_labels_is_refused(change):
    valid = StoredLabels.from_table(SharedLabel.from_lists([[0], [1]], 2).labels)
    with pytest.raises(InvalidData, match="table of labels"):
        replace(valid, **change).table()


def test_incompatible_relevances_cannot_be_joined():
    label, shared = SameLabel(np.zeros(1, int)), SharedLabel.from_lists([[0]], 2)
    place, more_labels = WithinRadius(np.zeros((1, 2)), 1.0), SharedLabel.from_lists([[0]], 3)
    wider, higher = replace(place, radius=2.0), WithinRadius(np.zeros((1, 3)), 1.0)
    for first, second in (
        *((label, shared), (shared, place), (place, wider), (place, higher), (shared, more_labels)),
    ):
        with pytest.raises(InvalidData, match="cannot be joined"):
            first.joined(second)


def test_labels_of_a_gallery_are_read_only():
    joined = SameLabel(np.array([1, 2])).joined(SameLabel(np.array([3])))
    with pytest.raises(ValueError, match="read-only"):
        joined.labels[0] = 9


def test_a_label_named_twice_counts_once_and_images_without_labels_match_nothing():
    queries = SharedLabel.from_lists([[0, 1], [1]], 2)
    gallery = SharedLabel.from_lists([[1, 1, 0]], 2)
    assert queries.totals(gallery).tolist() == [1, 1]
    assert gallery.totals(queries).tolist() == [2]
    assert queries.matches(gallery, np.array([[0], [0]])).tolist() == [[True], [True]]
    empty = SharedLabel.from_lists([[], [], []], 4)
    assert empty.totals(empty).tolist() == [0, 0, 0]
    assert not dense(empty, np.arange(3)).any()


def test_candidates_totals_and_pairs_agree_on_the_radius():
    """Decimal places, where a distance of 25 m is met only up to rounding."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 2 * np.pi, 4000)
    centre = np.array([[585_000.3, 4_477_000.7]])
    ring = centre + 25 * np.stack([np.cos(angle), np.sin(angle)], 1)
    ring = np.concatenate([ring, np.round(centre + rng.uniform(-30, 30, (4000, 2)), 1)])
    query, gallery = WithinRadius(centre, 25.0), WithinRadius(ring, 25.0)
    relevant = query.matches(gallery, np.arange(len(ring))[None])[0]
    assert 0.3 < relevant[:4000].mean() < 0.7  # rounded either way
    assert query.totals(gallery).tolist() == [relevant.sum()]
    pairs = dense(query.joined(gallery), np.array([0]))[0, 1:]
    np.testing.assert_array_equal(pairs, relevant)


@pytest.mark.parametrize(
    "form", [list, pd.DataFrame, torch.tensor], ids=["list", "frame", "tensor"]
)
def test_places_may_be_of_any_library(form):
    place = WithinRadius(form([[0.0, 1.0], [2.0, 3.0]]), np.int64(10))
    assert (place.places.tolist(), type(place.radius)) == ([[0.0, 1.0], [2.0, 3.0]], float)


@pytest.mark.parametrize(
    ("places", "radius"),
    [
        *((np.zeros((2, 2)), radius) for radius in (0.0, np.nan, np.inf, "10", None, True)),
        *((np.zeros((2, 2)), np.array(radius)) for radius in ([10.0], [1.0, 2.0])),
        *(
            (places, 1.0)
            for places in (np.zeros(3), None, "home", [["a", "b"]], [[1.0], [1.0, 2.0]])
        ),
        (np.array([[np.inf, 0.0]]), 1.0),
    ],
    ids=repr,
)
def test_other_places_and_radii_are_refused(places, radius):
    with pytest.raises(InvalidData, match="finite coordinates and a radius"):
        WithinRadius(places, radius)


def random_labels(rng, n, n_labels, each, skew=0.0):
    """Images of several labels each; with skew, most images have one of a few labels."""
    share = 1.0 / np.arange(1, n_labels + 1) ** skew
    drawn = rng.choice(n_labels, (n, each), p=share / share.sum())
    drawn[0] = drawn[0, 0]
    return SharedLabel.from_lists([[], *drawn[1:].tolist()], n_labels)


@pytest.mark.parametrize(("n_labels", "skew"), [(70, 1.2), (600, 0.0)])  # as bits, and as pairs
@pytest.mark.parametrize("block", [2**8, 2**22])
def test_labels_in_common_are_counted_as_in_a_dense_product(block, n_labels, skew, monkeypatch):
    monkeypatch.setattr("rcir.data.relevance.BLOCK_ENTRIES", block)
    rng = np.random.default_rng(5)
    queries, gallery = (random_labels(rng, n, n_labels, 4, skew) for n in (211, 333))
    expected = (queries.labels.toarray().astype(int) @ gallery.labels.toarray().T) > 0
    np.testing.assert_array_equal(queries.totals(gallery), expected.sum(1))
    pairs = dense(gallery.joined(queries), np.arange(333, 333 + 211))
    np.testing.assert_array_equal(pairs[:, :333], expected)


def large(kind, rng, n):
    if kind == "same":
        return SameLabel(rng.integers(0, 5000, n))
    if kind == "within":
        return WithinRadius(rng.uniform(0, 20_000, (n, 2)), 25.0)
    n_labels, skew = {"few": (14, 0.0), "many": (1000, 0.0), "skewed": (5000, 1.0)}[kind]
    return random_labels(rng, n, n_labels, 3, skew)


@pytest.mark.parametrize("kind", ["same", "within", "few", "many", "skewed"])
def test_totals_of_a_large_gallery_take_little_memory(kind):
    rng = np.random.default_rng(0)
    n, n_gallery = 2_500, 40_000
    queries, gallery = large(kind, rng, n), large(kind, rng, n_gallery)
    tracemalloc.start()
    totals = queries.totals(gallery)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * n_gallery / 2  # half of a matrix of booleans
    rows = rng.choice(n, 20, replace=False)
    expected = queries.subset(rows).matches(gallery, all_positions(gallery, 20)).sum(1)
    np.testing.assert_array_equal(totals[rows], expected)
    assert totals.sum() > 0


# Votes: the matches of each candidate among the first candidates

VOTE_LABELS = [sorted({i % 7, i % 5 + 7} if i % 4 else set()) for i in range(60)]
VOTE_PLACES = np.random.default_rng(1).integers(0, 30, (60, 2))
VOTE_DISTANCES = ((VOTE_PLACES[:, None] - VOTE_PLACES) ** 2).sum(axis=2).tolist()
GALLERIES = {
    "same": (SameLabel(np.arange(60) % 9), lambda i, j: i % 9 == j % 9),
    "shared": (
        SharedLabel.from_lists(VOTE_LABELS, 12),
        lambda i, j: bool({*VOTE_LABELS[i]} & {*VOTE_LABELS[j]}),
    ),
    "places": (
        WithinRadius(VOTE_PLACES.astype(float), 8.0),
        lambda i, j: VOTE_DISTANCES[i][j] <= 64,
    ),
}


@pytest.mark.parametrize("kind", GALLERIES)
@pytest.mark.parametrize("among", [1, 5, 30])
def test_votes_are_counted_as_in_a_loop(kind, among):
    rng = np.random.default_rng(2)
    positions = np.array([rng.permutation(60)[:12] for _ in range(1200)])  # in several blocks
    positions[::3, 7:], positions[1, 2:] = -1, -1
    gallery, match = GALLERIES[kind]
    expected = [
        [sum(match(i, j) for j in row[:among] if j >= 0) if i >= 0 else 0 for i in row]
        for row in positions.tolist()
    ]
    assert count_matches(gallery, positions, among).tolist() == expected
    assert count_matches(gallery, np.zeros((0, 4), int), 3).shape == (0, 4)


# Sets of images

LINE = WithinRadius(np.array([[0.0, 0], [10, 0], [20, 0], [30, 0], [40, 0]]), 12.0)


def images(n=5, as_list=False, n_ids=None, n_values=None, **more):
    pixels = np.arange(n, dtype=np.uint8)[:, None, None] + np.zeros((n, 2, 3), np.uint8)
    labels = more.pop("labels", np.arange(n) * 10)
    ids = [f"image-{i}" for i in range(n_ids or n)]
    attributes = {"occluded": np.arange(n_values or n) % 2 == 0}
    return ImageSet(list(pixels) if as_list else pixels, labels, ids, attributes, **more)


@pytest.mark.parametrize(("as_list", "cluster"), [(False, None), (True, "occluded")])
def test_a_subset_has_the_selected_rows_in_order(as_list, cluster):
    whole = images(as_list=as_list, cluster=cluster)
    part = whole.subset(np.array([3, 0]))
    assert [int(picture[0, 0]) for picture in part.images] == [3, 0]
    assert part.labels.tolist() == part.relevance.labels.tolist() == [30, 0]
    assert part.ids == ["image-3", "image-0"]
    assert part.attributes["occluded"].tolist() == [False, True]
    assert part.cluster == cluster
    assert isinstance(part.images, list if as_list else np.ndarray)
    assert [int(picture[0, 0]) for picture in whole.pick(np.array([4, 1, 4]))] == [4, 1, 4]


def test_an_explicit_relevance_takes_precedence_over_labels():
    assert isinstance(images().relevance, SameLabel)
    both = images(labels=np.zeros(5, np.int64), relevance=LINE)
    assert both.relevance is LINE
    assert both.labels.tolist() == [0] * 5


def test_images_without_labels_keep_their_relevance_in_a_subset():
    part = images(labels=None, relevance=LINE).subset(np.array([4, 0, 1]))
    assert part.labels is None
    matches = np.array([[1, 0, 0], [0, 1, 1], [0, 1, 1]], bool)
    np.testing.assert_array_equal(dense(part.relevance, np.arange(3)), matches)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"labels": None}, "neither"),
        ({"labels": np.zeros(4, int)}, "4 labels"),
        ({"n_ids": 6}, "6 ids"),
        ({"n_values": 4}, "4 occluded"),
        ({"cluster": "drawer"}, "drawer"),
        ({"n": 6, "relevance": LINE}, "5 relevance"),
        ({"n": 6, "relevance": LINE, "labels": None}, "5 relevance"),
    ],
)
def test_inconsistent_images_are_refused(changes, word):
    with pytest.raises(InvalidData, match=word):
        images(**changes)


@pytest.mark.parametrize(
    ("labels", "reported", "totals"),
    [
        ([4, 4, 7], [7, None, 4, 9], [1, 0, 2, 0]),
        (["fig", "fig", "pear"], [None, "plum", "fig"], [0, 0, 2]),
        ([["a", "b"], ["b"], []], [None, ["b"], "a"], [0, 2, 1]),
        (None, [["0", "2"], None, ["1"]], [2, 0, 1]),
        ([4, 4, 7], [None, None], [0, 0]),
    ],
)
def test_a_query_without_a_reported_label_matches_nothing(labels, reported, totals):
    gallery, names = gallery_relevance(labels, ["0", "1", "2"])
    relevance, _ = reported_relevance(reported, gallery, names)
    assert relevance.totals(gallery).tolist() == totals
    restored = decode(Relevance, *encode(relevance, Relevance))
    assert restored.totals(gallery).tolist() == totals


def test_places_cannot_be_reported():
    with pytest.raises(InvalidData, match="labels"):
        reported_relevance([None], WithinRadius(np.zeros((2, 2)), 25.0), {})
