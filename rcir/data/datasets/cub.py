"""Caltech-UCSD Birds-200-2011 (Wah et al., 2011): 11,788 photographs of 200 kinds of birds.

The halves are those of Song et al. (CVPR 2016): kinds 1 to 100 train, 101 to 200 evaluate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rcir.data.division import Source
from rcir.data.listing import (
    Listing,
    columns,
    read_lines,
    require_files,
    require_images,
    require_same,
    require_unique,
    whole_numbers,
)
from rcir.errors import InvalidData

FOLDER = "CUB_200_2011"
FILES = ("images.txt", "image_class_labels.txt", "classes.txt")
GET = "get CUB_200_2011.tgz from the page of CUB-200-2011 and unpack it"


def read(root: Path) -> Source:
    """Train on the first half of the kinds, evaluate on the others.

    Of a copy with fewer kinds, those that have images are halved; the first half is rounded up.

    Args:
        root: folder that holds `CUB_200_2011`: in it `images` and the official text files.

    Returns:
        Images as paths; labels from 1 on, as published; the attribute "class", the kind's name.

    Raises:
        DataUnavailable: a text file or an image is not there.
        InvalidData: a text file is damaged, or they do not fit together.
    """
    folder = root / FOLDER
    listing, classes = read_index(folder)
    present = set(listing.labels.tolist())
    kinds = [number for number in classes if number in present]
    if len(kinds) < 2:
        raise InvalidData(
            f"{folder} has images of {len(kinds)} class: at least two are needed, one to train and "
            "one to evaluate on"
        )
    require_images(folder / "images", listing.names, FILES[0], GET)
    names = np.array([classes[number] for number in listing.labels.tolist()])
    images = listing.images(folder / "images", {"class": names})
    trains = np.isin(listing.labels, kinds[: (len(kinds) + 1) // 2])
    return Source(
        images.subset(np.flatnonzero(trains)), images.subset(np.flatnonzero(~trains)), "queries"
    )


def read_index(folder: Path) -> tuple[Listing, dict[int, str]]:
    """The images that the official text files list, and the names of the classes by number.

    Args:
        folder: that holds `images.txt`, `image_class_labels.txt` and `classes.txt`; images are not
            needed.

    Raises:
        DataUnavailable: a file is not there.
        InvalidData: a file is damaged, or they do not fit together.
    """
    images, labels, classes = require_files(folder, FILES, GET)
    numbers, names = columns(images, read_lines(images), 2)
    labelled, values = columns(labels, read_lines(labels), 2)
    known, titles = columns(classes, read_lines(classes), 2)
    for path, entries in (
        (images, numbers),
        (images, names),
        (labels, labelled),
        (classes, known),
    ):
        require_unique(path, entries)
    require_same(images, numbers, labels, labelled)
    label_of = dict(zip(labelled, whole_numbers(labels, values).tolist(), strict=True))
    title_of = dict(zip(whole_numbers(classes, known).tolist(), titles, strict=True))
    if unknown := sorted(set(label_of.values()) - set(title_of)):
        raise InvalidData(
            f"{labels} has the class {unknown[0]}, which is not in {classes}: fetch both again"
        )
    return Listing(names, np.array([label_of[n] for n in numbers], np.int64)), title_of
