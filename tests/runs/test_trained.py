"""What a run was trained on: written, read, and refused where it is asked about."""

import hashlib
import json

import numpy as np
import pytest

from rcir.data import ImageSet, Splits
from rcir.data.relevance import SharedLabel
from rcir.errors import InvalidData
from rcir.runs.trained_on import TrainedOn


def of(part, rows, classes=None):
    """Pictures by number, one in a row; labels are the tens of the numbers."""
    images = np.array(rows, np.uint8)[:, None, None] + np.zeros((2, 3), np.uint8)
    attributes = {} if classes is None else {"class": np.array(classes)}
    names = [f"{part}-{row}" for row in rows]
    return ImageSet(images, np.array(rows) // 10, names, attributes)


def splits(train=(0, 1), validation=(10,), gallery=(0,), queries=((20,), (21, 22), (23,))):
    rest = zip(("tuning", "calibration", "test"), queries, strict=True)
    return Splits(
        of("train", train),
        of("validation", validation),
        of("gallery", gallery),
        **{name: of(name, rows) for name, rows in rest},
    )


def digest(number):
    """By hand: of the shape, then of the pixels."""
    return hashlib.blake2b(b"(2, 3)" + bytes([number] * 6), digest_size=16).hexdigest()


def test_it_holds_the_pictures_and_the_classes_that_train_and_validate(tmp_path):
    found = TrainedOn.of(splits(train=(0, 1, 0)))
    assert found.images.astype(str).tolist() == sorted(map(digest, (0, 1, 10)))
    assert (found.classes, found.zero_shot) == (["0", "1"], True)
    found.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trained_on.json"]
    assert json.loads((tmp_path / "trained_on.json").read_text()) == {
        "zero_shot": True,
        "classes": ["0", "1"],
        "images": sorted(map(digest, (0, 1, 10))),
    }
    again = TrainedOn.read(tmp_path)
    np.testing.assert_array_equal(again.images, found.images)
    assert (again.classes, again.zero_shot) == (found.classes, found.zero_shot)


def test_it_is_zero_shot_if_no_query_is_of_a_class_that_trains():
    assert TrainedOn.of(splits(gallery=(11,))).zero_shot  # whatever is searched
    assert not TrainedOn.of(splits(queries=((20,), (21, 12), (23,)))).zero_shot


def test_names_of_classes_go_before_labels_and_several_labels_are_none():
    parts = [of(name, [number], [f"class {number}"]) for number, name in enumerate("abcdef")]
    found = TrainedOn.of(Splits(*parts))
    assert (found.classes, found.zero_shot) == (["class 0", "class 1"], True)
    several = [
        ImageSet(part.images, None, part.ids, {}, SharedLabel.of_lists([[number]], 6))
        for number, part in enumerate(parts)
    ]
    found = TrainedOn.of(Splits(*several))
    assert (found.classes, found.zero_shot) == ([], False)
    found.require_unseen(Splits(*several))


def test_queries_that_trained_are_refused_by_name():
    trained = TrainedOn.of(splits())
    trained.require_unseen(splits())
    trained.require_unseen(splits(train=(23,)))  # what trains now does not matter
    other = TrainedOn.of(splits(queries=((20,), (2,), (23,))))  # not zero-shot
    other.require_unseen(splits(queries=((20,), (11,), (23,))))
    with pytest.raises(InvalidData, match=r"trained on 2 of the queries \(tuning-0, test-10\): tr"):
        other.require_unseen(splits(queries=((20, 0), (11,), (23, 10))))
    with pytest.raises(
        InvalidData, match=r"trained on 6 .*(tuning-1, ){5}\.\.\.\): train again on"
    ):
        other.require_unseen(splits(queries=((1,) * 6, (11,), (23,))))


def test_classes_that_trained_are_refused_by_name_if_it_was_zero_shot():
    trained = TrainedOn.of(splits())
    with pytest.raises(
        InvalidData, match=r"2 classes of the queries trained it \(0, 1\): train ag"
    ):
        trained.require_unseen(splits(queries=((20,), (11, 22), (5,))))
    with pytest.raises(InvalidData, match=r"data\.options\.train names them"):
        trained.require_unseen(splits(queries=((11,), (21,), (23,))))


def test_a_run_that_goes_on_with_other_images_is_trained_on_both():
    first, second = TrainedOn.of(splits()), TrainedOn.of(splits((2, 0), (30,), queries=((2,),) * 3))
    for one, other in ((first, second), (second, first)):
        both = one.joined(other)
        assert both.images.astype(str).tolist() == sorted(map(digest, (0, 1, 2, 10, 30)))
        assert (both.classes, both.zero_shot) == (["0", "1", "3"], True)
    assert not second.joined(second).zero_shot


def test_a_run_of_an_earlier_version_has_to_be_trained_again(tmp_path):
    with pytest.raises(InvalidData, match=r"no .*trained_on\.json.*earlier version.*train again"):
        TrainedOn.read(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"images": 3, "classes": [], "zero_shot": 1}']
)
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "trained_on.json").write_text(content)
    with pytest.raises(InvalidData, match=r"trained_on\.json is damaged .*: train again"):
        TrainedOn.read(tmp_path)
