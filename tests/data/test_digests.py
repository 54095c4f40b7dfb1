"""By what the same picture is known again."""

import hashlib
import shutil

import numpy as np
import pytest
from PIL import Image

from rcir.data import read_image
from rcir.data.digests import digests
from rcir.errors import InvalidImage

RNG = np.random.default_rng(0)
PICTURES = RNG.integers(0, 256, (5, 4, 6, 3), np.uint8)


def test_that_of_a_file_is_the_blake2b_of_its_bytes(tmp_path):
    paths = [tmp_path / f"{row}.png" for row in range(5)]
    for path, pixels in zip(paths, PICTURES, strict=True):
        Image.fromarray(pixels).save(path)
    expected = [hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in paths]
    assert digests(paths).astype(str).tolist() == expected
    assert digests([str(paths[3])]).astype(str).tolist() == expected[3:4]
    assert digests(paths).dtype == "S32"


def test_copies_of_a_file_have_one_and_other_encodings_have_others(tmp_path):
    Image.fromarray(PICTURES[0]).save(tmp_path / "a.png")
    shutil.copy(tmp_path / "a.png", tmp_path / "b.png")
    Image.fromarray(PICTURES[0]).save(tmp_path / "c.png", compress_level=1)
    a, b, c = digests([tmp_path / f"{name}.png" for name in "abc"])
    assert a == b != c


def test_pixels_have_one_however_they_are_given():
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


def test_pil_images_are_known_by_the_colours_that_are_read():
    """Two pictures of the same palette numbers are not the same picture."""
    first = Image.fromarray(PICTURES[0]).quantize(4)
    second = first.copy()
    second.putpalette(list(reversed(first.getpalette())))
    assert np.array_equal(np.asarray(first), np.asarray(second))
    assert digests([first])[0] != digests([second])[0]
    assert digests([first])[0] == digests(read_image(first, channels=3)[None])[0]


@pytest.mark.parametrize("shape", [(6, 4), (24, 1), (3, 8), (1, 24)])
def test_the_same_bytes_in_another_shape_are_another_picture(shape):
    pixels = PICTURES[0, :, :, 0]
    assert digests([pixels])[0] != digests([pixels.reshape(shape)])[0]


def test_any_changed_pixel_is_noticed():
    pixels = np.zeros((24, 4, 6), np.uint8)
    pixels.reshape(24, 24)[np.arange(24), np.arange(24)] = 1
    assert len(np.unique(digests(np.concatenate([pixels, np.zeros((1, 4, 6), np.uint8)])))) == 25


def test_no_images_have_no_digests():
    assert digests([]).shape == digests(np.zeros((0, 4, 6), np.uint8)).shape == (0,)


@pytest.mark.parametrize("given", ["missing.png", ".", np.zeros((4, 4)), np.zeros(3, np.uint8)])
def test_what_cannot_be_read_is_refused_in_the_same_words(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidImage) as expected:
        read_image(given, channels=3)
    with pytest.raises(InvalidImage) as refused:
        digests([PICTURES[0], given])
    assert str(refused.value) == str(expected.value)


def test_it_needs_no_loop_of_ours_to_find_members():
    known = digests(PICTURES)
    np.testing.assert_array_equal(np.isin(known, known[[1, 3]]), [False, True, False, True, False])
