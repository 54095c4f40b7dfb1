"""Duplicates: digests of pictures, and queries that stand in another part of a data set."""

import hashlib
import warnings

import numpy as np
import pytest
from PIL import Image

from rcir.data import ImageSet, Splits, read_image, without_repeats
from rcir.data.repeats import digests, require_new, require_no_repeats, warn_of_copies
from rcir.errors import InvalidData, InvalidImage

PARTS = ("train", "validation", "gallery", "tuning", "calibration", "test")
PICTURES = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), np.uint8)

# Digests


def test_the_digest_of_a_file_is_the_blake2b_of_its_bytes(tmp_path):
    paths = [tmp_path / f"{row}.png" for row in range(5)]
    for path, pixels in zip(paths, PICTURES, strict=True):
        Image.fromarray(pixels).save(path)
    expected = [hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in paths]
    assert digests(paths).astype(str).tolist() == expected
    assert digests([str(paths[3]), paths[2].read_bytes()]).astype(str).tolist() == expected[3:1:-1]


def test_pixels_have_the_same_digest_in_every_memory_layout():
    array = digests(PICTURES)
    assert len(set(array.tolist())) == 5
    for other in (
        list(PICTURES),
        [Image.fromarray(pixels) for pixels in PICTURES],
        np.asfortranarray(PICTURES),
        np.repeat(PICTURES, 2, axis=2)[:, :, ::2],
    ):
        np.testing.assert_array_equal(digests(other), array)
    grey = PICTURES[..., 0]
    np.testing.assert_array_equal(digests(grey), digests(grey[..., None]))
    np.testing.assert_array_equal(digests(grey), digests([Image.fromarray(each) for each in grey]))


def test_pillow_images_are_compared_by_their_colours():
    """Two pictures with the same palette numbers are not the same picture."""
    first = Image.fromarray(PICTURES[0]).quantize(4)
    second = first.copy()
    second.putpalette(list(reversed(first.getpalette())))
    assert np.array_equal(np.asarray(first), np.asarray(second))
    assert digests([first])[0] != digests([second])[0]
    assert digests([first])[0] == digests(read_image(first, channels=3)[None])[0]


def test_any_change_of_pixels_or_shape_changes_the_digest():
    pixels = np.zeros((25, 4, 6), np.uint8)
    pixels[:24].reshape(24, 24)[np.arange(24), np.arange(24)] = 1
    assert len(np.unique(digests(pixels))) == 25
    grey = PICTURES[0, :, :, 0]
    shapes = [(4, 6), (6, 4), (24, 1), (3, 8), (1, 24)]
    assert len(np.unique(digests([grey.reshape(shape) for shape in shapes]))) == 5
    assert digests([]).shape == digests(np.zeros((0, 4, 6), np.uint8)).shape == (0,)


@pytest.mark.parametrize("image", ["missing.png", ".", np.zeros((4, 4)), np.zeros(3, np.uint8)])
def test_images_that_cannot_be_read_have_no_digest(image):
    with pytest.raises(InvalidImage) as expected:
        read_image(image, channels=3)
    with pytest.raises(InvalidImage) as error:
        digests([PICTURES[0], image])
    assert str(error.value) == str(expected.value)


# Parts of a data set


def part(rows):
    """Pictures by number; their ids are their places."""
    images = np.array(rows, np.uint8)[:, None, None] + np.zeros((4, 4), np.uint8)
    return ImageSet(images, np.array(rows), [f"{place}" for place in range(len(rows))])


def naively(parts):
    """The places of the queries that remain, by a loop over all of them."""
    seen = {*parts["train"], *parts["validation"], *parts["gallery"]}
    remaining = {"tuning": [i for i, n in enumerate(parts["tuning"]) if n not in seen]}
    seen |= set(parts["tuning"])
    for name in ("calibration", "test"):
        remaining[name] = []
        for place, number in enumerate(parts[name]):
            if number not in seen:
                remaining[name].append(place)
            seen.add(number)
    return remaining


def test_queries_remain_if_no_earlier_part_has_them():
    rng = np.random.default_rng(0)
    numbers = {name: rng.integers(0, 250, 40).tolist() for name in PARTS}
    splits = Splits(**{name: part(rows) for name, rows in numbers.items()})
    result, n_removed = without_repeats(splits)
    remaining = naively(numbers)
    for name in PARTS[:3]:
        assert getattr(result, name) is getattr(splits, name)
    for name in PARTS[3:]:
        queries = getattr(result, name)
        assert queries.ids == [str(place) for place in remaining[name]]
        assert queries.labels.tolist() == [numbers[name][place] for place in remaining[name]]
        assert n_removed[name] == 40 - len(remaining[name]) > 0

    assert without_repeats(result) == (result, dict.fromkeys(PARTS[3:], 0))


def test_a_part_without_remaining_queries_is_refused():
    splits = Splits(*map(part, ([0], [1], [2], [3], [3, 2, 1, 0], [5])))
    with pytest.raises(InvalidData, match="all 4 calibration queries"):
        without_repeats(splits)


# Queries that are calibrated with

GALLERY = digests(part(range(10)).images)


def digests_of(numbers):
    return digests(part(numbers).images)


@pytest.mark.parametrize(
    ("require", "before", "queries", "word"),
    [
        (require_no_repeats, [20, 21], [3, 22, 9], r"^2 of 3 calibrat.* gallery .*rows 0, 2"),
        (require_no_repeats, [20, 5], [30, 31], r"1 of 2 .* tuning .*row 1"),
        (require_no_repeats, [20], [*range(9), 50], r"9 of 10 .*rows 0, 1, 2, 3, 4, \.\.\."),
        (require_new, [20, 21], [3, 30, 9], r"^2 of 3 queries to add .*gallery.* 0, 2"),
    ],
)
def test_queries_that_find_themselves_in_the_gallery_are_always_refused(
    require, before, queries, word
):
    before, queries = map(digests_of, (before, queries))
    for recurring in (False, True):
        with pytest.raises(InvalidData, match=word):
            require(GALLERY, before, queries, recurring=recurring)
    require(None, before, queries)


@pytest.mark.parametrize(
    ("require", "before", "queries", "word"),
    [
        (require_no_repeats, [20, 21, 20], [30, 21, 20, 31], r"2 of 4 .* tuning .*rows 1, 2"),
        (require_no_repeats, [20, 21, 20], [30, 31, 30, 30], r"2 of 4 .* before .*rows 2, 3"),
        (require_new, [20, 21], [30, 31, 21], r"1 of 3 .* before .*row 2"),
        (require_new, [20], [30, 30, 31, 30], r"2 of 4 .* among them .*rows 1, 3"),
    ],
)
def test_recurring_queries_are_refused_unless_they_recur_in_use(require, before, queries, word):
    before, queries = map(digests_of, (before, queries))
    with pytest.raises(InvalidData, match=word):
        require(GALLERY, before, queries)
    require(GALLERY, before, queries, recurring=True)


def test_a_distance_near_zero_causes_a_warning_of_copies():
    # The second nearest have a median of 1.
    distances = np.stack([np.linspace(0.4, 1.2, 101), np.linspace(0.5, 1.5, 101)], axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_copies("calibration queries", distances, known=True)
    distances[[4, 7], 0] = 0, 0.0199
    for known in (True, False):
        with pytest.warns(UserWarning, match=r"2 of 101 .*rows 4, 7"):
            warn_of_copies("calibration queries", distances, known=known)
    distances[:, 0] = 0.01
    with pytest.warns(UserWarning, match="101 of 101"):
        warn_of_copies("calibration queries", distances, known=True)
