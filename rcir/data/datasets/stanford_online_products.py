"""Stanford Online Products (Song et al., CVPR 2016): 120,053 photographs of 22,634 products."""

from __future__ import annotations

from pathlib import Path

from rcir.data.division import Source
from rcir.data.listing import (
    Listing,
    columns,
    read_lines,
    require_files,
    require_images,
    require_unique,
    whole_numbers,
)
from rcir.errors import InvalidData

FOLDER = "Stanford_Online_Products"
FILES = ("Ebay_train.txt", "Ebay_test.txt")
HEADER = ["image_id", "class_id", "super_class_id", "path"]
GET = "get Stanford_Online_Products.zip from the page of Stanford Online Products and unpack it"


def read(root: Path) -> Source:
    """The official halves: 59,551 images of 11,318 products train, 60,502 of 11,316 evaluate.

    Args:
        root: folder that holds `Stanford_Online_Products`: in it `Ebay_train.txt`, `Ebay_test.txt`
            and the folders of pictures.

    Returns:
        Images as paths; labels: class_id, as published.

    Raises:
        DataUnavailable: a text file or an image is not there.
        InvalidData: a text file is damaged, or a product is in both.
    """
    folder = root / FOLDER
    train, test = read_index(folder)
    require_images(folder, train.names + test.names, " and ".join(FILES), GET)
    return Source(train.images(folder), test.images(folder), "queries")


def read_index(folder: Path) -> tuple[Listing, Listing]:
    """The images of the training and of the evaluation half.

    Args:
        folder: that holds `Ebay_train.txt` and `Ebay_test.txt`; images are not needed.

    Raises:
        DataUnavailable, InvalidData: see `read`.
    """
    train, test = (_half(path) for path in require_files(folder, FILES, GET))
    require_unique(" and ".join(FILES), train.names + test.names)
    if both := set(train.labels.tolist()) & set(test.labels.tolist()):
        raise InvalidData(
            f"{folder}: {len(both)} products, for instance {min(both)}, are in both of "
            f"{' and '.join(FILES)}: fetch them again"
        )
    return train, test


def _half(path: Path) -> Listing:
    lines = read_lines(path)
    if lines[0].split() != HEADER:
        raise InvalidData(
            f"{path}, line 1: {lines[0][:80]!r} must be {' '.join(HEADER)!r}: fetch the file again"
        )
    _, products, _, names = columns(path, lines[1:], len(HEADER), first=2)
    return Listing(names, whole_numbers(path, products, first=2))
