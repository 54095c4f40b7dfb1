"""Birds, cars and products: photographs with one label each.

Labels are the published numbers. All readers raise `DataUnavailable` if index files or images are
missing, and `InvalidData` if an index file is damaged or does not fit the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rcir.data.listing import (
    Row,
    parse_whole_number,
    read_lines,
    read_mat,
    read_numbers,
    read_pairs,
    require_files,
    source_of,
)
from rcir.data.records import Source
from rcir.errors import DataUnavailable, InvalidData

CARS_TRAINING = 98
CARS_PARTS = {"cars_train": "cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}
CARS_UNLABELLED = "cars_test_annos.mat"
PRODUCTS_FILES = {"train": "Ebay_train.txt", "query": "Ebay_test.txt"}
PRODUCTS_HEADER = ["image_id", "class_id", "super_class_id", "path"]


def read_cub(root: Path) -> Source:
    """Caltech-UCSD Birds-200-2011 (Wah et al., 2011): 11,788 photographs of 200 kinds of birds.

    The halves are those of Song et al. (CVPR 2016): kinds 1 to 100 train, 101 to 200 evaluate. If a
    copy has fewer kinds, they are halved; the first half is rounded up.

    Args:
        root: folder that holds `CUB_200_2011`: in it `images` and the official text files.

    Returns:
        Images as paths; the attribute "class", the kind's name.
    """
    folder = root / "CUB_200_2011"
    files = ("images.txt", "image_class_labels.txt", "classes.txt")
    images, labels, classes = require_files(folder, files)
    name_of, label_of, title_of = read_pairs(images), read_numbers(labels), read_pairs(classes)
    if alone := name_of.keys() ^ label_of.keys():
        raise InvalidData(
            f"{images} and {labels}: {len(alone)} images, for instance {min(alone)}, are in one of "
            "them only: fetch both again"
        )
    present = {str(label) for label in label_of.values()}
    if unknown := present - title_of.keys():
        raise InvalidData(f"{labels} has the class {min(unknown)}, which {classes} lacks")
    kinds = [number for number in title_of if number in present]
    trains = {int(number) for number in kinds[: (len(kinds) + 1) // 2]}

    def rows() -> Iterator[Row]:
        for number, name in name_of.items():
            label = label_of[number]
            split = "train" if label in trains else "query"
            yield Row(name, split, label, (title_of[str(label)],))

    return source_of(folder / "images", rows(), attributes=["class"])


def read_cars(root: Path) -> Source:
    """Stanford Cars, CAR-196 (Krause et al., 2013): 16,185 photographs of 196 models of cars.

    The halves are those of Song et al. (CVPR 2016), over the images of both official halves: models
    1 to 98 train, 99 to 196 evaluate.

    Args:
        root: folder that holds `stanford_cars`: in it either `cars_annos.mat` and `car_ims`, or
            `cars_train`, `cars_test` and, there or in `devkit`, `cars_meta.mat`,
            `cars_train_annos.mat` and `cars_test_annos_withlabels.mat`.

    Returns:
        Images as paths; the attribute "class", the model's name.
    """
    folder = root / "stanford_cars"
    if (whole := folder / "cars_annos.mat").is_file():
        indexes, meta = {"": whole}, whole
    else:
        indexes = {f"{part}/": _find_cars_file(folder, file) for part, file in CARS_PARTS.items()}
        meta = _find_cars_file(folder, "cars_meta.mat")
    titles = read_mat(meta, lambda content: content["class_names"].tolist(), squeeze=True)

    def rows() -> Iterator[Row]:
        for place, path in indexes.items():
            names, labels = read_mat(path, _cars_annotations, squeeze=True)
            if not set(labels) <= set(range(1, len(titles) + 1)):
                raise InvalidData(
                    f"{path} must have labels from 1 to {len(titles)}: fetch it again"
                )
            for name, label in zip(names, map(int, labels), strict=True):
                split = "train" if label <= CARS_TRAINING else "query"
                yield Row(place + name, split, label, (str(titles[label - 1]),))

    return source_of(folder, rows(), attributes=["class"])


def _cars_annotations(content: Mapping[str, Any]) -> tuple[list[str], list[float]]:
    """Return the image files and their labels; 0 without any."""
    entries = content["annotations"].reshape(-1)
    fields = entries.dtype.names or ()
    names = entries["relative_im_path" if "relative_im_path" in fields else "fname"]
    labels = entries["class"].tolist() if "class" in fields else [0] * len(names)
    return [str(name) for name in names], np.array(labels, np.float64).tolist()


def _find_cars_file(folder: Path, file: str) -> Path:
    places = (folder / "devkit", folder)
    for place in places:
        if (place / file).is_file():
            return place / file
    unlabelled = any((place / CARS_UNLABELLED).is_file() for place in places)
    if file == CARS_PARTS["cars_test"] and unlabelled:
        raise DataUnavailable(f"{file} is not in {folder}, and {CARS_UNLABELLED} has no labels")
    raise DataUnavailable(f"neither cars_annos.mat nor {file} is in {folder} or its devkit")


def read_products(root: Path) -> Source:
    """Stanford Online Products (Song et al., CVPR 2016): 120,053 photographs of 22,634 products.

    The official halves: 59,551 images of 11,318 products train, 60,502 of 11,316 evaluate.

    Args:
        root: folder that holds `Stanford_Online_Products`: in it `Ebay_train.txt`, `Ebay_test.txt`
            and the folders of pictures.
    """
    folder = root / "Stanford_Online_Products"
    paths = require_files(folder, [*PRODUCTS_FILES.values()])

    def rows() -> Iterator[Row]:
        for split, path in zip(PRODUCTS_FILES, paths, strict=True):
            header, *lines = read_lines(path, len(PRODUCTS_HEADER), header=1)
            if header != PRODUCTS_HEADER:
                raise InvalidData(f"{path}, line 1 must be {' '.join(PRODUCTS_HEADER)!r}")
            for line, (_, product, _, name) in enumerate(lines, 2):
                yield Row(name, split, parse_whole_number(path, line, product))

    return source_of(folder, rows())
