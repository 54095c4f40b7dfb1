"""Omniglot's background set: 964 handwritten characters of 30 alphabets, 20 drawings of each.

Lake, Salakhutdinov and Tenenbaum, "Human-level concept learning through probabilistic program
induction", Science 2015. The same 20 people drew all characters of an alphabet, and a file's name
ends in the drawer's number, `0001_05.png`.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rcir.data.division import QueryDivision, Source, clusters_of, draw_by_cluster, draw_by_label
from rcir.data.records import ImageSet, Splits
from rcir.errors import DataUnavailable, InvalidData

ARCHIVE = Path("omniglot") / "images_background.zip"
ALPHABETS, DRAWINGS, SIDE = 30, 20, 105


def read(root: Path) -> Source:
    """Read all drawings: the first half of the alphabets by name trains, the others evaluate.

    Published is one set, without halves; `load` draws alphabets instead.

    Args:
        root: folder that holds `omniglot/images_background.zip`.

    Raises:
        DataUnavailable, InvalidData: see `load`.
    """
    every = _read(root / ARCHIVE)
    trains = _alphabets(every) < ALPHABETS // 2
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
    tuning: int = 2500,
    calibration: int = 2500,
    cluster: str | None = None,
    queries: QueryDivision = "shared-labels",
) -> Splits:
    """The splits of Omniglot: every alphabet is in training, in validation or in evaluation.

    Of each character of the other alphabets, `gallery` drawings are searched and the rest are
    queries, drawn apart at random into tuning, calibration and, all that remain, test.

    Args:
        root: folder that holds `omniglot/images_background.zip`.
        seed: decides which alphabet and which drawing is where.
        train, validation: numbers of alphabets; the rest of the 30 are for evaluation.
        gallery: drawings per character.
        tuning, calibration: numbers of queries.
        cluster: "drawer" or "alphabet": tuning, calibration and test queries are then of different
            ones, as many as hold these numbers on average, rounded up. With "drawer", all drawings
            of `gallery` drawers of each alphabet are searched. Training and validation images are
            the same as without.
        queries: "new-labels": tuning, calibration and test queries are of different characters, as
            many as hold these numbers on average, rounded up. It cannot be combined with `cluster`.

    Returns:
        The attributes "alphabet" and "drawer", as in "Greek/05", which is their cluster.

    Raises:
        DataUnavailable: the archive is not there.
        InvalidData: it is not the background set, or a part asks for more than there is.
        InvalidConfig: there is no such attribute, or `queries` and `cluster` are combined.
    """
    if min(train, validation) < 1 or train + validation >= ALPHABETS:
        raise InvalidData(
            f"train {train} + validation {validation} alphabets: each must be at least 1, and some "
            f"of {ALPHABETS} must remain for evaluation"
        )
    every = _read(root / ARCHIVE)
    alphabets = _alphabets(every)
    rng = np.random.default_rng(seed)
    groups = np.split(rng.permutation(ALPHABETS), [train, train + validation])
    rows = [np.flatnonzero(np.isin(alphabets, group)) for group in groups]
    evaluation = rows[2].reshape(-1, DRAWINGS)  # the archive is sorted: a row per character
    shuffled = rng.permuted(evaluation, axis=1)
    if cluster == "drawer":
        order = rng.permuted(np.tile(np.arange(DRAWINGS), (ALPHABETS, 1)), axis=1)
        shuffled = np.take_along_axis(evaluation, order[alphabets[evaluation[:, 0]]], axis=1)
    pool = rng.permutation(shuffled[:, gallery:].reshape(-1))
    if min(gallery, tuning, calibration) < 1 or tuning + calibration >= len(pool):
        raise InvalidData(
            f"gallery {gallery}, tuning {tuning}, calibration {calibration}: each must be at "
            f"least 1, and some of the {len(pool)} queries must remain to test on"
        )
    sizes = {"tuning": tuning, "calibration": calibration}
    if queries == "new-labels":
        parts = [pool[part] for part in draw_by_label(rng, every.subset(pool), sizes, cluster)]
    elif cluster is not None:
        pool_clusters = clusters_of(every, cluster)[pool]
        parts = [pool[part] for part in draw_by_cluster(rng, pool_clusters, sizes)]
    else:
        parts = np.split(pool, [tuning, tuning + calibration])
    first, second, third = parts
    return Splits(
        train=every.subset(rows[0]),
        validation=every.subset(rows[1]),
        gallery=every.subset(shuffled[:, :gallery].reshape(-1)),
        tuning=every.subset(first),
        calibration=every.subset(second),
        test=every.subset(third),
    )


def _alphabets(images: ImageSet) -> NDArray[np.int64]:
    """Numbers of the alphabets, in the order of their names."""
    return np.unique(images.attributes["alphabet"], return_inverse=True)[1].astype(np.int64)


def _read(archive: Path) -> ImageSet:
    """Return images (n, 105, 105), strokes white; sorted by alphabet, character and drawer."""
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
    drawers = np.array([path.stem.rpartition("_")[2] for path in paths])
    if (drawers.reshape(-1, DRAWINGS) != drawers[:DRAWINGS]).any():
        raise InvalidData(
            f"{archive} does not name its drawings of each character by the same {DRAWINGS} "
            f"drawers, {drawers[0]} to {drawers[DRAWINGS - 1]}: fetch it again"
        )
    ids = ["/".join(path.parts[-3:]) for path in paths]
    named = np.char.add(np.char.add(kinds[alphabets], "/"), drawers)
    attributes = {"alphabet": kinds[alphabets], "drawer": named}
    return ImageSet(np.stack(drawings), labels.astype(np.int64), ids, attributes, cluster="drawer")


def _decode(content: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        return 255 - np.asarray(image.convert("L"))
