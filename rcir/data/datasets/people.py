"""People: seen by several cameras, and on chest X-rays.

All readers raise `DataUnavailable` if index files or images are missing, and `InvalidData` if an
index file is damaged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rcir.data.listing import LEFT_OUT, Row, require_files, source_of
from rcir.data.records import Source
from rcir.data.relevance import SharedLabel
from rcir.errors import DataUnavailable, InvalidData
from rcir.storage import list_files

MARKET_PARTS = {"train": "bounding_box_train", "query": "query", "gallery": "bounding_box_test"}
MARKET_NAME = re.compile(r"(-1|\d{1,9})_(c(\d{1,9})s\d+).*")
MARKET_ENDING = ".jpg"
JUNK_PERSON = -1
CHESTX_FILES = ("ChestX_Det_train.json", "ChestX_Det_test.json")
CHESTX_PLACES = (("train_data", "train"), ("test_data", "test"))
FINDINGS = (
    "Normal",  # an X-ray without a finding, whose list in the annotations is empty
    *("Atelectasis", "Calcification", "Cardiomegaly", "Consolidation", "Diffuse Nodule"),
    *("Effusion", "Emphysema", "Fibrosis", "Fracture", "Mass", "Nodule"),
    *("Pleural Thickening", "Pneumothorax"),
)
TRAINING_FINDINGS = frozenset(
    ("Normal", "Atelectasis", "Calcification", "Cardiomegaly", "Emphysema", "Fibrosis")
)


def read_market(root: Path) -> Source:
    """Market-1501 (Zheng et al., ICCV 2015): 751 people train, 750 are queried in 15,913 images.

    A file's name states person and camera, `0002_c1s1_000451_03.jpg`: person 2, camera 1, and
    which of the camera's sequences, `c1s1`. Person -1 is a bad detection; person 0 in the gallery
    is a distractor, which no query shows.

    The published protocol also drops results that show the same person by the same camera; here
    they count as matches, unless vectors are searched with clusters (docs/vectors.md).

    Args:
        root: folder that holds `Market-1501-v15.09.15`: in it `bounding_box_train`, `query` and
            `bounding_box_test`.

    Returns:
        Images as paths; labels: numbers of people; the attributes "camera", its number, and
        "sequence", which is their cluster. Images of person -1 are left out, those of person 0 stay
        in the gallery.
    """
    folder = root / "Market-1501-v15.09.15"
    if absent := [part for part in MARKET_PARTS.values() if not (folder / part).is_dir()]:
        raise DataUnavailable(f"not in {folder}: {', '.join(absent)}")

    def rows() -> Iterator[Row]:
        for split, part in MARKET_PARTS.items():
            for name in sorted(list_files(folder / part)):
                file, match = f"{part}/{name}", MARKET_NAME.fullmatch(name)
                if not name.lower().endswith(MARKET_ENDING):
                    yield Row(file, LEFT_OUT, f"files that do not end in {MARKET_ENDING}")
                elif match is None:
                    raise InvalidData(
                        f"{folder / file}: names must start with person and camera, as in "
                        "0002_c1s1_000451_03.jpg: remove the file, or fetch the set again"
                    )
                elif int(match[1]) == JUNK_PERSON:
                    yield Row(file, LEFT_OUT, f"images of person {JUNK_PERSON}")
                else:
                    yield Row(file, split, int(match[1]), (int(match[3]), match[2]))

    attributes = ["camera", "sequence"]
    return source_of(folder, rows(), [*MARKET_PARTS], attributes=attributes, cluster="sequence")


def read_chestx(root: Path) -> Source:
    """ChestX-Det (Lian et al., 2021): 3,578 chest X-rays, each with the findings that it shows.

    An image may show several of 13 findings, or none of them; images match if they share a finding,
    or if neither has one. Images of six labels train, and those with none of the six evaluate. The
    six are Normal (no finding), Atelectasis, Calcification, Cardiomegaly, Emphysema and
    Fibrosis, the halves of the code of Cai et al. (AAAI 2025). Both official halves are pooled
    first. A training image may also show findings of the evaluation.

    Args:
        root: folder that holds `ChestX-Det`: in it `ChestX_Det_train.json`, `ChestX_Det_test.json`
            and the folders `train_data` and `test_data`, or `train` and `test`.

    Returns:
        Images as paths, without labels: relevance is of shared findings, among which "Normal"
        counts.
    """
    folder = root / "ChestX-Det"

    def rows() -> Iterator[Row]:
        for places, path in zip(CHESTX_PLACES, require_files(folder, CHESTX_FILES), strict=True):
            place = next((name for name in places if (folder / name).is_dir()), places[0])
            for name, findings in _annotations(path):
                split = "query" if TRAINING_FINDINGS.isdisjoint(findings) else "train"
                yield Row(f"{place}/{name}", split, sorted({FINDINGS.index(x) for x in findings}))

    def relevance(_: str, findings: Sequence[list[int]]) -> SharedLabel:
        return SharedLabel.from_lists(findings, len(FINDINGS))

    return source_of(folder, rows(), relevance=relevance)


def _annotations(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each image file and its findings."""
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidData(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(entries, list):
        raise InvalidData(f"{path} must hold a list of images: fetch it again")
    for number, entry in enumerate(entries, 1):
        match entry:
            case {"file_name": str(name), "syms": list(findings)}:
                findings = findings or ["Normal"]
            case _:
                raise InvalidData(f"{path}, entry {number} lacks a file_name or the list syms")
        if unknown := [finding for finding in findings if finding not in FINDINGS]:
            raise InvalidData(
                f"{path}, entry {number} ({name}): {unknown[0]!r} is not one of the findings "
                f"{', '.join(FINDINGS)}"
            )
        yield name, findings
