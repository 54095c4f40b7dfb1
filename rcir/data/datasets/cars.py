"""Stanford Cars, CAR-196 (Krause et al., 2013): 16,185 photographs of 196 models of cars.

The halves are those of Song et al. (CVPR 2016), over the images of both official halves: models 1
to 98 train, 99 to 196 evaluate.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.division import Source
from rcir.data.listing import Listing, read_mat, require_images, require_unique
from rcir.errors import DataUnavailable, InvalidData

FOLDER = "stanford_cars"
TRAINING_CLASSES = 98
WHOLE, META = "cars_annos.mat", "cars_meta.mat"
PARTS = {"cars_train": "cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}
UNLABELLED = "cars_test_annos.mat"
GET = (
    "get the pictures and cars_annos.mat, or the devkit and cars_test_annos_withlabels.mat, of the "
    "page of the Cars Dataset (Stanford AI Lab)"
)


def read(root: Path) -> Source:
    """Train on models 1 to 98, evaluate on the others.

    Args:
        root: folder that holds `stanford_cars`: in it either `cars_annos.mat` and `car_ims`, or
            `cars_train`, `cars_test` and, there or in `devkit`, `cars_meta.mat`,
            `cars_train_annos.mat` and `cars_test_annos_withlabels.mat`.

    Returns:
        Images as paths; labels 1 to 196, as published; the attribute "class", the model's name.

    Raises:
        DataUnavailable: annotations or images are not there, or those of the test have no labels.
        InvalidData: annotations are damaged.
    """
    folder = root / FOLDER
    listing, classes = read_index(folder)
    trains = listing.labels <= TRAINING_CLASSES
    if trains.all() or not trains.any():
        raise InvalidData(
            f"{folder}: {trains.sum()} of {len(trains)} images are of models 1 to "
            f"{TRAINING_CLASSES}, which train; there must be some of these and some others"
        )
    require_images(folder, listing.names, "the annotations", GET)
    images = listing.images(folder, {"class": np.array(classes)[listing.labels - 1]})
    return Source(
        images.subset(np.flatnonzero(trains)), images.subset(np.flatnonzero(~trains)), "queries"
    )


def read_index(folder: Path) -> tuple[Listing, list[str]]:
    """The images of both official halves, and the names of the models, number 1 first.

    Args:
        folder: see `read`; images are not needed.

    Raises:
        DataUnavailable, InvalidData: see `read`.
    """
    if (folder / WHOLE).is_file():
        paths = {"": folder / WHOLE}
        classes = _classes(folder / WHOLE)
    else:
        paths = {part + "/": _find(folder, file) for part, file in PARTS.items()}
        classes = _classes(_find(folder, META))
    names: list[str] = []
    labels = []
    for place, path in paths.items():
        files, numbers = read_annotations(path)
        if numbers is None or not numbers.size or numbers.min() < 1 or numbers.max() > len(classes):
            stated = "none" if numbers is None else f"{len(numbers)}, not all of them in the range"
            raise InvalidData(
                f"{path}: needed are images with labels from 1 to {len(classes)}, there are "
                f"{stated}: fetch it again"
            )
        require_unique(path, files)
        names += [place + file for file in files]
        labels.append(numbers)
    return Listing(names, np.concatenate(labels)), classes


def read_annotations(path: Path) -> tuple[list[str], NDArray[np.int64] | None]:
    """The files that one annotation file names, and their labels; None if it has no labels.

    Raises:
        InvalidData: it is damaged.
    """

    def take(content: Mapping[str, Any]) -> tuple[list[str], NDArray[np.float64] | None]:
        entries = content["annotations"].reshape(-1)
        fields = entries.dtype.names or ()
        files = entries["relative_im_path" if "relative_im_path" in fields else "fname"]
        labels = np.array(entries["class"].tolist(), np.float64) if "class" in fields else None
        return [str(file) for file in files.tolist()], labels

    names, labels = read_mat(path, take, squeeze=True)
    if labels is None:
        return names, None
    if labels.ndim != 1 or not np.isfinite(labels).all() or (labels % 1).any():
        raise InvalidData(f"{path} has labels that are not whole numbers: fetch it again")
    return names, labels.astype(np.int64)


def _classes(path: Path) -> list[str]:
    def take(content: Mapping[str, Any]) -> list[str]:
        return [str(name) for name in content["class_names"].reshape(-1).tolist()]

    return read_mat(path, take, squeeze=True)


def _find(folder: Path, file: str) -> Path:
    for place in (folder / "devkit", folder):
        if (place / file).is_file():
            return place / file
    unlabelled = any((place / UNLABELLED).is_file() for place in (folder / "devkit", folder))
    if file == PARTS["cars_test"] and unlabelled:
        raise DataUnavailable(
            f"{file} is not in {folder} or its devkit: {UNLABELLED}, which is, has no labels; "
            f"get {file} too"
        )
    raise DataUnavailable(f"neither {WHOLE} nor {file} is in {folder} or its devkit: {GET}")
