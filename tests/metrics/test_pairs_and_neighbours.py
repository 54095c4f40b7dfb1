"""Pairs of images for verification, and votes of neighbours, against loops and scikit-learn."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from rcir.errors import InvalidData
from rcir.metrics import knn_correct, sample_pairs, verification_ap


def test_half_of_the_pairs_match_and_none_is_of_one_item():
    labels = np.random.default_rng(0).integers(0, 30, 500)
    pairs = sample_pairs(labels, 10_000, np.random.default_rng(1))
    match = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    assert pairs.shape == (10_000, 2)
    np.testing.assert_array_equal(match, np.arange(10_000) < 5000)
    assert (pairs[:, 0] != pairs[:, 1]).all()


def test_every_pair_of_a_kind_is_as_likely_as_every_other():
    labels = np.array([7, 2, 7, 5, 7, 2])
    pairs = sample_pairs(labels, 80_000, np.random.default_rng(2))
    found = Counter(map(tuple, pairs.tolist()))
    for same in (True, False):
        kind = [(i, j) for i, j in permutations(range(6), 2) if (labels[i] == labels[j]) == same]
        expected = 40_000 / len(kind)
        assert all(abs(found[pair] - expected) < 5 * expected**0.5 for pair in kind)


def test_the_same_generator_gives_the_same_pairs():
    labels = np.arange(40) // 4
    first, again, other = (sample_pairs(labels, 50, np.random.default_rng(s)) for s in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("labels", "n_pairs", "word"),
    [
        ([1, 1, 2], 5, "n_pairs"),
        ([1, 1, 2], 0, "n_pairs"),
        ([1, 2, 3], 4, "more than"),
        ([1, 1, 1], 4, "1 labels"),
        ([], 4, "0 items"),
    ],
)
def test_labels_without_such_pairs_are_refused(labels, n_pairs, word):
    with pytest.raises(InvalidData, match=word):
        sample_pairs(np.array(labels), n_pairs, np.random.default_rng(0))


def test_average_precision_of_pairs_agrees_with_a_loop():
    rng = np.random.default_rng(5)
    match = rng.random(300) < 0.5
    score = rng.normal(match, 1)
    found = total = 0
    for rank, pair in enumerate(np.argsort(-score), 1):
        if match[pair]:
            found += 1
            total += found / rank
    assert verification_ap(score, match) == pytest.approx(total / match.sum())


def test_without_a_matching_pair_there_is_no_precision():
    with pytest.raises(InvalidData, match="pairs"):
        verification_ap(np.zeros(3), np.zeros(3, bool))
    with pytest.raises(InvalidData, match="score"):
        verification_ap(np.zeros(3), np.zeros(2, bool))


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_votes_of_neighbours_agree_with_a_loop(k):
    rng = np.random.default_rng(k)
    neighbours, labels = rng.integers(0, 4, (400, 9)), rng.integers(0, 4, 400)
    expected = []
    for row, label in zip(neighbours[:, :k].tolist(), labels, strict=True):
        votes = Counter(row)
        most = max(votes.values())
        expected.append(next(vote for vote in row if votes[vote] == most) == label)
    np.testing.assert_array_equal(knn_correct(neighbours, labels, k), expected)


def test_accuracy_agrees_with_scikit_learn_where_no_vote_is_tied():
    images, labels = load_iris(return_X_y=True)
    of_two = labels > 0  # five voters of two classes never tie
    train, test = images[::2], images[1::2]
    classifier = KNeighborsClassifier(5).fit(train, of_two[::2])
    neighbours = NearestNeighbors().fit(train).kneighbors(test, 5, return_distance=False)
    found = knn_correct(of_two[::2].astype(int)[neighbours], of_two[1::2].astype(int))
    assert found.mean() == classifier.score(test, of_two[1::2])


def test_the_nearest_of_the_tied_wins():
    neighbours = np.array([[9, 1, 2, 2, 1], [9, 2, 1, 2, 1]])
    assert knn_correct(neighbours, np.array([1, 1])).tolist() == [True, False]


def test_invalid_votes_are_refused():
    with pytest.raises(InvalidData, match="1 to 4"):
        knn_correct(np.zeros((3, 4), int), np.zeros(3, int))
    with pytest.raises(InvalidData, match="labels"):
        knn_correct(np.zeros((3, 5), int), np.zeros(4, int))
