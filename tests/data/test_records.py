import numpy as np
import pytest

from rcir.data import ImageSet
from rcir.errors import InvalidData


def images(n=5, as_list=False):
    pixels = np.arange(n, dtype=np.uint8)[:, None, None] + np.zeros((n, 2, 3), np.uint8)
    return ImageSet(
        list(pixels) if as_list else pixels,
        np.arange(n) * 10,
        [f"image-{i}" for i in range(n)],
        {"occluded": np.arange(n) % 2 == 0},
    )


@pytest.mark.parametrize("as_list", [False, True])
def test_a_subset_takes_rows_of_every_part_in_the_order_asked_for(as_list):
    part = images(as_list=as_list).subset(np.array([3, 0]))
    assert [int(picture[0, 0]) for picture in part.images] == [3, 0]
    assert part.labels.tolist() == [30, 0]
    assert part.ids == ["image-3", "image-0"]
    assert part.attributes["occluded"].tolist() == [False, True]
    assert isinstance(part.images, list if as_list else np.ndarray)


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
