"""Labels are answered by the names that their data set gives them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rcir.data import ImageSet, Preprocessing
from rcir.data.datasets.folder import labelled
from rcir.retrieval import storage
from rcir.retrieval.retriever import Retriever

# As folders may be called; the label of a number is its place among the names.
NAMES = np.array([f"person {number}" for number in range(100)])


def named(images):
    return replace(images, attributes=images.attributes | {"class": NAMES[images.labels]})


@pytest.fixture(scope="module")
def people(retriever, splits):
    """A gallery whose labels have names, calibrated."""
    built = Retriever.build(retriever.encoder, Preprocessing(), named(splits.gallery), depth=150)
    built.calibrate(
        built.search_labelled(splits.tuning), built.search_labelled(splits.calibration), "constant"
    )
    return built


@pytest.mark.parametrize("distinct", [None, "label"])
def test_answers_name_labels_as_the_data_set_does(people, splits, tmp_path, distinct):
    loaded = storage.load(storage.save(people, tmp_path / "people"))
    queries = list(splits.test.images[:3])
    for given in (people, loaded):
        for answer in given.retrieve(queries, 0.3, 0.2, distinct=distinct):
            # An id of these data ends in the number that is shown.
            expected = [f"person {int(name[-2:])}" for name in answer.ids]
            assert len(expected) > 1
            assert list(answer.labels) == expected
            assert json.loads(json.dumps(answer.to_dict()))["labels"] == expected
            _, columns, *rows = str(answer).splitlines()
            assert columns.split() == ["rank", "distance", "id", "label"]
            place = columns.index("label")
            assert [row[place:] for row in rows[: answer.size]] == expected


def test_names_decide_nothing(people, retriever):
    assert people.fingerprints()["gallery"] == retriever.fingerprints()["gallery"]


def test_a_set_that_has_numbers_only_keeps_them(retriever, splits):
    answer = retriever.retrieve(splits.test.images[0], 0.3, 0.2)
    assert answer.labels == tuple(int(name[-2:]) for name in answer.ids)
    assert str(answer).splitlines()[1] == "rank  distance  id"


def test_a_label_that_came_without_a_name_is_its_number_as_text(people, splits, tmp_path):
    larger = storage.load(storage.save(people, tmp_path / "people"))
    larger.add(splits.test.images[:1], ["new"], [777])
    (position,) = np.flatnonzero(larger.ids == "new")
    assert larger.named_labels(np.array([position, 0])) == (
        *("777", f"person {int(larger.ids[0][-2:])}"),
    )


def test_class_folders_name_their_labels():
    images = labelled(list("abcd"), list("abcd"), ["10", "9", "10", "x/y"])
    assert images.label_names == {0: "10", 1: "9", 2: "x/y"}
    assert images.subset(np.array([1, 3])).label_names == {1: "9", 2: "x/y"}


@pytest.mark.parametrize(
    "names", [["a", "b", "c"], ["a", "a", "a"]], ids=["two of one", "one of two"]
)
def test_what_does_not_name_labels_one_to_one_is_no_name(names):
    pictures, labels = np.zeros((3, 2, 2), np.uint8), np.array([0, 0, 1])
    assert ImageSet(pictures, labels, list("abc"), {"class": np.array(names)}).label_names == {}
    assert ImageSet(pictures, labels, list("abc")).label_names == {}
