"""ChestX-Det (Lian et al., 2021): 3,578 chest X-rays, each with the findings that it shows.

An image may show several of 13 findings, or none of them; images match if they share a finding, or
if neither has one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rcir.data.division import Source
from rcir.data.listing import require_files, require_images, require_unique
from rcir.data.records import ImageSet
from rcir.data.relevance import SharedLabel
from rcir.errors import InvalidData

FOLDER = "ChestX-Det"
FILES = ("ChestX_Det_train.json", "ChestX_Det_test.json")
PLACES = (("train_data", "train"), ("test_data", "test"))
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
GET = "get the annotations and the images from the project ChestX-Det-Dataset of Deepwise AI Lab"


@dataclass(frozen=True)
class Annotations:
    """Contents of one of the annotation files.

    Attributes:
        names: n image files.
        findings: numbers of the findings of each, ascending, in `FINDINGS`; at least one, which is
            that of "Normal" for an image without any.
    """

    names: list[str]
    findings: list[list[int]]


def read(root: Path) -> Source:
    """Train on images of six labels, evaluate on those with none of the six.

    The six are Normal (no finding), Atelectasis, Calcification, Cardiomegaly, Emphysema and
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
    folder = root / FOLDER
    names: list[str] = []
    findings: list[list[int]] = []
    for places, half in zip(PLACES, read_index(folder), strict=True):
        place = next((name for name in places if (folder / name).is_dir()), places[0])
        names += [f"{place}/{name}" for name in half.names]
        findings += half.findings
    require_images(folder, names, " and ".join(FILES), GET)
    trains = np.array([not set(TRAINING_FINDINGS).isdisjoint(numbers) for numbers in findings])
    if trains.all() or not trains.any():
        raise InvalidData(
            f"{folder}: {trains.sum()} of {len(names)} images have a label that trains; there must "
            "be some of these and some others"
        )
    relevance = SharedLabel.of_lists(findings, len(FINDINGS))
    images = ImageSet([folder / name for name in names], None, names, relevance=relevance)
    return Source(
        images.subset(np.flatnonzero(trains)), images.subset(np.flatnonzero(~trains)), "queries"
    )


def read_index(folder: Path) -> tuple[Annotations, Annotations]:
    """The annotations of the official training and test images.

    Args:
        folder: that holds `ChestX_Det_train.json` and `ChestX_Det_test.json`; images are not
            needed.

    Raises:
        DataUnavailable, InvalidData: see `read`.
    """
    train, test = (_annotations(path) for path in require_files(folder, FILES, GET))
    return train, test


def _annotations(path: Path) -> Annotations:
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
    return Annotations(names, findings)
