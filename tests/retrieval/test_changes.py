"""Images that are added to a gallery, and removed: what is refused, and what comes of it."""

import numpy as np
import pytest

from rcir.data import ImageSet
from rcir.data.relevance import SameLabel, SharedLabel
from rcir.data.within_radius import WithinRadius
from rcir.errors import InvalidData, StaleCalibration
from rcir.retrieval.retriever import Retriever

BLACK, GREY = np.zeros((8, 16), np.uint8), np.full((8, 16), 99, np.uint8)


@pytest.fixture
def own(folder):
    return Retriever.load(folder)


def state(retriever):
    return retriever.fingerprints() | {"ids": retriever.ids.tolist(), "n": len(retriever.index)}


def test_ids_that_are_there_are_refused(own, splits):
    there, before = splits.gallery.ids[:5], state(own)
    with pytest.raises(
        InvalidData, match=rf"5 of 5 ids are those of gallery images already \({there[0]}, .*\.\.\."
    ):
        own.add(splits.test.images[:5], there, [1] * 5)
    with pytest.raises(InvalidData, match=rf"1 of 2 ids .* already \({there[0]}\): `remove` these"):
        own.add(splits.test.images[:2], ["new", there[0]], [1, 2])
    assert state(own) == before


def test_ids_that_stand_twice_are_refused(own, splits):
    before = state(own)
    with pytest.raises(InvalidData, match=r"ids stand more than once \(a\): give different ones"):
        own.add(splits.test.images[:3], ["a", "b", "a"], [1, 2, 3])
    assert state(own) == before


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ("ab", "ids is a str: give a list of texts"),
        (None, "ids is a NoneType"),
        (7, "ids is a int"),
        (["a"], "2 images, 1 ids: give one id per image"),
        (["a", 3], r"1 ids are no texts \(3 is a int\)"),
        (["a", None], r"1 ids are no texts \(None is a NoneType\)"),
        (np.array([[1, 2], [3, 4]]), "ids are no texts"),
    ],
    ids=str,
)
def test_ids_of_another_kind_are_refused(own, ids, said):
    before = state(own)
    with pytest.raises(InvalidData, match=said):
        own.add([BLACK, GREY], ids, [1, 2])
    assert state(own) == before


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (None, r"give labels if and only if the gallery has labels: it has them \(SameLabel\)"),
        ([1], "2 images, 1 labels: give one each"),
        ([], "2 images, 0 labels: give one each"),
        (5, "labels is a int: give whole numbers, texts, or lists of texts"),
        ("12", "labels is a str: give whole numbers"),
        (["person 3", "person 4"], "of type <U8, and the gallery's images match as SameLabel"),
        ([1.0, 2.5], r"labels are \[1.0, 2.5\]: give whole numbers"),
        ([True, False], "give whole numbers"),
        ([1, None], "give whole numbers"),
        ([[1], [2]], "whole numbers"),
        ([[1], [2, 3]], "whole numbers"),
        ([2**70, 1], "whole numbers"),
        (np.array([2**63, 1], np.uint64), "whole numbers"),
        (SharedLabel.of_lists([[1], [2]], 3), "match as SameLabel cannot be joined"),
    ],
    ids=str,
)
def test_labels_of_another_type_length_or_kind_are_refused(own, labels, said):
    before = state(own)
    with pytest.raises(InvalidData, match=said):
        own.add([BLACK, GREY], ["black", "grey"], labels)
    assert state(own) == before


def test_a_picture_by_itself_is_refused(own):
    with pytest.raises(InvalidData, match="images is 'ab': give a list, of one image per id"):
        own.add("ab", ["a", "b"], [1, 2])


@pytest.mark.parametrize("kind", ["shared labels", "places"])
def test_galleries_without_plain_labels_take_their_own_kind_only(retriever, splits, kind):
    def relevance(n):
        if kind == "places":
            return WithinRadius(np.arange(2.0 * n).reshape(n, 2), 5.0)
        return SharedLabel.of_lists([[row % 3] for row in range(n)], 3)

    gallery = ImageSet(splits.gallery.images, None, splits.gallery.ids, {}, relevance(300))
    own = Retriever.build(retriever.encoder, retriever.preprocessing, gallery)
    other = WithinRadius(np.zeros((1, 3)), 5.0)
    for labels in ([1], [[1]], SameLabel(np.array([1])), other, "a"):
        with pytest.raises(InvalidData, match=r"give|cannot be joined"):
            own.add([BLACK], ["black"], labels)
    own.add([BLACK], ["black"], relevance(1))
    assert len(own.relevance) == len(own.index) == 301


def test_after_a_change_the_advice_is_to_calibrate_in_memory(own, splits):
    """`python -m calibration` would build the gallery anew, without what was added."""
    own.add([BLACK], ["black"], [0])
    with pytest.raises(StaleCalibration, match=r"gallery, index.*`recalibrate`, or") as e:
        own.retrieve(GREY, 0.3, 0.1)
    assert "python -m calibration" not in str(e.value)
    own.calibrate(
        own.search_labelled(splits.tuning), own.search_labelled(splits.calibration), "constant"
    )
    assert own.retrieve(BLACK, 0.3, 0.1).ids[0] == "black"


def test_what_was_added_and_is_removed_leaves_the_calibration_as_it_was(own, splits):
    image = splits.test.images[0]
    before, asked = state(own), own.retrieve(image, 0.3, 0.1).to_dict()
    own.add([BLACK, GREY], ["black", "grey"], [0, 1])
    assert own.ids[-2:].tolist() == ["black", "grey"]
    own.remove(["grey", "black"])
    assert state(own) == before
    assert own.retrieve(image, 0.3, 0.1).to_dict() == asked


def test_what_is_removed_is_found_no_more(own, splits, tmp_path):
    image = splits.gallery.images[7]
    assert own.search([image]).positions[0, 0] == 7
    own.remove([splits.gallery.ids[7]])
    expected = Retriever.build(
        own.encoder,
        own.preprocessing,
        splits.gallery.subset(np.delete(np.arange(300), 7)),
        depth=150,
    )
    assert own.fingerprints() == expected.fingerprints()
    assert (own.labels == expected.labels).all()
    assert (own.digests == expected.digests).all()
    assert Retriever.load(own.save(tmp_path / "fewer")).fingerprints() == own.fingerprints()
    own.add([image], [splits.gallery.ids[7]], [splits.gallery.labels[7]])
    assert own.ids[own.search([image]).positions[0, 0]] == splits.gallery.ids[7]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["nobody"], r"1 ids are of no gallery image: 'nobody'"),
        ("nobody", "ids is a str"),
        (None, "ids is a NoneType"),
        ([3], "1 ids are of no gallery image: 3"),
    ],
)
def test_what_is_not_there_cannot_be_removed(own, ids, said):
    before = state(own)
    with pytest.raises(InvalidData, match=said):
        own.remove(ids)
    assert state(own) == before


def test_the_last_image_cannot_be_removed(own):
    with pytest.raises(InvalidData, match="no image would be left"):
        own.remove(own.ids.tolist())
    own.remove(own.ids[1:].tolist())
    assert own.depth == len(own.index) == 1
