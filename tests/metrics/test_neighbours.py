"""Votes of neighbours against a loop and scikit-learn."""

from collections import Counter

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from rcir.errors import InvalidData
from rcir.metrics import knn_correct


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_votes_are_those_of_a_loop(k):
    rng = np.random.default_rng(k)
    neighbours, labels = rng.integers(0, 4, (400, 9)), rng.integers(0, 4, 400)
    expected = []
    for row, label in zip(neighbours[:, :k].tolist(), labels, strict=True):
        votes = Counter(row)
        most = max(votes.values())
        expected.append(next(vote for vote in row if votes[vote] == most) == label)
    np.testing.assert_array_equal(knn_correct(neighbours, labels, k), expected)


def test_accuracy_is_that_of_scikit_learn_where_no_vote_is_tied():
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


def test_what_cannot_vote_is_refused():
    with pytest.raises(InvalidData, match="k is 5; allowed is 1 to 4"):
        knn_correct(np.zeros((3, 4), int), np.zeros(3, int))
    with pytest.raises(InvalidData, match=r"shape \(3, 5\), labels \(4,\)"):
        knn_correct(np.zeros((3, 5), int), np.zeros(4, int))
