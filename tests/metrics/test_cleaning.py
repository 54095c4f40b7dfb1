"""Galleries without their most uncertain items, against loops that rank again."""

import numpy as np
import pytest

from rcir.errors import InvalidData
from rcir.metrics import clean_gallery


@pytest.fixture(scope="module")
def searched():
    """Distances, labels and uncertainties of which the wrong neighbours have the larger."""
    rng = np.random.default_rng(0)
    labels, gallery = rng.integers(0, 8, 50), rng.integers(0, 8, 90)
    noisy = rng.random(90) < 0.25
    distances = rng.random((50, 90)) + (gallery != labels[:, None]) * (0.5 - noisy)
    return distances, labels, gallery, noisy + rng.random(90)


def looped(searched, removed):
    """mAP and queries without a match, of distances sorted without the removed items."""
    distances, labels, gallery, _ = searched
    rest = [item for item in range(len(gallery)) if item not in set(removed)]
    precisions, unmatched = [], 0
    for row, label in zip(distances, labels, strict=True):
        found, total = 0, 0.0
        for rank, item in enumerate(sorted(rest, key=lambda item: row[item]), 1):
            if gallery[item] == label:
                found += 1
                total += found / rank
        if found:
            precisions.append(total / found)
        else:
            unmatched += 1
    return np.mean(precisions), unmatched


def rankings(searched):
    distances, labels, gallery, uncertainty = searched
    positions = np.argsort(distances, axis=1)
    return positions, gallery[positions] == labels[:, None], uncertainty


def test_cleaned_map_agrees_with_ranking_again(searched):
    fractions = [0.0, 0.2, 0.5, 0.97]
    found = clean_gallery(*rankings(searched), np.random.default_rng(1), fractions)
    order = sorted(range(90), key=lambda item: -searched[3][item])
    for row, fraction in enumerate(fractions):
        expected, unmatched = looped(searched, order[: int(90 * fraction)])
        assert found.cleaned[row] == pytest.approx(expected)
        assert found.unmatched[row] == unmatched
    assert found.unmatched[-1] > 0
    np.testing.assert_array_equal(found.fractions, fractions)


def test_random_removals_follow_the_generator(searched):
    found = clean_gallery(*rankings(searched), np.random.default_rng(2), [0.2, 0.5], 3)
    rng = np.random.default_rng(2)
    for column in range(3):
        order = rng.permutation(90)
        for row, number in enumerate((18, 45)):
            expected, unmatched = looped(searched, order[:number])
            assert found.random[row, column] == pytest.approx(expected)
            assert found.random_unmatched[row, column] == unmatched


def test_removing_uncertain_items_helps_more_than_removing_random_ones(searched):
    found = clean_gallery(*rankings(searched), np.random.default_rng(3))
    assert found.random.shape == (6, 5)
    assert (found.random[0] == found.cleaned[0]).all()
    assert found.cleaned[2] > found.random[2].max() + 0.05


def test_without_any_match_the_mean_is_nan():
    positions, relevant = np.array([[1, 0]]), np.array([[True, False]])
    found = clean_gallery(
        positions, relevant, np.array([0.0, 1.0]), np.random.default_rng(0), [0.5]
    )
    assert np.isnan(found.cleaned).all()
    assert found.unmatched.tolist() == [1]


@pytest.mark.parametrize(
    ("positions", "fractions", "word"),
    [
        ([[0, 1]], [0.2], "3 items"),
        ([[0, 1, 1]], [0.2], "once"),
        ([[0, 1, -1], [0, 1, 1]], [0.2], "once"),
        ([[0, 1, 3]], [0.2], "once"),
        ([[0, 1, 2]], [0.2, 1.0], "fractions"),
        ([[0, 1, 2]], [-0.1], "fractions"),
    ],
)
def test_invalid_input_is_refused(positions, fractions, word):
    relevant = np.ones(np.shape(positions), bool)
    with pytest.raises(InvalidData, match=word):
        clean_gallery(
            np.array(positions), relevant, np.arange(3.0), np.random.default_rng(0), fractions
        )
