import numpy as np
import pytest
from scipy.stats import chisquare

from rcir.data.augmentation import occlude

WHITE = np.full((4000, 8, 16), 200, np.uint8)


def squares(image):
    """(row, column, side) of the black square in each 8 x 8 tile; side 0 if there is none."""
    found = []
    for left in (0, 8):
        black = image[:, left : left + 8] == 0
        side = round(np.sqrt(black.sum()))
        rows, columns = np.flatnonzero(black.any(1)), np.flatnonzero(black.any(0))
        if side:
            assert black[rows[0] : rows[0] + side, columns[0] : columns[0] + side].all()
            found.append((rows[0], columns[0], side))
        else:
            found.append((0, 0, 0))
        assert black.sum() == side**2
    return found


@pytest.fixture(scope="module")
def drawn():
    hidden, occluded = occlude(WHITE, 1.0, np.random.default_rng(0))
    return hidden, occluded, np.array([squares(image) for image in hidden])


def test_what_is_hidden_is_one_black_square_per_tile_and_nothing_else_changes(drawn):
    hidden, _, _ = drawn  # `squares` checks the shape
    assert set(np.unique(hidden)) == {0, 200}


def test_the_flag_says_whether_anything_is_hidden(drawn):
    hidden, occluded, _ = drawn
    np.testing.assert_array_equal(occluded, (hidden == 0).any(axis=(1, 2)))


def test_sides_are_uniform_from_nothing_to_the_whole_tile(drawn):
    sides = drawn[2][:, :, 2].ravel()
    assert chisquare(np.bincount(sides, minlength=9)).pvalue > 1e-3
    assert sides.max() == 8


@pytest.mark.parametrize("axis", [0, 1])
def test_places_are_uniform_inside_the_tile(drawn, axis):
    for side in (1, 4, 7):
        chosen = drawn[2][:, :, 2] == side
        places = np.bincount(drawn[2][chosen][:, axis], minlength=9 - side)
        assert len(places) == 9 - side
        assert chisquare(places).pvalue > 1e-3


def test_tiles_are_hit_one_by_one(drawn):
    hidden, _ = occlude(WHITE, 0.5, np.random.default_rng(1))
    hit = (hidden.reshape(-1, 8, 2, 8) == 0).any(axis=(1, 3))
    share = 0.5 * 8 / 9
    for pattern, expected in (((0, 0), (1 - share) ** 2), ((1, 1), share**2)):
        count = (hit == pattern).all(1).sum()
        assert abs(count / 4000 - expected) < 4 * np.sqrt(expected * (1 - expected) / 4000)


def test_probability_zero_changes_nothing_and_the_input_is_never_written():
    images = np.random.default_rng(0).integers(1, 256, (50, 8, 16), dtype=np.uint8)
    before = images.copy()
    same, occluded = occlude(images, 0.0, np.random.default_rng(0))
    np.testing.assert_array_equal(same, before)
    assert not occluded.any()
    occlude(images, 1.0, np.random.default_rng(0))
    np.testing.assert_array_equal(images, before)
