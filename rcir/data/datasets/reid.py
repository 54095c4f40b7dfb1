"""People seen by several cameras: Market-1501 and DukeMTMC-reID, which share one layout.

Market-1501 is of Zheng et al. (ICCV 2015); DukeMTMC-reID of Ristani et al. (ECCVW 2016) and Zheng
et al. (ICCV 2017). A file's name states person and camera, `0002_c1s1_000451_03.jpg`: person 2,
camera 1; in Market-1501 also which of the camera's sequences, `c1s1`. Person -1 is a bad detection;
person 0 in Market-1501's gallery is a distractor, which no query shows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.division import Source
from rcir.data.listing import files_in
from rcir.data.records import ImageSet
from rcir.errors import DataUnavailable, InvalidData

MARKET, DUKE = "Market-1501-v15.09.15", "DukeMTMC-reID"
TRAIN, QUERY, GALLERY = PARTS = ("bounding_box_train", "query", "bounding_box_test")
NAME = re.compile(r"(-1|\d{1,9})_c(\d{1,9})(?!\d)(s\d+)?.*")
ENDING = ".jpg"
JUNK = -1


def read_market(root: Path) -> Source:
    """Market-1501: train on 751 people, ask for 750 others among 15,913 images.

    The published protocol also takes the images out of a query's results that show the same person
    by the same camera; that is not done here, they count as matches.

    Args:
        root: folder that holds `Market-1501-v15.09.15`: in it `bounding_box_train`, `query` and
            `bounding_box_test`.

    Returns:
        Images as paths; labels: numbers of people; the attributes "camera", its number, and, where
        names state it, "sequence", which is their cluster. Images of person -1 are left out, those
        of person 0 stay in the gallery.

    Raises:
        DataUnavailable: a folder is not there.
        InvalidData: a folder has no images, or one whose name does not state person and camera.
    """
    return _read(root / MARKET, "get Market-1501-v15.09.15.zip from the page of Market-1501")


def read_duke(root: Path) -> Source:
    """DukeMTMC-reID: train on 702 people, ask for 702 others; see `read_market`.

    Its authors have withdrawn it, because the people did not agree to be recorded. Results on
    earlier copies can be repeated; it is not for new work.

    Args:
        root: folder that holds `DukeMTMC-reID`.
    """
    return _read(root / DUKE, "its authors have withdrawn it: use another data set")


def _read(folder: Path, get: str) -> Source:
    if absent := [part for part in PARTS if not (folder / part).is_dir()]:
        raise DataUnavailable(f"not in {folder}: {', '.join(absent)}; {get}")
    junk, others = 0, 0

    def images(part: str) -> ImageSet:
        nonlocal junk, others
        files = sorted(files_in(folder / part))
        names = [name for name in files if name.lower().endswith(ENDING)]
        listed = [_facts(folder / part, name) for name in names]
        facts = np.array([each[:2] for each in listed], np.int64).reshape(-1, 2)
        rows = np.flatnonzero(facts[:, 0] != JUNK)
        if not len(rows):
            raise InvalidData(f"{folder / part} has no images of people: {get}")
        others += len(files) - len(names)
        junk += len(names) - len(rows)
        ids = [f"{part}/{names[row]}" for row in rows]
        paths = [folder / name for name in ids]
        attributes: dict[str, NDArray[Any]] = {"camera": facts[rows, 1]}
        sequences = [f"c{listed[row][1]}{listed[row][2]}" for row in rows if listed[row][2]]
        if known := len(sequences) == len(rows):
            attributes["sequence"] = np.array(sequences)
        cluster = "sequence" if known else None
        return ImageSet(paths, facts[rows, 0], ids, attributes, cluster=cluster)

    train, queries, gallery = (images(part) for part in PARTS)
    counts = {"images of person -1": junk, f"files that do not end in {ENDING}": others}
    notes = tuple(f"{n} {what} were left out" for what, n in counts.items() if n)
    return Source(train, queries, gallery, notes)


def _facts(folder: Path, name: str) -> tuple[int, int, str]:
    """Person, camera and, as in "s1", the camera's sequence; empty without such a name."""
    match = NAME.fullmatch(name)
    if match is None:
        raise InvalidData(
            f"{folder / name}: a name starts with person and camera, as in "
            f"0002_c1s1_000451_03{ENDING}: take the file away, or fetch the set again"
        )
    return int(match[1]), int(match[2]), match[3] or ""
