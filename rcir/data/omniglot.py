"""Omniglot's background set: 964 handwritten characters of 30 alphabets, 20 drawings of each.

Lake, Salakhutdinov and Tenenbaum, "Human-level concept learning through probabilistic program
induction", Science 2015.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rcir.data.division import Source
from rcir.data.records import ImageSet, Splits
from rcir.errors import DataUnavailable, InvalidData

ARCHIVE = Path("omniglot") / "images_background.zip"
ALPHABETS, DRAWINGS, SIDE = 30, 20, 105


def read(root: Path) -> Source:
    """All drawings, the first half of the alphabets by name to train, the others to evaluate.

    Published is one set, without halves; `load` draws alphabets instead.

    Args:
        root: folder that holds `omniglot/images_background.zip`.

    Raises:
        DataUnavailable, InvalidData: see `load`.
    """
    images, labels, alphabets, names, ids = _read(root / ARCHIVE)
    every = ImageSet(images, labels, ids, {"alphabet": names[alphabets]})
    trains = alphabets < ALPHABETS // 2
    return Source(
        every.subset(np.flatnonzero(trains)), every.subset(np.flatnonzero(~trains)), "queries"
    )


def load(
    root: Path,
    *,
    seed: int = 0,
    train: int = 12,
    validation: int = 3,
    gallery: int = 4,
    adapter: int = 2500,
    calibration: int = 2500,
) -> Splits:
    """The splits of Omniglot: every alphabet is in training, in validation or in evaluation.

    Of each character of the other alphabets, `gallery` drawings are searched and the rest are
    queries, drawn apart at random into adapter, calibration and, all that remain, test.

    Args:
        root: folder that holds `omniglot/images_background.zip`.
        seed: decides which alphabet and which drawing is where.
        train, validation: numbers of alphabets; the rest of the 30 are for evaluation.
        gallery: drawings per character.
        adapter, calibration: numbers of queries.

    Raises:
        DataUnavailable: the archive is not there.
        InvalidData: it is not the background set, or a part asks for more than there is.
    """
    if min(train, validation) < 1 or train + validation >= ALPHABETS:
        raise InvalidData(
            f"train {train} + validation {validation} alphabets: each must be at least 1, and some "
            f"of {ALPHABETS} must remain for evaluation"
        )
    images, labels, alphabets, names, ids = _read(root / ARCHIVE)
    rng = np.random.default_rng(seed)
    groups = np.split(rng.permutation(ALPHABETS), [train, train + validation])
    rows = [np.flatnonzero(np.isin(alphabets, group)) for group in groups]
    evaluation = rows[2].reshape(-1, DRAWINGS)  # the archive is sorted: a row per character
    evaluation = rng.permuted(evaluation, axis=1)
    queries = rng.permutation(evaluation[:, gallery:].reshape(-1))
    if min(gallery, adapter, calibration) < 1 or adapter + calibration >= len(queries):
        raise InvalidData(
            f"gallery {gallery}, adapter {adapter}, calibration {calibration}: each must be at "
            f"least 1, and some of the {len(queries)} queries must remain to test on"
        )
    first, second, third = np.split(queries, [adapter, adapter + calibration])

    def part(chosen: NDArray[np.int64]) -> ImageSet:
        return ImageSet(
            images[chosen],
            labels[chosen],
            [ids[row] for row in chosen],
            {"alphabet": names[alphabets[chosen]]},
        )

    return Splits(
        train=part(rows[0]),
        validation=part(rows[1]),
        gallery=part(evaluation[:, :gallery].reshape(-1)),
        adapter=part(first),
        calibration=part(second),
        test=part(third),
    )


def _read(
    archive: Path,
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], NDArray[np.str_], list[str]]:
    """Images (n, 105, 105), strokes white; numbers of characters and alphabets; names of both."""
    if not archive.is_file():
        raise DataUnavailable(
            f"{archive} is not there: put Omniglot's images_background.zip there, and name the "
            "folder above it with data.root or the environment variable RCIR_DATA"
        )
    try:
        with zipfile.ZipFile(archive) as opened:
            paths = sorted(
                path
                for path in map(PurePosixPath, opened.namelist())
                if path.suffix == ".png" and len(path.parts) >= 3
            )
            drawings = [_decode(opened.read(str(path))) for path in paths]
    except (
        zipfile.BadZipFile,
        zlib.error,
        OSError,
        ValueError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise InvalidData(f"{archive} is damaged ({error}): fetch it again") from error
    characters, labels = np.unique([str(path.parent) for path in paths], return_inverse=True)
    kinds, alphabets = np.unique([path.parts[-3] for path in paths], return_inverse=True)
    counts = np.bincount(labels)
    shapes = {drawing.shape for drawing in drawings}
    if len(kinds) != ALPHABETS or (counts != DRAWINGS).any() or shapes != {(SIDE, SIDE)}:
        raise InvalidData(
            f"{archive} holds {len(paths)} drawings of {len(characters)} characters in "
            f"{len(kinds)} alphabets, of sizes {sorted(shapes)}; Omniglot's background set has "
            f"{DRAWINGS} of each character in {ALPHABETS} alphabets, of size {(SIDE, SIDE)}"
        )
    ids = ["/".join(path.parts[-3:]) for path in paths]
    return np.stack(drawings), labels.astype(np.int64), alphabets.astype(np.int64), kinds, ids


def _decode(content: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(content)) as image:
        return 255 - np.asarray(image.convert("L"))
