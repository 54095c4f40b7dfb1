from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.datasets import load_digits

from rcir.data import DataConfig, load_splits
from rcir.data.datasets.digits import class_lists
from rcir.errors import InvalidConfig

PARTS = ("train", "validation", "gallery", "tuning", "calibration", "test")
POOLS = (("train",), ("validation",), ("gallery",), ("tuning", "calibration", "test"))


@pytest.fixture(scope="module")
def originals():
    """Every handwritten digit's pixels as bytes, and the rows and the classes that have them."""
    bunch = load_digits()
    rows, classes = {}, {}
    for row, (picture, target) in enumerate(zip(bunch.images, bunch.target, strict=True)):
        pixels = np.round(picture * 255 / 16).astype(np.uint8).tobytes()
        rows.setdefault(pixels, set()).add(row)
        classes.setdefault(pixels, set()).add(int(target))
    return rows, classes


def tiles(images):
    """The left and right digits of (n, 8, 16) images, as bytes."""
    for image in images:
        yield image[:, :8].tobytes(), image[:, 8:].tobytes()


def test_classes_are_those_of_the_released_list():
    chosen = np.random.RandomState(714).choice(100, 70, replace=False)
    train, validation, evaluation = class_lists(open_set=True)
    assert sorted(train + validation) == sorted(chosen)
    assert len(validation) == 10
    assert set(evaluation) == set(range(100)) - set(chosen)
    assert class_lists(open_set=False) == (list(range(100)),) * 3


def test_open_set_evaluation_never_meets_a_training_class(splits):
    train, validation, evaluation = class_lists(open_set=True)
    assert set(splits.train.labels) == set(train)
    assert set(splits.validation.labels) == set(validation)
    for part in PARTS[2:]:
        assert set(getattr(splits, part).labels) == set(evaluation)


def test_sizes_shapes_and_balance(splits):
    for part, n in zip(PARTS, (400, 100, 300, 200, 400, 100), strict=True):
        images = getattr(splits, part)
        assert images.images.shape == (n, 8, 16)
        assert images.images.dtype == np.uint8
        assert len(set(images.ids)) == n
        counts = np.unique(images.labels, return_counts=True)[1]
        assert counts.max() - counts.min() <= 1


def test_gallery_images_show_real_digits_of_their_label(splits, originals):
    _, classes = originals
    assert not splits.gallery.attributes["occluded"].any()
    for (left, right), label in zip(
        tiles(splits.gallery.images), splits.gallery.labels, strict=True
    ):
        assert label // 10 in classes[left]
        assert label % 10 in classes[right]


def test_images_that_are_not_occluded_show_real_digits_of_their_label(splits, originals):
    _, classes = originals
    for part in PARTS:
        images = getattr(splits, part)
        whole = ~images.attributes["occluded"]
        assert whole.any()
        for (left, right), label in zip(
            tiles(images.images[whole]), images.labels[whole], strict=True
        ):
            assert label // 10 in classes[left]
            assert label % 10 in classes[right]


def test_no_handwritten_digit_is_in_two_pools(splits, originals):
    rows, _ = originals
    seen = []
    for pool in POOLS:
        images = np.concatenate([getattr(splits, part).images for part in pool])
        pixels = {tile for pair in tiles(images) for tile in pair}
        # Digits that the data set holds twice are no evidence; neither are occluded ones.
        seen.append({tile for tile in pixels if len(rows.get(tile, ())) == 1})
    assert [len(some) > 40 for some in seen] == [True] * 4
    for i, first in enumerate(seen):
        for second in seen[i + 1 :]:
            assert not first & second


@pytest.mark.parametrize("occlusion", [0.0, 0.5, 1.0])
def test_no_query_comes_twice_or_is_in_another_part(occlusion):
    options = {"occlusion": occlusion, "train_occlusion": occlusion}
    parts = load_splits(DataConfig("digits", seed=1, options=options))
    others, queries = (
        [image.tobytes() for part in names for image in getattr(parts, part).images]
        for names in (PARTS[:3], PARTS[3:])
    )
    assert len(queries) == 9_000
    assert len({*queries}) == 9_000
    assert {*queries}.isdisjoint(others)


def test_more_queries_than_there_are_pictures_come_twice():
    options = {"occlusion": 0.0, "test": 62_000}  # 30 numbers of 45 x 45 pairs of digits each
    parts = load_splits(DataConfig("digits", options=options))
    assert len(parts.test) == 62_000
    assert len({image.tobytes() for image in parts.test.images}) < 62_000


@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5, 1.0])
def test_the_share_of_occluded_images_is_as_configured(probability):
    options = {"occlusion": probability, "train_occlusion": probability, "train": 1000}
    parts = load_splits(DataConfig("digits", seed=3, options=options))
    # A digit is hit with that probability, and by a square of side 0 in one of nine cases.
    expected = 1 - (1 - probability * 8 / 9) ** 2
    for part in ("train", "validation", "test"):
        occluded = getattr(parts, part).attributes["occluded"]
        assert binomtest(int(occluded.sum()), len(occluded), expected).pvalue > 1e-3
    assert not parts.gallery.attributes["occluded"].any()


def test_the_seed_decides_everything():
    def draw(seed):
        sizes = dict.fromkeys(PARTS, 60)
        return load_splits(DataConfig("digits", seed=seed, options=sizes))

    first, again, other = draw(0), draw(0), draw(1)
    for part in PARTS:
        a, b, c = (getattr(parts, part) for parts in (first, again, other))
        np.testing.assert_array_equal(a.images, b.images)
        np.testing.assert_array_equal(a.labels, b.labels)
        assert a.ids == b.ids
        assert (a.images != c.images).any()
    for one, two in pairwise(PARTS[3:]):  # draws of one population, not copies of each other
        assert (getattr(first, one).images != getattr(first, two).images).any()


def test_all_classes_are_everywhere_in_the_closed_set():
    parts = load_splits(DataConfig("digits", options={"open_set": False}))
    for part in PARTS:
        assert set(getattr(parts, part).labels) == set(range(100))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mnists", {}, "choose one of digits, mnist, fashion-mnist"),
        ("digits", {"sizes": 3}, r"data\.options of digits: .*sizes"),
        ("digits", {"occlusion": 1.5}, "occlusion is 1.5"),
        ("digits", {"train_occlusion": -0.1}, "train_occlusion is -0.1"),
        ("digits", {"gallery": 0}, "at least 1"),
    ],
)
def test_a_set_or_an_option_that_does_not_exist_is_refused(name, options, message):
    with pytest.raises(InvalidConfig, match=message):
        load_splits(DataConfig(name, options=options))
