"""Labeled Faces in the Wild (Huang et al., 2007): 13,233 photographs of 5,749 people."""

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
    require_unique,
    whole_numbers,
)
from rcir.errors import DataUnavailable, InvalidData

FOLDERS = ("lfw", "lfw-py/lfw_funneled", "lfw-py/lfw", "lfw-py/lfw-deepfunneled")
FILES = ("peopleDevTrain.txt", "peopleDevTest.txt")
GET = (
    "get lfw.tgz, or the aligned pictures, and peopleDevTrain.txt and peopleDevTest.txt from the "
    "page of Labeled Faces in the Wild (University of Massachusetts)"
)


def read(root: Path) -> Source:
    """The official development halves, of different people.

    Args:
        root: folder that holds `lfw`, or as torchvision has it `lfw-py/lfw_funneled`, with a folder
            of pictures for each person; in it or beside it `peopleDevTrain.txt` and
            `peopleDevTest.txt`. Of several such folders the first of `FOLDERS` is read.

    Returns:
        Images as paths; labels: numbers of the people of both halves, sorted by name, from 0; the
        attribute "class", the person's name.

    Raises:
        DataUnavailable: pictures or lists are not there.
        InvalidData: a list is damaged, or a person is in both.
    """
    folder = next((root / name for name in FOLDERS if (root / name).is_dir()), None)
    if folder is None:
        raise DataUnavailable(f"none of {', '.join(FOLDERS)} is in {root}: {GET}")
    inside = any((folder / name).is_file() for name in FILES)
    halves = read_index(folder if inside else folder.parent)
    names = [name for half in halves for name in half.names]
    require_images(folder, names, " and ".join(FILES), GET)
    train, test = (
        half.images(folder, {"class": np.array([name.split("/")[0] for name in half.names])})
        for half in halves
    )
    return Source(train, test, "queries")


def read_index(folder: Path) -> tuple[Listing, Listing]:
    """The pictures of the people who train, and of those who evaluate.

    Args:
        folder: that holds `peopleDevTrain.txt` and `peopleDevTest.txt`; images are not needed.

    Raises:
        DataUnavailable, InvalidData: see `read`.
    """
    people = [_people(path) for path in require_files(folder, FILES, GET)]
    if both := people[0].keys() & people[1].keys():
        raise InvalidData(
            f"{folder}: {len(both)} people, for instance {min(both)}, are in both of "
            f"{' and '.join(FILES)}: fetch them again"
        )
    number = {name: n for n, name in enumerate(sorted([*people[0], *people[1]]))}
    train, test = (
        Listing(
            [f"{name}/{name}_{k:04d}.jpg" for name, n in half.items() for k in range(1, n + 1)],
            np.array([number[name] for name, n in half.items() for _ in range(n)], np.int64),
        )
        for half in people
    )
    return train, test


def _people(path: Path) -> dict[str, int]:
    """Return the number of pictures of each person; the first line has the number of people."""
    lines = read_lines(path)
    ((announced,),) = columns(path, lines[:1], 1)
    names, counts = columns(path, lines[1:], 2, first=2)
    require_unique(path, names)
    n = int(whole_numbers(path, [announced])[0])
    numbers = whole_numbers(path, counts, first=2)
    # A picture's number has four digits.
    wrong = (numbers < 1) | (numbers > 9999)
    if n != len(names) or wrong.any():
        raise InvalidData(
            f"{path} announces {n} people and lists {len(names)}, of whom {wrong.sum()} have no "
            "picture or more than 9999: fetch it again"
        )
    return dict(zip(names, numbers.tolist(), strict=True))
