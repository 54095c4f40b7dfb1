import numpy as np
import pytest

from rcir.data import ImageSet
from rcir.data.relevance import SameLabel, SharedLabel
from rcir.data.within_radius import WithinRadius
from rcir.errors import InvalidData

PLACES = WithinRadius(np.array([[0.0, 0], [10, 0], [20, 0], [30, 0], [40, 0]]), 12.0)


def images(n=5, as_list=False, **more):
    pixels = np.arange(n, dtype=np.uint8)[:, None, None] + np.zeros((n, 2, 3), np.uint8)
    return ImageSet(
        list(pixels) if as_list else pixels,
        more.pop("labels", np.arange(n) * 10),
        [f"image-{i}" for i in range(n)],
        {"occluded": np.arange(n) % 2 == 0},
        **more,
    )


@pytest.mark.parametrize("as_list", [False, True])
def test_a_subset_takes_rows_of_every_part_in_the_order_asked_for(as_list):
    part = images(as_list=as_list).subset(np.array([3, 0]))
    assert [int(picture[0, 0]) for picture in part.images] == [3, 0]
    assert part.labels.tolist() == [30, 0]
    assert part.relevance.labels.tolist() == [30, 0]
    assert part.ids == ["image-3", "image-0"]
    assert part.attributes["occluded"].tolist() == [False, True]
    assert isinstance(part.images, list if as_list else np.ndarray)


@pytest.mark.parametrize("as_list", [False, True])
def test_images_are_picked_in_the_order_asked_for(as_list):
    picked = images(as_list=as_list).pick(np.array([4, 1, 4]))
    assert [int(picture[0, 0]) for picture in picked] == [4, 1, 4]


def test_a_subset_knows_its_clusters():
    assert images().subset(np.array([3, 0])).cluster is None
    assert images(cluster="occluded").subset(np.array([3, 0])).cluster == "occluded"


def test_a_cluster_that_is_no_attribute_is_refused():
    with pytest.raises(InvalidData, match=r"cluster is 'drawer', .* no attribute; .* are occluded"):
        images(cluster="drawer")


def test_images_match_by_their_labels_unless_said_otherwise():
    given = images(labels=np.array([7, 8, 7, 9, 8]))
    assert isinstance(given.relevance, SameLabel)
    assert given.relevance.totals(given.relevance).tolist() == [2, 2, 2, 1, 2]


def test_a_relevance_that_is_given_decides_also_where_there_are_labels():
    given = images(labels=np.zeros(5, np.int64), relevance=PLACES)
    assert given.relevance is PLACES
    assert given.labels.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("relevance", "matches"),  # of the images 4, 0 and 1 among each other
    [
        (PLACES, [[1, 0, 0], [0, 1, 1], [0, 1, 1]]),
        (SharedLabel.of_lists([[0], [0, 1], [], [2], [1, 2]], 3), [[1, 0, 1], [0, 1, 1], [1] * 3]),
    ],
)
def test_images_without_labels_have_another_relevance(relevance, matches):
    given = images(labels=None, relevance=relevance)
    assert given.labels is None
    part = given.subset(np.array([4, 0, 1]))
    assert part.labels is None
    assert part.ids == ["image-4", "image-0", "image-1"]
    assert type(part.relevance) is type(relevance)
    assert len(part.relevance) == 3
    indptr, columns = part.relevance.pairs(np.arange(3))
    assert indptr.tolist() == np.cumsum([0, *np.sum(matches, 1)]).tolist()
    assert columns.tolist() == np.nonzero(matches)[1].tolist()


def test_neither_labels_nor_a_relevance_is_refused():
    with pytest.raises(InvalidData, match="neither labels nor a relevance: give one"):
        images(labels=None)


@pytest.mark.parametrize(
    ("labels", "ids", "occluded", "named"),
    [(4, 5, 5, "4 labels"), (5, 6, 5, "6 ids"), (5, 5, 0, "0 occluded")],
)
def test_parts_of_different_length_are_refused(labels, ids, occluded, named):
    with pytest.raises(InvalidData, match=f"5 images but {named}"):
        ImageSet(
            np.zeros((5, 2, 2), np.uint8),
            np.zeros(labels, np.int64),
            ["x"] * ids,
            {"occluded": np.zeros(occluded, bool)},
        )


@pytest.mark.parametrize("labels", [None, np.zeros(6, np.int64)])
def test_a_relevance_of_other_length_is_refused(labels):
    with pytest.raises(InvalidData, match="6 images but 5 relevance"):
        images(6, labels=labels, relevance=PLACES)
