"""Data sets that are too small are refused before a training, with what would help."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy.sparse import csr_array
from scipy.stats import beta

from rcir.data import DataConfig, ImageSet, load_splits
from rcir.data.loading import require_enough
from rcir.data.relevance import SharedLabel
from rcir.data.sufficiency import calibration_note, can_train, shortages
from rcir.data.within_radius import WithinRadius
from rcir.errors import InvalidData


def folder(tmp_path, classes, each):
    for kind in range(classes):
        (tmp_path / f"class {kind}").mkdir()
        for number in range(each):
            Image.new("L", (8, 8), 10 * kind + number).save(
                tmp_path / f"class {kind}" / f"{number}.png"
            )
    return DataConfig("folder", options={"path": str(tmp_path)})


def refusal(config):
    with pytest.raises(InvalidData) as caught:
        require_enough(config, load_splits(config))
    return str(caught.value)


def test_twenty_pictures_in_four_classes(tmp_path):
    assert refusal(folder(tmp_path, 4, 5)) == (
        "folder has too few images: 6 train, 4 validate, 6 are searched and 4 ask; tuning has 1 "
        "queries, needed are 2: have more images of each class, and more classes"
    )


def test_ten_classes_of_two_are_enough_to_train_but_certify_little(tmp_path):
    config = folder(tmp_path, 10, 2)
    splits = load_splits(config)
    require_enough(config, splits)
    # Clopper and Pearson, of no miss among 2.
    assert f"2 calibration queries certify no alpha below {beta.ppf(0.9, 1, 2):.2f}" in (
        calibration_note(splits)
    )


@pytest.mark.parametrize("n", [21, 22])
def test_the_number_it_takes_is_exact(splits, n):
    """0.9 ** 22 < 0.1 < 0.9 ** 21."""
    assert beta.ppf(0.9, 1, 22) < 0.1 < beta.ppf(0.9, 1, 21)
    note = calibration_note(replace(splits, calibration=splits.test.subset(np.arange(n))))
    assert (note is None) == (n == 22)
    assert note is None or "for alpha = 0.1 it takes 22" in note


def test_what_would_be_enough_is_named_where_it_is(tmp_path):
    """Of two classes one would train, with nothing to tell it from."""
    config = folder(tmp_path, 2, 40)
    said = refusal(config)
    assert "validation 0.1 must leave some of 1 classes over: have at least 2 classes" in said
    assert said.endswith(
        "with open_set false in data.options, by which every class both trains "
        "and is asked about, there are enough"
    )
    closed = DataConfig("folder", options=config.options | {"open_set": False})
    require_enough(closed, load_splits(closed))


@pytest.mark.parametrize(("classes", "each"), [(2, 3), (3, 2), (6, 2), (4, 2)])
def test_no_refusal_advises_what_would_be_refused(tmp_path, classes, each):
    said = refusal(folder(tmp_path, classes, each))
    assert "have " in said
    assert "open_set" not in said
    assert "ask for less" not in said


def test_a_training_is_refused_before_it_begins(tmp_path, monkeypatch, tiny):
    from training import train

    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidData, match="have more images of each class, and more classes"):
        train(tiny("small", data=folder(tmp_path / "own", 4, 5)))
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


@pytest.mark.parametrize(
    ("places", "database", "enough", "sampled"),
    [
        ([0, 5, 90], [False, True, True], True, False),  # a sample never has the third
        ([0, 15, 90], [False, True, True], False, False),  # it matches, and is no positive
        ([0, 5, 90], [True, True, True], False, False),  # who asks?
        ([0, 5, 90], [False, False, True], False, False),  # positives that ask
        ([0, 5, 20], [False, True, True], False, False),  # no negative: it matches as well
        ([0, 5, 90, 95], [False, True, True, False], True, True),
        ([0, 15, 90], None, False, False),
        ([0, 5, 90], None, True, False),
        ([0, 5, 90, 95], None, True, True),
    ],
)
def test_places_train_by_positives_of_the_other_side(places, database, enough, sampled):
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
    found = shortages(replace(splits, train=images, validation=images))
    assert [each.partition(" ")[0] for each in found] == ["no", "validation"]
