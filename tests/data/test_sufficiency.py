"""Data sets that are too small are refused before a training, with what would help."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.stats import beta

from rcir.data import DataConfig, ImageSet, load_splits
from rcir.data.catalogue import require_enough
from rcir.data.records import calibration_note, can_train, list_shortages
from rcir.data.relevance import SharedLabel, WithinRadius
from rcir.errors import InvalidData
from tests.data.small_sets import touch


def folder(tmp_path, classes, each):
    touch(tmp_path, [f"class {kind}/{n}.png" for kind in range(classes) for n in range(each)])
    return DataConfig("folder", options={"path": str(tmp_path)})


def refusal(config):
    with pytest.raises(InvalidData) as caught:
        require_enough(config, load_splits(config))
    return str(caught.value)


def test_twenty_pictures_in_four_classes_are_too_few(tmp_path):
    assert "tuning has 1" in refusal(folder(tmp_path, 4, 5))


@pytest.mark.parametrize("n", [21, 22])
def test_the_required_number_of_queries_is_exact(splits, n):
    """0.9 ** 22 < 0.1 < 0.9 ** 21."""
    assert beta.ppf(0.9, 1, 22) < 0.1 < beta.ppf(0.9, 1, 21)
    note = calibration_note(replace(splits, calibration=splits.test.subset(np.arange(n))))
    assert (note is None) == (n == 22)
    assert note is None or "it takes 22" in note


def test_a_closed_set_is_advised_where_it_would_be_enough(tmp_path):
    """One of two classes would train, with no other class to learn from."""
    config = folder(tmp_path, 2, 40)
    message = refusal(config)
    assert "at least 2 classes" in message
    assert "open_set" in message
    closed = DataConfig("folder", options=config.options | {"open_set": False})
    require_enough(closed, load_splits(closed))


@pytest.mark.parametrize(("classes", "each"), [(2, 3), (3, 2), (6, 2), (4, 2)])
def test_no_refusal_advises_a_division_that_would_be_refused(tmp_path, classes, each):
    message = refusal(folder(tmp_path, classes, each))
    assert "have " in message
    assert "open_set" not in message
    assert "smaller" not in message


def test_a_training_is_refused_before_it_begins(tmp_path, tiny):
    from training import train

    (tmp_path / "pictures").mkdir()
    with pytest.raises(InvalidData, match="have more images"):
        train(tiny("small", data=folder(tmp_path / "pictures", 4, 5)))
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]


@pytest.mark.parametrize(
    ("places", "database", "enough", "sampled"),
    [
        ([0, 5, 90], [False, True, True], True, False),  # a sample never includes the third
        ([0, 15, 90], [False, True, True], False, False),  # it matches, and is no positive
        ([0, 5, 90], [True, True, True], False, False),  # no query
        ([0, 5, 90], [False, False, True], False, False),  # positives are queries
        ([0, 5, 20], [False, True, True], False, False),  # no negative: it matches as well
        ([0, 5, 90, 95], [False, True, True, False], True, True),
        ([0, 15, 90], None, False, False),
        ([0, 5, 90], None, True, False),
        ([0, 5, 90, 95], None, True, True),
    ],
)
def test_places_train_with_positives_of_the_other_side(places, database, enough, sampled):
    places = np.stack([np.array(places, float), np.zeros(len(places))], axis=1)
    sides = None if database is None else np.array(database)
    relevance = WithinRadius(places, 25.0, near=10.0, database=sides)
    pixels, names = np.zeros((len(places), 2, 2), np.uint8), list("abcd")[: len(places)]
    images = ImageSet(pixels, None, names, relevance=relevance)
    assert can_train(images) == enough
    assert can_train(images, sampled=True) == sampled


def test_images_without_a_label_match_nothing(splits):
    labels = SharedLabel(csr_array(np.array([[1, 0], [0, 1], [0, 0]], bool)))
    images = ImageSet(np.zeros((3, 2, 2), np.uint8), None, list("abc"), relevance=labels)
    messages = list_shortages(replace(splits, train=images, validation=images))
    assert [each.partition(" ")[0] for each in messages] == ["no", "validation"]
