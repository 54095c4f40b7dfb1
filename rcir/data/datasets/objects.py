"""Birds, cars, products and clothes: photographs with one label each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rcir.data.division import Source
from rcir.data.listing import (
    Listing,
    columns,
    read_lines,
    read_mat,
    require_files,
    require_images,
    require_same,
    require_unique,
    whole_numbers,
)
from rcir.errors import DataUnavailable, InvalidData

CUB = "CUB_200_2011"
CUB_FILES = ("images.txt", "image_class_labels.txt", "classes.txt")
CUB_GET = "get CUB_200_2011.tgz from the page of CUB-200-2011 and unpack it"


def read_cub(root: Path) -> Source:
    """Caltech-UCSD Birds-200-2011 (Wah et al., 2011): 11,788 photographs of 200 kinds of birds.

    The halves are those of Song et al. (CVPR 2016): kinds 1 to 100 train, 101 to 200 evaluate. Of a
    copy with fewer kinds, those that have images are halved; the first half is rounded up.

    Args:
        root: folder that holds `CUB_200_2011`: in it `images` and the official text files.

    Returns:
        Images as paths; labels from 1 on, as published; the attribute "class", the kind's name.

    Raises:
        DataUnavailable: a text file or an image is not there.
        InvalidData: a text file is damaged, or they do not fit together.
    """
    folder = root / CUB
    listing, classes = read_cub_index(folder)
    present = set(listing.labels.tolist())
    kinds = [number for number in classes if number in present]
    if len(kinds) < 2:
        raise InvalidData(
            f"{folder} has images of {len(kinds)} class: at least two are needed, one to train and "
            "one to evaluate on"
        )
    require_images(folder / "images", listing.names, CUB_FILES[0], CUB_GET)
    names = np.array([classes[number] for number in listing.labels.tolist()])
    images = listing.images(folder / "images", {"class": names})
    trains = np.isin(listing.labels, kinds[: (len(kinds) + 1) // 2])
    return Source.of_halves(images, trains)


def read_cub_index(folder: Path) -> tuple[Listing, dict[int, str]]:
    """The images that the official text files list, and the names of the classes by number.

    Args:
        folder: that holds `images.txt`, `image_class_labels.txt` and `classes.txt`; images are not
            needed.

    Raises:
        DataUnavailable: a file is not there.
        InvalidData: a file is damaged, or they do not fit together.
    """
    images, labels, classes = require_files(folder, CUB_FILES, CUB_GET)
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


CARS = "stanford_cars"
CARS_TRAINING = 98
CARS_WHOLE, CARS_META = "cars_annos.mat", "cars_meta.mat"
CARS_PARTS = {"cars_train": "cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}
CARS_UNLABELLED = "cars_test_annos.mat"
CARS_GET = (
    "get the pictures and cars_annos.mat, or the devkit and cars_test_annos_withlabels.mat, of the "
    "page of the Cars Dataset (Stanford AI Lab)"
)


def read_cars(root: Path) -> Source:
    """Stanford Cars, CAR-196 (Krause et al., 2013): 16,185 photographs of 196 models of cars.

    The halves are those of Song et al. (CVPR 2016), over the images of both official halves: models
    1 to 98 train, 99 to 196 evaluate.

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
    folder = root / CARS
    listing, classes = read_cars_index(folder)
    trains = listing.labels <= CARS_TRAINING
    if trains.all() or not trains.any():
        raise InvalidData(
            f"{folder}: {trains.sum()} of {len(trains)} images are of models 1 to "
            f"{CARS_TRAINING}, which train; there must be some of these and some others"
        )
    require_images(folder, listing.names, "the annotations", CARS_GET)
    images = listing.images(folder, {"class": np.array(classes)[listing.labels - 1]})
    return Source.of_halves(images, trains)


def read_cars_index(folder: Path) -> tuple[Listing, list[str]]:
    """The images of both official halves, and the names of the models, number 1 first.

    Args:
        folder: see `read_cars`; images are not needed.

    Raises:
        DataUnavailable, InvalidData: see `read_cars`.
    """
    if (folder / CARS_WHOLE).is_file():
        paths = {"": folder / CARS_WHOLE}
        classes = _car_names(folder / CARS_WHOLE)
    else:
        paths = {part + "/": _find_cars_file(folder, file) for part, file in CARS_PARTS.items()}
        classes = _car_names(_find_cars_file(folder, CARS_META))
    names: list[str] = []
    labels = []
    for place, path in paths.items():
        files, numbers = read_cars_annotations(path)
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


def read_cars_annotations(path: Path) -> tuple[list[str], NDArray[np.int64] | None]:
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


def _car_names(path: Path) -> list[str]:
    def take(content: Mapping[str, Any]) -> list[str]:
        return [str(name) for name in content["class_names"].reshape(-1).tolist()]

    return read_mat(path, take, squeeze=True)


def _find_cars_file(folder: Path, file: str) -> Path:
    for place in (folder / "devkit", folder):
        if (place / file).is_file():
            return place / file
    unlabelled = any((place / CARS_UNLABELLED).is_file() for place in (folder / "devkit", folder))
    if file == CARS_PARTS["cars_test"] and unlabelled:
        raise DataUnavailable(
            f"{file} is not in {folder} or its devkit: {CARS_UNLABELLED}, which is, has no labels; "
            f"get {file} too"
        )
    raise DataUnavailable(
        f"neither {CARS_WHOLE} nor {file} is in {folder} or its devkit: {CARS_GET}"
    )


PRODUCTS = "Stanford_Online_Products"
PRODUCTS_FILES = ("Ebay_train.txt", "Ebay_test.txt")
PRODUCTS_HEADER = ["image_id", "class_id", "super_class_id", "path"]
PRODUCTS_GET = (
    "get Stanford_Online_Products.zip from the page of Stanford Online Products and unpack it"
)


def read_products(root: Path) -> Source:
    """Stanford Online Products (Song et al., CVPR 2016): 120,053 photographs of 22,634 products.

    The official halves: 59,551 images of 11,318 products train, 60,502 of 11,316 evaluate.

    Args:
        root: folder that holds `Stanford_Online_Products`: in it `Ebay_train.txt`, `Ebay_test.txt`
            and the folders of pictures.

    Returns:
        Images as paths; labels: class_id, as published.

    Raises:
        DataUnavailable: a text file or an image is not there.
        InvalidData: a text file is damaged, or a product is in both.
    """
    folder = root / PRODUCTS
    train, test = read_products_index(folder)
    require_images(folder, train.names + test.names, " and ".join(PRODUCTS_FILES), PRODUCTS_GET)
    return Source(train.images(folder), test.images(folder), "queries")


def read_products_index(folder: Path) -> tuple[Listing, Listing]:
    """The images of the training and of the evaluation half.

    Args:
        folder: that holds `Ebay_train.txt` and `Ebay_test.txt`; images are not needed.

    Raises:
        DataUnavailable, InvalidData: see `read_products`.
    """
    train, test = (
        _products_half(path) for path in require_files(folder, PRODUCTS_FILES, PRODUCTS_GET)
    )
    require_unique(" and ".join(PRODUCTS_FILES), train.names + test.names)
    if both := set(train.labels.tolist()) & set(test.labels.tolist()):
        raise InvalidData(
            f"{folder}: {len(both)} products, for instance {min(both)}, are in both of "
            f"{' and '.join(PRODUCTS_FILES)}: fetch them again"
        )
    return train, test


def _products_half(path: Path) -> Listing:
    lines = read_lines(path)
    if lines[0].split() != PRODUCTS_HEADER:
        raise InvalidData(
            f"{path}, line 1: {lines[0][:80]!r} must be {' '.join(PRODUCTS_HEADER)!r}: fetch "
            "the file again"
        )
    _, products, _, names = columns(path, lines[1:], len(PRODUCTS_HEADER), first=2)
    return Listing(names, whole_numbers(path, products, first=2))


CLOTHES = "Clothing1M"
CLOTHES_CLASSES = 14
CLOTHES_CLEAN = ("train", "val", "test")
CLOTHES_GET = (
    "ask the authors of Clothing1M for access, and unpack the annotations and all of the images"
)


def read_clothes(root: Path, noisy: bool = True) -> Source:
    """Clothing1M (Xiao et al., CVPR 2015): a million photographs of 14 kinds of clothes.

    The labels of a million were taken from the text around them, about four in ten of them wrong;
    the labels of another 72,409 were corrected by people. The noisy and the clean training images
    train, the validation images are queries, the test images are searched: the protocol of Taha et
    al. (2019), closed set, where all halves show the same kinds.

    Args:
        root: folder that holds `Clothing1M`: in it `images` and, there or in `annotations`, the
            official text files.
        noisy: whether the training images with noisy labels train too.

    Returns:
        Images as paths; labels 0 to 13, as published; the attribute "noisy". Noisy images that are
        also in a clean list are left out.

    Raises:
        DataUnavailable: a text file or an image is not there.
        InvalidData: a text file is damaged, or an image has no label.
    """
    folder = root / CLOTHES
    annotations = folder / "annotations"
    index = read_clothes_index(annotations if annotations.is_dir() else folder, noisy)
    # The lists name images from the set's folder on: images/0/00/...jpg.
    names = [name for listing in index.values() for name in listing.names]
    require_images(folder, names, "the key lists", CLOTHES_GET)
    train = index["train"]
    notes: tuple[str, ...] = ()
    from_text = np.zeros(len(train), bool)
    if noisy:
        more = index["noisy"]
        clean_names = pd.Index([name for part in CLOTHES_CLEAN for name in index[part].names])
        new = np.flatnonzero(~pd.Index(more.names).isin(clean_names))
        train = Listing(
            train.names + [more.names[row] for row in new],
            np.concatenate([train.labels, more.labels[new]]),
        )
        from_text = np.arange(len(train)) >= len(from_text)
        if dropped := len(more) - len(new):
            notes = (f"{dropped} noisy images that are in a clean list too were left out",)
    queries, gallery = (
        part.images(folder, {"noisy": np.zeros(len(part), bool)})
        for part in (index["val"], index["test"])
    )
    return Source(train.images(folder, {"noisy": from_text}), queries, gallery, notes)


def read_clothes_index(folder: Path, noisy: bool = True) -> dict[str, Listing]:
    """The clean images "train", "val" and "test", and with `noisy` the training images "noisy".

    Args:
        folder: that holds `clean_train_key_list.txt` and its siblings, `clean_label_kv.txt`, and
            with `noisy` also `noisy_train_key_list.txt` and `noisy_label_kv.txt`; images are not
            needed.

    Raises:
        DataUnavailable, InvalidData: see `read_clothes`.
    """
    keys = {part: f"clean_{part}_key_list.txt" for part in CLOTHES_CLEAN}
    labels = dict.fromkeys(CLOTHES_CLEAN, "clean_label_kv.txt")
    if noisy:
        keys["noisy"], labels["noisy"] = "noisy_train_key_list.txt", "noisy_label_kv.txt"
    require_files(folder, [*keys.values(), *dict.fromkeys(labels.values())], CLOTHES_GET)
    labels_by_file = {
        file: _clothes_labels(folder / file) for file in dict.fromkeys(labels.values())
    }
    index = {
        part: _clothes_listing(folder / file, folder / labels[part], labels_by_file[labels[part]])
        for part, file in keys.items()
    }
    clean = [name for part in CLOTHES_CLEAN for name in index[part].names]
    require_unique(f"{folder}: {', '.join(keys[part] for part in CLOTHES_CLEAN)}", clean)
    return index


def _clothes_labels(path: Path) -> pd.Series:
    """The label of each image, by name."""
    names, values = columns(path, read_lines(path), 2)
    require_unique(path, names)
    labels = whole_numbers(path, values)
    if (labels >= CLOTHES_CLASSES).any():
        row = int((labels >= CLOTHES_CLASSES).argmax())
        raise InvalidData(
            f"{path}, line {row + 1}: label {labels[row]} is not one of 0 to "
            f"{CLOTHES_CLASSES - 1}: fetch the file again"
        )
    return pd.Series(labels, pd.Index(names))


def _clothes_listing(path: Path, labels: Path, label_of: pd.Series) -> Listing:
    (names,) = columns(path, read_lines(path), 1)
    require_unique(path, names)
    rows = label_of.index.get_indexer(names)
    if (rows < 0).any():
        raise InvalidData(
            f"{path} lists {len(names)} images, {(rows < 0).sum()} of which, for instance "
            f"{names[int((rows < 0).argmax())]}, are not among the {len(label_of)} of {labels}: "
            "fetch both again"
        )
    return Listing(names, label_of.to_numpy()[rows])
