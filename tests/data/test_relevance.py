import itertools
import time
import tracemalloc

import numpy as np
import pytest

from rcir.data import overlap
from rcir.data.relevance import SameLabel, SharedLabel, relevance_of
from rcir.data.within_radius import WithinRadius
from rcir.errors import InvalidData

N_QUERIES, N_GALLERY = 23, 41


class Same:
    """One label each."""

    def draw(self, rng, n):
        return rng.integers(0, 12, n).tolist()

    def make(self, facts):
        return SameLabel(np.array(facts, np.int64))

    def match(self, one, other):
        return one == other


class Shared:
    """Up to four of nine labels each; some none at all, some the same ones."""

    def draw(self, rng, n):
        lists = [rng.choice(9, rng.integers(0, 5), replace=False).tolist() for _ in range(n)]
        lists[0], lists[3], lists[-1] = [], [8, 2], [2, 8]
        return lists

    def make(self, facts):
        return SharedLabel.of_lists(facts, 9)

    def match(self, one, other):
        return bool(set(one) & set(other))


class Within:
    """Places on a grid of whole metres, where 25 m is met exactly: 7-24-25, 15-20-25 and others."""

    def __init__(self, dim):
        self.dim = dim

    def draw(self, rng, n):
        places = rng.integers(0, 50, (n, self.dim))
        corner = [[0, 0], [7, 24], [15, 20], [25, 0], [25, 1]]
        places[:5] = 0
        places[:5, :2] = np.array(corner)[:, : self.dim]
        return places.tolist()

    def make(self, facts):
        return WithinRadius(np.array(facts, np.float64).reshape(-1, self.dim), 25.0)

    def match(self, one, other):
        return sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) <= 25**2


KINDS = {
    "same label": Same(),
    "shared label": Shared(),
    **{f"radius in {d} dimensions": Within(d) for d in (1, 2, 3, 5)},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=range(3))
def facts(kind, request):
    """What the queries and the gallery show, as plain lists."""
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


def test_candidates_match_as_a_loop_says(kind, facts):
    queries, gallery = facts
    positions = np.random.default_rng(7).integers(-1, N_GALLERY, (N_QUERIES, 30))
    # The last image is what -1 would mean to NumPy.
    gallery[-1], positions[3, 4] = queries[3], -1
    assert kind.match(queries[3], gallery[-1])
    found = kind.make(queries).of(kind.make(gallery), positions)
    expected = [
        [p >= 0 and kind.match(one, gallery[p]) for p in row]
        for one, row in zip(queries, positions.tolist(), strict=True)
    ]
    assert found.dtype == bool
    assert found.tolist() == expected
    assert 0 < found.sum() < found.size


def test_no_candidate_at_all_and_no_column(kind, facts):
    queries, gallery = map(kind.make, facts)
    assert not queries.of(gallery, np.full((N_QUERIES, 4), -1)).any()
    assert queries.of(gallery, np.empty((N_QUERIES, 0), np.int64)).shape == (N_QUERIES, 0)


def test_totals_are_those_of_a_loop(kind, facts):
    queries, gallery = facts
    totals = kind.make(queries).totals(kind.make(gallery))
    assert totals.dtype == np.int64
    assert totals.tolist() == naive(kind, queries, gallery).sum(1).tolist()


def test_an_empty_gallery_has_no_match(kind, facts):
    queries = kind.make(facts[0])
    assert queries.totals(queries.subset(np.arange(0))).tolist() == [0] * N_QUERIES


def test_matches_within_a_set_are_those_of_a_loop(kind, facts):
    rows = np.array([5, 0, 5, N_GALLERY - 1])
    gallery = facts[1]
    images = kind.make(gallery)
    expected = naive(kind, [gallery[row] for row in rows], gallery)
    np.testing.assert_array_equal(dense(images, rows), expected)
    np.testing.assert_array_equal(dense(images, rows[::-1]), expected[::-1])
    assert dense(images, rows[:0]).shape == (0, N_GALLERY)


def test_a_subset_is_what_some_images_show_in_that_order(kind, facts):
    queries, gallery = facts
    rows = np.array([9, 0, 9, 2])
    some = kind.make(queries).subset(rows)
    assert len(some) == 4
    expected = naive(kind, [queries[row] for row in rows], gallery)
    every = np.broadcast_to(np.arange(N_GALLERY), (4, N_GALLERY))
    np.testing.assert_array_equal(some.of(kind.make(gallery), every), expected)
    assert len(kind.make(queries).subset(np.arange(0))) == 0


def test_joined_are_these_then_the_others(kind, facts):
    queries, gallery = facts
    before = kind.make(gallery)
    both = before.joined(kind.make(queries))
    assert (len(both), len(before)) == (N_GALLERY + N_QUERIES, N_GALLERY)
    expected = naive(kind, queries, gallery + queries)
    every = np.broadcast_to(np.arange(len(both)), expected.shape)
    np.testing.assert_array_equal(kind.make(queries).of(both, every), expected)
    assert kind.make(queries).totals(both).tolist() == expected.sum(1).tolist()


def test_nothing_matches_in_an_empty_gallery(kind, facts):
    queries = kind.make(facts[0])
    found = queries.of(queries.subset(np.arange(0)), np.full((N_QUERIES, 3), -1))
    assert found.dtype == bool
    assert found.tolist() == [[False] * 3] * N_QUERIES


@pytest.mark.parametrize("other", KINDS, ids=str)
def test_another_kind_cannot_be_joined(kind, facts, other):
    one = kind.make(facts[0])
    rng = np.random.default_rng(0)
    others = KINDS[other].make(KINDS[other].draw(rng, 6))
    if type(one) is type(others):
        return
    said = f"match as {type(one).__name__} cannot be joined .* as {type(others).__name__}"
    with pytest.raises(InvalidData, match=said):
        one.joined(others)


def test_arrays_make_it_again(kind, facts):
    queries, gallery = facts
    arrays = kind.make(gallery).arrays()
    assert all(isinstance(values, np.ndarray) for values in arrays.values())
    again = relevance_of({name: values.copy() for name, values in arrays.items()})
    assert type(again) is type(kind.make(gallery))
    assert len(again) == N_GALLERY
    expected = naive(kind, gallery, gallery)
    np.testing.assert_array_equal(dense(again, np.arange(N_GALLERY)), expected)
    own = kind.make(queries).totals(again)
    assert own.tolist() == naive(kind, queries, gallery).sum(1).tolist()


def test_other_arrays_are_refused():
    with pytest.raises(KeyError):
        relevance_of({"colours": np.zeros(3)})


def test_the_labels_of_a_gallery_cannot_be_changed():
    joined = SameLabel(np.array([1, 2])).joined(SameLabel(np.array([3])))
    for labels in (joined.labels, relevance_of({"labels": np.array([1, 2])}).labels):
        with pytest.raises(ValueError, match="read-only"):
            labels[0] = 9


def test_a_label_named_twice_counts_once():
    queries, gallery = SharedLabel.of_lists([[0, 1], [1]], 2), SharedLabel.of_lists([[1, 1, 0]], 2)
    assert queries.totals(gallery).tolist() == [1, 1]
    assert gallery.totals(queries).tolist() == [2]
    assert queries.of(gallery, np.array([[0], [0]])).tolist() == [[True], [True]]


def test_images_without_labels_match_nothing_not_even_themselves():
    none = SharedLabel.of_lists([[], [], []], 4)
    assert len(none) == 3
    assert none.totals(none).tolist() == [0, 0, 0]
    assert not dense(none, np.arange(3)).any()
    assert len(SharedLabel.of_lists([], 4)) == 0


def test_more_labels_than_a_byte_holds():
    lists = [[n, (n * 7) % 40] for n in range(40)]
    images = SharedLabel.of_lists(lists, 40)
    expected = [sum(bool(set(a) & set(b)) for b in lists) for a in lists]
    assert images.totals(images).tolist() == expected


def test_the_three_ways_to_ask_agree_on_the_radius():
    """Decimal places, where a distance of 25 m is met only up to rounding."""
    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 2 * np.pi, 4000)
    centre = np.array([[585_000.3, 4_477_000.7]])
    ring = centre + 25 * np.stack([np.cos(angle), np.sin(angle)], 1)
    ring = np.concatenate([ring, np.round(centre + rng.uniform(-30, 30, (4000, 2)), 1)])
    query, gallery = WithinRadius(centre, 25.0), WithinRadius(ring, 25.0)
    found = query.of(gallery, np.arange(len(ring))[None])[0]
    assert 0.3 < found[:4000].mean() < 0.7  # rounded either way
    assert query.totals(gallery).tolist() == [found.sum()]
    pairs = dense(query.joined(gallery), np.array([0]))[0, 1:]
    np.testing.assert_array_equal(pairs, found)


@pytest.mark.parametrize(
    ("places", "radius"),
    [
        (np.zeros(3), 1.0),
        (np.zeros((3, 2, 1)), 1.0),
        (np.array([[0.0, np.nan]]), 1.0),
        (np.array([[0.0, np.inf]]), 1.0),
        (np.zeros((3, 2)), 0.0),
        (np.zeros((3, 2)), -1.0),
        (np.zeros((3, 2)), np.nan),
    ],
)
def test_places_that_are_none_are_refused(places, radius):
    with pytest.raises(InvalidData, match="finite coordinates and a radius above 0"):
        WithinRadius(places, radius)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            WithinRadius(np.zeros((1, 2)), 1.0),
            WithinRadius(np.zeros((1, 2)), 2.0),
            "2 coordinates and radius 1.0 .* 2 and 2.0",
        ),
        (
            WithinRadius(np.zeros((1, 2)), 1.0),
            WithinRadius(np.zeros((1, 3)), 1.0),
            "2 coordinates and radius 1.0 .* 3 and 1.0",
        ),
        (
            SharedLabel.of_lists([[0]], 2),
            SharedLabel.of_lists([[0]], 3),
            "2 labels cannot be joined .* 3",
        ),
    ],
    ids=["radius", "coordinates", "labels"],
)
def test_what_cannot_be_compared_cannot_be_joined(one, other, said):
    with pytest.raises(InvalidData, match=said):
        one.joined(other)


def tagged(rng, n, n_labels, each, skew=0.0):
    """Images of about so many labels each; with skew, a few labels are those of most images."""
    share = 1.0 / np.arange(1, n_labels + 1) ** skew
    drawn = rng.choice(n_labels, (n, each), p=share / share.sum())
    drawn[0] = drawn[0, 0]
    return SharedLabel.of_lists([[], *drawn[1:].tolist()], n_labels)


@pytest.mark.parametrize("skew", [0.0, 1.2])
@pytest.mark.parametrize("block", [2**8, 2**12, 2**22])
@pytest.mark.parametrize("count", ["_count_pairs", "_count_bits", "count_overlaps"])
def test_labels_in_common_are_counted_as_a_dense_product_counts_them(
    count, block, skew, monkeypatch
):
    monkeypatch.setattr(overlap, "BLOCK", block)
    rng = np.random.default_rng(5)
    queries, gallery = (tagged(rng, n, 70, 4, skew) for n in (211, 333))
    expected = (queries.labels.toarray().astype(int) @ gallery.labels.toarray().T) > 0
    found = getattr(overlap, count)(queries.labels, gallery.labels)
    np.testing.assert_array_equal(found, expected.sum(1))
    pairs = dense(gallery.joined(queries), np.arange(333, 333 + 211))
    np.testing.assert_array_equal(pairs[:, :333], expected)


def test_rows_of_the_same_labels_are_one_combination():
    lists = [[], [3], [3, 5], [5, 3], [3], [0, 3, 5], [], [5]]
    first, which = overlap.combinations(SharedLabel.of_lists(lists, 6).labels)
    assert first[which].tolist() == [0, 1, 2, 2, 1, 5, 0, 7]


@pytest.mark.parametrize(("n_labels", "skew"), [(1000, 0.0), (80, 1.0), (5000, 1.0)])
def test_many_images_of_many_labels_take_little_memory_and_time(n_labels, skew):
    """A matrix of the images with themselves would hold 900 million entries."""
    rng = np.random.default_rng(1)
    images = tagged(rng, 30_000, n_labels, 5, skew)
    start = time.process_time()
    totals = images.totals(images)
    assert time.process_time() - start < 5
    rows = rng.choice(len(images), 20, replace=False)
    pairs = dense(images, rows)
    tracemalloc.start()
    images.subset(np.arange(5000)).totals(images)
    images.pairs(rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 120 * 2**20
    labels = images.labels.toarray()
    for row, matches in zip(rows, pairs, strict=True):
        expected = (labels & labels[row]).any(1)
        np.testing.assert_array_equal(matches, expected)
        assert totals[row] == expected.sum()


def large(kind, rng, n):
    if kind == "same":
        return SameLabel(rng.integers(0, 5000, n))
    if kind == "shared":
        return SharedLabel.of_lists(rng.integers(0, 14, (n, 2)).tolist(), 14)
    return WithinRadius(rng.uniform(0, 20_000, (n, 2)), 25.0)


@pytest.mark.parametrize("kind", ["same", "shared", "within"])
def test_totals_of_a_large_gallery_take_little_memory_and_time(kind):
    rng = np.random.default_rng(0)
    n, n_gallery = 1000, 200_000
    queries, gallery = large(kind, rng, n), large(kind, rng, n_gallery)
    start = time.process_time()
    totals = queries.totals(gallery)
    assert time.process_time() - start < 5
    tracemalloc.start()
    queries.totals(gallery)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * n_gallery / 8  # an eighth of a matrix of booleans
    for row in rng.choice(n, 20, replace=False):
        if kind == "same":
            expected = (gallery.labels == queries.labels[row]).sum()
        elif kind == "shared":
            own = queries.labels.toarray()[row]
            expected = (gallery.labels.toarray() & own).any(1).sum()
        else:
            steps = gallery.places - queries.places[row]
            expected = (np.hypot(*steps.T) <= 25).sum()
        assert totals[row] == expected
    assert totals.sum() > 0
