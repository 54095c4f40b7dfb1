import gzip

import numpy as np
import pytest
from scipy.stats import binomtest

from rcir.data import DataConfig, load_splits
from rcir.data.datasets.n_digit_mnist import read, released_classes
from rcir.errors import DataUnavailable, InvalidConfig

SMALL = {"total_train": 7_000, "total_test": 3_000}


@pytest.fixture(scope="module")
def originals(data_root):
    """For training and test half: the row and the digit of every handwritten digit's pixels."""

    def rows(part):
        images, labels = (
            gzip.decompress((data_root / "mnist" / f"{part}-{kind}-ubyte.gz").read_bytes())
            for kind in ("images-idx3", "labels-idx1")
        )
        tiles = np.frombuffer(images[16:], np.uint8).reshape(-1, 784)
        found = {tile.tobytes(): row for row, tile in enumerate(tiles)}
        assert len(found) == len(tiles)  # pixels tell which one it is
        return found, np.frombuffer(labels[8:], np.uint8)

    return {"train": rows("train"), "test": rows("t10k")}


@pytest.fixture(scope="module")
def clean(data_root):
    """The released two-digit sets, training not occluded."""
    return read(data_root, train_corrupt=0.0)


def tiles(images, digits=2):
    """(n, digits) handwritten digits, as bytes."""
    each = images.images.reshape(-1, 28, digits, 28).transpose(0, 2, 1, 3)
    return [[tile.tobytes() for tile in row] for row in each]


def counted(images):
    """How many classes, and how many images of each."""
    classes, counts = np.unique(images.labels, return_counts=True)
    (each,) = set(counts.tolist())
    return len(classes), each


def unseen(n):
    chosen = np.random.RandomState(714).choice(n, 7 * n // 10, replace=False).tolist()
    return set(range(n)) - set(chosen)


@pytest.mark.parametrize(
    ("digits", "first"),
    # Of numpy's legacy generator, whose stream is frozen; the lists were released with seed 714.
    [(2, [6, 37, 87, 50, 43, 74, 94, 27]), (3, [154, 240, 525, 414, 351, 657, 866, 184])],
)
def test_the_classes_are_those_of_the_released_lists(digits, first):
    classes = released_classes(digits)
    assert classes[:8] == first
    assert len(set(classes)) == len(classes) == 7 * 10**digits // 10
    assert set(range(10**digits)) - set(classes) == unseen(10**digits)


@pytest.mark.data
def test_the_released_two_digit_sets(clean):
    assert (counted(clean.train), counted(clean.queries)) == ((70, 1428), (30, 333))
    assert set(clean.queries.labels.tolist()) == unseen(100)
    assert set(clean.train.labels.tolist()) == set(range(100)) - unseen(100)
    assert clean.gallery == "queries"
    assert clean.train.images.shape == (99_960, 28, 56)
    assert len({*clean.train.ids, *clean.queries.ids}) == 99_960 + 9_990


@pytest.mark.data
@pytest.mark.parametrize(
    ("options", "train", "test"),
    [
        ({"unseen": False, "total_train": 7_000}, (70, 100), (70, 142)),
        ({"digits": 3}, (700, 142), (100, 100)),
        ({"digits": 3, "unseen": False, "total_train": 10_000}, (100, 100), (100, 100)),
        ({"gap": "instance"}, (100, 1000), (100, 100)),
        ({"gap": "instance", "digits": 3, "total_train": 5_000}, (1000, 5), (1000, 10)),
    ],
    ids=str,
)
def test_the_other_released_sets(data_root, options, train, test):
    source = read(data_root, **options)
    assert (counted(source.train), counted(source.queries)) == (train, test)
    digits = options.get("digits", 2)
    assert source.queries.images.shape == (test[0] * test[1], 28, 28 * digits)
    trains, tests = (set(part.labels.tolist()) for part in (source.train, source.queries))
    if options.get("gap") == "instance":
        assert source.gallery == "train"
        assert trains == tests == set(range(10**digits))
    elif "unseen" in options:
        assert source.gallery == "train"
        assert not unseen(10**digits) & (trains | tests)
    else:
        assert source.gallery == "queries"
        assert tests < unseen(10**digits)
        assert not trains & unseen(10**digits)


@pytest.mark.data
@pytest.mark.parametrize("half", ["train", "test"])
def test_digits_are_of_their_own_half_and_show_the_label(clean, originals, half):
    rows, shown = originals[half]
    images = clean.train if half == "train" else clean.queries
    # A digit image of the other half would not be found.
    found = np.array([[rows[tile] for tile in pair] for pair in tiles(images)])
    assert (shown[found] @ [10, 1] == images.labels).all()
    for number in np.unique(images.labels):
        own = found[images.labels == number]
        for position in range(2):
            assert len(set(own[:, position].tolist())) == len(own)
    # Positions are drawn independently: the same pair of rows does not come again and again.
    assert len({*map(tuple, found.tolist())}) > 0.99 * len(found)


@pytest.mark.data
def test_three_digits_keep_leading_zeros(data_root, originals):
    rows, shown = originals["test"]
    images = read(data_root, digits=3, gap="instance", total_train=1000, total_test=2000).queries
    found = np.array([[rows[tile] for tile in each] for each in tiles(images, 3)])
    assert (shown[found] @ [100, 10, 1] == images.labels).all()
    assert images.ids[images.labels.tolist().index(7)].endswith("-007")


@pytest.mark.data
def test_corrupt_images_are_twins_of_the_clean_ones_behind_black_squares(data_root):
    whole, hidden = (read(data_root, corrupt=p, **SMALL).queries for p in (0.0, 1.0))
    assert whole.ids == hidden.ids
    assert not whole.attributes["occluded"].any()
    changed = whole.images != hidden.images
    assert not hidden.images[changed].any()
    np.testing.assert_array_equal(changed.any((1, 2)) <= hidden.attributes["occluded"], True)
    assert 0.7 < changed.any((1, 2)).mean() < 1  # some squares hide nothing
    for half in (slice(28), slice(28, 56)):
        for mask, image in zip(changed[:300, :, half], hidden.images[:300, :, half], strict=True):
            if mask.any():
                down, across = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
                inside = image[down[0] : down[-1] + 1, across[0] : across[-1] + 1]
                assert not inside.any()


@pytest.mark.data
@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
def test_the_share_of_occluded_images_is_as_configured(data_root, p):
    source = read(data_root, corrupt=p, train_corrupt=p, **SMALL)
    # A digit is hit with that probability, and by a square of side 0 in one of 29 cases.
    expected = 1 - (1 - p * 28 / 29) ** 2
    for images in (source.train, source.queries):
        occluded = images.attributes["occluded"]
        assert binomtest(int(occluded.sum()), len(occluded), expected).pvalue > 1e-3


@pytest.mark.data
def test_training_is_occluded_and_evaluation_is_not_unless_asked_for(data_root, originals):
    source = read(data_root, **SMALL)
    assert 0.3 < source.train.attributes["occluded"].mean() < 0.4  # 1 - 0.807**2 = 0.349
    assert not source.queries.attributes["occluded"].any()
    rows, _ = originals["train"]
    for pair, occluded in zip(
        tiles(source.train), source.train.attributes["occluded"], strict=True
    ):
        if not occluded:
            assert pair[0] in rows
            assert pair[1] in rows


@pytest.mark.data
def test_the_draw_decides_which_digits(data_root):
    first, again, other = (read(data_root, draw=draw, **SMALL) for draw in (0, 0, 1))
    for name in ("train", "queries"):
        a, b, c = (getattr(source, name) for source in (first, again, other))
        np.testing.assert_array_equal(a.images, b.images)
        np.testing.assert_array_equal(a.labels, c.labels)
        assert (a.images != c.images).any((1, 2)).mean() > 0.9


@pytest.mark.data
def test_splits_are_zero_shot(data_root):
    splits = load_splits(DataConfig("n-digit-mnist", root=str(data_root), options=dict(SMALL)))
    assert set(splits.gallery.labels.tolist()) == unseen(100)
    assert len(splits.gallery) == 1500
    assert not set(splits.train.labels) & set(splits.validation.labels)
    assert len(set(splits.validation.labels)) == 7
    for part in (splits.tuning, splits.calibration, splits.test):
        assert set(part.labels.tolist()) <= unseen(100)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"digits": 0}, "digits 0, .* 1 to 4 digits"),
        ({"digits": 5}, "digits 5"),
        ({"gap": "class"}, "gap 'class'.* 'number' or 'instance'"),
        ({"corrupt": 1.01}, "corrupt is 1.01"),
        ({"corrupt": float("nan")}, "corrupt is nan"),
        ({"train_corrupt": -0.1}, "train_corrupt is -0.1"),
        ({"total_train": 99}, "total_train 99, .* at least 100 images each"),
        ({"total_test": 0}, "total_test 0"),
        ({"total_test": -5, "gap": "instance"}, "total_test -5, .* at least 1 images"),
        ({"draw": -1}, "draw -1"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(tmp_path, options, said):
    with pytest.raises(InvalidConfig, match=said):
        read(tmp_path, **options)


@pytest.mark.data
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"digits": 1, "total_train": 60_000}, "8571 images of each of 7 numbers: from 1 to 5421"),
        ({"total_test": 30_000}, "1000 images of each of 30 numbers: from 1 to 892"),
        ({"gap": "instance", "total_train": 99}, "0 images of each of 100 numbers"),
    ],
    ids=str,
)
def test_more_images_than_digits_are_refused(data_root, options, said):
    with pytest.raises(InvalidConfig, match=said):
        read(data_root, **({"total_train": 7000} | options))


def test_missing_mnist_says_where_it_belongs(tmp_path):
    with pytest.raises(DataUnavailable, match=r"mnist: put the four official"):
        read(tmp_path)
    assert list(tmp_path.iterdir()) == []
