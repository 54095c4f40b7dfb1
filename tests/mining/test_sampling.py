"""Samples of large sets, batches of labels and batches of matching pairs."""

import itertools
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from rcir.data.relevance import SameLabel, SharedLabel, WithinRadius
from rcir.errors import InvalidConfig, InvalidData
from rcir.mining import genuine_batches, label_batches, sample_images

N = 100_000


def rng(seed=0):
    return np.random.default_rng(seed)


def large(kind):
    """Images of which few, many or very many match each other; some match none."""
    draw = rng(1)
    if kind == "few of a label":
        return SameLabel(draw.integers(0, N // 3, N))
    if kind == "500 labels":
        return SameLabel(draw.integers(0, 500, N))
    if kind == "ten labels":
        return SameLabel(draw.integers(0, 10, N))
    if kind == "14 findings":
        lists = draw.integers(0, 14, (N // 4, 2)).tolist()
        return SharedLabel.from_lists([tags[: row % 3] for row, tags in enumerate(lists)], 14)
    if kind == "many tags":
        return SharedLabel.from_lists(draw.integers(0, 5000, (N // 4, 3)).tolist(), 5000)
    return WithinRadius(draw.uniform(0, 15_000, (N, 2)), 25.0)


@pytest.mark.parametrize(
    "kind", ["few of a label", "500 labels", "ten labels", "14 findings", "many tags", "places"]
)
def test_a_sample_of_a_large_set_matches_within_itself(kind):
    """A table of all pairs would not fit into memory."""
    relevance, size = large(kind), 12_000 if kind in ("500 labels", "ten labels") else 1250
    rows = sample_images(relevance, size, rng())
    assert rows.dtype == np.int64
    assert len(rows) == size
    assert (np.diff(rows) > 0).all()
    assert 0 <= rows[0] < rows[-1] < len(relevance)
    sample = relevance.subset(rows)
    assert np.count_nonzero(sample.totals(sample) < 2) <= 1
    # As many from each half of the set, with a standard deviation of at most the root of size / 2.
    assert abs(np.count_nonzero(rows < len(relevance) // 2) - size / 2) < 5 * (size / 2) ** 0.5


@pytest.mark.parametrize("each", [4, 10])  # few matches are listed, many are found by trial
def test_every_anchor_and_each_of_its_matches_is_as_likely(each):
    relevance = SameLabel(np.append(np.arange(20) // each, 99))
    draw = rng()
    pairs = Counter(tuple(sample_images(relevance, 2, draw).tolist()) for _ in range(3000))
    possible = [
        pair for pair in itertools.combinations(range(20), 2) if pair[0] // each == pair[1] // each
    ]
    assert set(pairs) <= set(possible)
    expected = 3000 / len(possible)
    drawn = np.array([pairs[pair] for pair in possible])
    assert np.abs(drawn - expected).max() < 5 * expected**0.5


@pytest.mark.parametrize("size", [1, 6, 7, 500])
def test_odd_sizes_and_sizes_larger_than_the_number_of_images_with_a_match(size):
    # The last two match nothing, the three before have no label at all.
    relevance = SharedLabel.from_lists([*([n // 3] for n in range(12)), [], [], [], [7], [8]], 9)
    for seed in range(20):
        rows = sample_images(relevance, size, rng(seed))
        assert len(rows) == min(size, 12)
        assert set(rows.tolist()) <= set(range(12))
        groups = np.bincount(rows // 3)
        assert np.count_nonzero(groups == 1) <= 1


def test_a_sample_is_decided_by_the_generator():
    relevance = SameLabel(rng(5).integers(0, 300, 1000))
    first, again, other = (sample_images(relevance, 100, rng(seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_of_a_separate_database_has_queries_with_positives(seed):
    draw = rng(5)
    places, database = draw.uniform(0, 90, (160, 2)), draw.random(160) < 0.6
    relevance = WithinRadius(places, 25.0, 10.0, database)
    rows = sample_images(relevance, 60, rng(seed))
    assert len(rows) == len(set(rows)) == 60
    queries, items = places[rows[~database[rows]]], places[rows[database[rows]]]
    apart = np.hypot(*(queries[:, None] - items).transpose(2, 0, 1))
    assert len(queries) >= 15
    assert np.sum(apart.min(axis=1) > 10) <= 1
    every = sample_images(relevance, 160, rng(seed))
    apart = np.hypot(*(places[:, None] - places[database]).transpose(2, 0, 1))
    expected = np.flatnonzero(~database & (apart.min(axis=1) <= 10))
    assert every[~database[every]].tolist() == expected.tolist()


def test_images_that_match_nothing_give_no_sample():
    assert sample_images(SameLabel(np.arange(10)), 4, rng()).tolist() == []
    assert sample_images(SameLabel(np.empty(0, np.int64)), 4, rng()).tolist() == []


LABELS = np.concatenate([np.full(n, label) for label, n in enumerate([1, 2, 3, 4, 5, 8, 9, 30])])


@pytest.mark.parametrize(
    ("batch", "samples_per_class"), [(8, 4), (12, 4), (16, 2), (6, 3), (12, 6), (4, 1)]
)
def test_batches_contain_a_few_images_of_each_of_several_labels(batch, samples_per_class):
    shuffled = rng(9).permutation(LABELS)
    rows = label_batches(shuffled, batch, samples_per_class, rng())
    assert rows.dtype == np.int64
    assert rows.shape[1] == batch
    assert len(rows) > 0
    groups = shuffled[rows].reshape(len(rows), -1, samples_per_class)
    assert (groups == groups[:, :, :1]).all()
    used = Counter()
    for names, step in zip(groups[:, :, 0].tolist(), rows, strict=True):
        assert len(set(names)) == len(names) == batch // samples_per_class
        stack_members = step.reshape(-1, samples_per_class).tolist()
        for label, members in zip(names, stack_members, strict=True):
            count = np.count_nonzero(shuffled == label)
            times = Counter(members)
            if count >= samples_per_class:
                assert set(times.values()) == {1}
            else:
                assert len(times) == count
                assert max(times.values()) - min(times.values()) <= 1
            used.update(times.keys())
    assert max(used.values()) == 1
    # Too few labels have images left for one more batch.
    left = {
        label: max(1, np.count_nonzero(label == LABELS) // samples_per_class)
        - np.count_nonzero(groups[:, :, 0] == label)
        for label in range(8)
    }
    assert min(left.values()) >= 0
    assert np.count_nonzero(list(left.values())) < batch // samples_per_class


def test_equal_labels_leave_hardly_an_image_over():
    rows = label_batches(np.arange(1000) % 10, 32, 4, rng())
    assert len(rows) >= 29  # of 31
    others = label_batches(np.arange(1000) % 10, 32, 4, rng(1))
    assert not np.array_equal(rows[0], others[0])
    np.testing.assert_array_equal(rows, label_batches(np.arange(1000) % 10, 32, 4, rng()))


def test_images_of_a_label_take_turns_over_the_epochs():
    draw, seen = rng(), Counter()
    for _ in range(300):
        seen.update(label_batches(np.array([0] * 7 + [1, 1, 1]), 6, 3, draw).reshape(-1).tolist())
    # Each of the seven is one of three: 300 * 3 / 7 times, with a standard deviation of 8.6.
    assert seen[7] == seen[8] == seen[9] == 300
    assert max(abs(seen[row] - 900 / 7) for row in range(7)) < 43


@pytest.mark.parametrize(("batch", "samples_per_class"), [(10, 4), (4, 4), (0, 4), (8, 0)])
def test_batches_that_are_not_a_multiple_are_refused(batch, samples_per_class):
    with pytest.raises(InvalidConfig, match="samples_per_class"):
        label_batches(LABELS, batch, samples_per_class, rng())


def test_fewer_labels_than_a_batch_needs_are_refused():
    assert label_batches(LABELS, 32, 4, rng()).shape == (1, 32)  # just enough
    with pytest.raises(InvalidData, match="8 labels"):
        label_batches(LABELS, 36, 4, rng())


def test_genuine_pairs_of_a_batch_match_and_are_of_two_images():
    labels = np.repeat(np.arange(6), (1, 2, 3, 4, 5, 6))
    for rows, (first, second) in islice(genuine_batches(SameLabel(labels), 64, 4, rng()), 20):
        assert (labels[rows[first]] == labels[rows[second]]).all()
        assert (rows[first] != rows[second]).all()
        assert 0 not in rows  # it has no match
        assert len(rows) == 20  # four of each of five labels


@pytest.mark.parametrize("lists", [[[0], [0, 1], [1], [2]], [[0], [0], [0], [2]]])
def test_where_labels_make_no_batches_matching_pairs_do(lists):
    relevance = SharedLabel.from_lists(lists, 3)
    if max(map(len, lists)) == 1:
        relevance = SameLabel(np.array([0, 0, 0, 2]))
    seen = set()
    for rows, (first, second) in islice(genuine_batches(relevance, 8, 4, rng()), 20):
        chosen = relevance.subset(rows[first])
        assert chosen.matches(relevance, rows[second][:, None]).all()
        assert (rows[first] != rows[second]).all()
        seen |= set(rows.tolist())
    assert seen == {0, 1, 2}


def test_images_without_any_match_make_no_genuine_pairs():
    with pytest.raises(InvalidData, match="matches"):
        next(genuine_batches(SameLabel(np.arange(9)), 8, 4, rng()))
