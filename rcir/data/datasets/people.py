"""People: faces, people seen by several cameras, and chest X-rays."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.division import Source
from rcir.data.listing import (
    Listing,
    columns,
    files_in,
    read_lines,
    require_files,
    require_images,
    require_unique,
    whole_numbers,
)
from rcir.data.records import ImageSet
from rcir.data.relevance import SharedLabel
from rcir.errors import DataUnavailable, InvalidData

LFW_FOLDERS = ("lfw", "lfw-py/lfw_funneled", "lfw-py/lfw", "lfw-py/lfw-deepfunneled")
LFW_FILES = ("peopleDevTrain.txt", "peopleDevTest.txt")
LFW_GET = (
    "get lfw.tgz, or the aligned pictures, and peopleDevTrain.txt and peopleDevTest.txt from the "
    "page of Labeled Faces in the Wild (University of Massachusetts)"
)


def read_lfw(root: Path) -> Source:
    """Labeled Faces in the Wild (Huang et al., 2007): 13,233 photographs of 5,749 people.

    The official development halves, of different people.

    Args:
        root: folder that holds `lfw`, or as torchvision has it `lfw-py/lfw_funneled`, with a folder
            of pictures for each person; in it or beside it `peopleDevTrain.txt` and
            `peopleDevTest.txt`. Of several such folders the first of `LFW_FOLDERS` is read.

    Returns:
        Images as paths; labels: numbers of the people of both halves, sorted by name, from 0; the
        attribute "class", the person's name.

    Raises:
        DataUnavailable: pictures or lists are not there.
        InvalidData: a list is damaged, or a person is in both.
    """
    folder = next((root / name for name in LFW_FOLDERS if (root / name).is_dir()), None)
    if folder is None:
        raise DataUnavailable(f"none of {', '.join(LFW_FOLDERS)} is in {root}: {LFW_GET}")
    inside = any((folder / name).is_file() for name in LFW_FILES)
    halves = read_lfw_index(folder if inside else folder.parent)
    names = [name for half in halves for name in half.names]
    require_images(folder, names, " and ".join(LFW_FILES), LFW_GET)
    train, test = (
        half.images(folder, {"class": np.array([name.split("/")[0] for name in half.names])})
        for half in halves
    )
    return Source(train, test, "queries")


def read_lfw_index(folder: Path) -> tuple[Listing, Listing]:
    """The pictures of the people who train, and of those who evaluate.

    Args:
        folder: that holds `peopleDevTrain.txt` and `peopleDevTest.txt`; images are not needed.

    Raises:
        DataUnavailable, InvalidData: see `read_lfw`.
    """
    people = [_people(path) for path in require_files(folder, LFW_FILES, LFW_GET)]
    if both := people[0].keys() & people[1].keys():
        raise InvalidData(
            f"{folder}: {len(both)} people, for instance {min(both)}, are in both of "
            f"{' and '.join(LFW_FILES)}: fetch them again"
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


MARKET = "Market-1501-v15.09.15"
MARKET_GET = "get Market-1501-v15.09.15.zip from the page of Market-1501"
PARTS = ("bounding_box_train", "query", "bounding_box_test")
NAME = re.compile(r"(-1|\d{1,9})_(c(\d{1,9})s\d+).*")
ENDING = ".jpg"
JUNK = -1


def read_market(root: Path) -> Source:
    """Market-1501 (Zheng et al., ICCV 2015): train on 751 people, ask for 750 among 15,913 images.

    A file's name states person and camera, `0002_c1s1_000451_03.jpg`: person 2, camera 1, and
    which of the camera's sequences, `c1s1`. Person -1 is a bad detection; person 0 in the gallery
    is a distractor, which no query shows.

    The published protocol also takes the images out of a query's results that show the same person
    by the same camera; that is not done here, they count as matches.

    Args:
        root: folder that holds `Market-1501-v15.09.15`: in it `bounding_box_train`, `query` and
            `bounding_box_test`.

    Returns:
        Images as paths; labels: numbers of people; the attributes "camera", its number, and
        "sequence", which is their cluster. Images of person -1 are left out, those
        of person 0 stay in the gallery.

    Raises:
        DataUnavailable: a folder is not there.
        InvalidData: a folder has no images, or one whose name does not state person and camera.
    """
    folder = root / MARKET
    if absent := [part for part in PARTS if not (folder / part).is_dir()]:
        raise DataUnavailable(f"not in {folder}: {', '.join(absent)}; {MARKET_GET}")
    junk, others = 0, 0

    def images(part: str) -> ImageSet:
        nonlocal junk, others
        files = sorted(files_in(folder / part))
        names = [name for name in files if name.lower().endswith(ENDING)]
        listed = [_facts(folder / part, name) for name in names]
        facts = np.array([each[:2] for each in listed], np.int64).reshape(-1, 2)
        rows = np.flatnonzero(facts[:, 0] != JUNK)
        if not len(rows):
            raise InvalidData(f"{folder / part} has no images of people: {MARKET_GET}")
        others += len(files) - len(names)
        junk += len(names) - len(rows)
        ids = [f"{part}/{names[row]}" for row in rows]
        paths = [folder / name for name in ids]
        attributes: dict[str, NDArray[Any]] = {"camera": facts[rows, 1]}
        attributes["sequence"] = np.array([listed[row][2] for row in rows])
        return ImageSet(paths, facts[rows, 0], ids, attributes, cluster="sequence")

    train, queries, gallery = (images(part) for part in PARTS)
    counts = {"images of person -1": junk, f"files that do not end in {ENDING}": others}
    notes = tuple(f"{n} {what} were left out" for what, n in counts.items() if n)
    return Source(train, queries, gallery, notes)


def _facts(folder: Path, name: str) -> tuple[int, int, str]:
    """Person, camera and, as in "c1s1", the camera's sequence."""
    match = NAME.fullmatch(name)
    if match is None:
        raise InvalidData(
            f"{folder / name}: a name starts with person and camera, as in "
            f"0002_c1s1_000451_03{ENDING}: take the file away, or fetch the set again"
        )
    return int(match[1]), int(match[3]), match[2]


CHESTX = "ChestX-Det"
CHESTX_FILES = ("ChestX_Det_train.json", "ChestX_Det_test.json")
CHESTX_PLACES = (("train_data", "train"), ("test_data", "test"))
FINDINGS = (
    "Normal",  # an X-ray without a finding, whose list in the annotations is empty
    *("Atelectasis", "Calcification", "Cardiomegaly", "Consolidation", "Diffuse Nodule"),
    *("Effusion", "Emphysema", "Fibrosis", "Fracture", "Mass", "Nodule"),
    *("Pleural Thickening", "Pneumothorax"),
)
TRAINING_FINDINGS = tuple(
    map(
        FINDINGS.index,
        ("Normal", "Atelectasis", "Calcification", "Cardiomegaly", "Emphysema", "Fibrosis"),
    )
)
CHESTX_GET = (
    "get the annotations and the images from the project ChestX-Det-Dataset of Deepwise AI Lab"
)


def read_chestx(root: Path) -> Source:
    """ChestX-Det (Lian et al., 2021): 3,578 chest X-rays, each with the findings that it shows.

    An image may show several of 13 findings, or none of them; images match if they share a finding,
    or if neither has one. Images of six labels train, and those with none of the six evaluate. The
    six are Normal (no finding), Atelectasis, Calcification, Cardiomegaly, Emphysema and
    Fibrosis, the halves of the code of Cai et al. (AAAI 2025). Both official halves are pooled
    first. A training image may show other findings besides, so those of the evaluation are not all
    new.

    Args:
        root: folder that holds `ChestX-Det`: in it `ChestX_Det_train.json`, `ChestX_Det_test.json`
            and the folders `train_data` and `test_data`, or `train` and `test`.

    Returns:
        Images as paths, without labels: relevance is of shared findings, among which "Normal"
        counts.

    Raises:
        DataUnavailable: annotations or images are not there.
        InvalidData: annotations are damaged, or no images of one half remain.
    """
    folder = root / CHESTX
    names: list[str] = []
    findings: list[list[int]] = []
    indexes = require_files(folder, CHESTX_FILES, CHESTX_GET)
    for places, path in zip(CHESTX_PLACES, indexes, strict=True):
        place = next((name for name in places if (folder / name).is_dir()), places[0])
        of_half = _annotations(path)
        names += [f"{place}/{name}" for name in of_half]
        findings += of_half.values()
    require_images(folder, names, " and ".join(CHESTX_FILES), CHESTX_GET)
    trains = np.array([not set(TRAINING_FINDINGS).isdisjoint(numbers) for numbers in findings])
    if trains.all() or not trains.any():
        raise InvalidData(
            f"{folder}: {trains.sum()} of {len(names)} images have a label that trains; there must "
            "be some of these and some others"
        )
    relevance = SharedLabel.of_lists(findings, len(FINDINGS))
    images = ImageSet([folder / name for name in names], None, names, relevance=relevance)
    return Source.of_halves(images, trains)


def _annotations(path: Path) -> dict[str, list[int]]:
    """Return the numbers of the findings of each image file, ascending, in `FINDINGS`."""
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidData(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(entries, list) or not entries:
        raise InvalidData(f"{path} must hold a list of images: fetch it again")
    number_of = {name: number for number, name in enumerate(FINDINGS)}
    names, findings = [], []
    for place, entry in enumerate(entries, 1):
        name = entry.get("file_name") if isinstance(entry, dict) else None
        symptoms = entry.get("syms") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(symptoms, list):
            raise InvalidData(
                f"{path}, entry {place}: needed are a file_name and the list syms: fetch it again"
            )
        if unknown := [what for what in symptoms if what not in FINDINGS]:
            raise InvalidData(
                f"{path}, entry {place} ({name}): {unknown[0]!r} is none of the findings "
                f"{', '.join(FINDINGS)}"
            )
        names.append(name)
        findings.append(sorted({number_of[what] for what in symptoms or ["Normal"]}))
    require_unique(path, names)
    return dict(zip(names, findings, strict=True))
