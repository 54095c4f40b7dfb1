"""Pairs by what they have to be, and average precision by its definition."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from rcir.errors import InvalidData
from rcir.metrics import sample_pairs, verification_ap


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
    ("labels", "n_pairs", "message"),
    [
        ([1, 1, 2], 5, "n_pairs is 5"),
        ([1, 1, 2], 0, "n_pairs is 0"),
        ([1, 2, 3], 4, "none more than 1 times"),
        ([1, 1, 1], 4, "3 items have 1 labels"),
        ([], 4, "0 items"),
    ],
)
def test_what_has_no_such_pairs_is_refused(labels, n_pairs, message):
    with pytest.raises(InvalidData, match=message):
        sample_pairs(np.array(labels), n_pairs, np.random.default_rng(0))


def test_average_precision_of_pairs_is_that_of_a_loop():
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
    with pytest.raises(InvalidData, match="none of 3 pairs matches"):
        verification_ap(np.zeros(3), np.zeros(3, bool))
    with pytest.raises(InvalidData, match=r"score \(3,\), match \(2,\)"):
        verification_ap(np.zeros(3), np.zeros(2, bool))
