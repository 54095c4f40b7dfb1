"""Clothing1M (Xiao et al., CVPR 2015): a million photographs of 14 kinds of clothes.

The labels of a million were taken from the text around them, about four in ten of them wrong; the
labels of another 72,409 were corrected by people.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

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
from rcir.errors import InvalidData

FOLDER = "Clothing1M"
CLASSES = 14
CLEAN = ("train", "val", "test")
GET = "ask the authors of Clothing1M for access, and unpack the annotations and all of the images"


def read(root: Path, noisy: bool = True) -> Source:
    """Train on the noisy and the clean training images, ask the validation, search the test images.

    That is TAHA's protocol, closed set: all halves show the same kinds.

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
    folder = root / FOLDER
    annotations = folder / "annotations"
    index = read_index(annotations if annotations.is_dir() else folder, noisy)
    # The lists name images from the set's folder on: images/0/00/...jpg.
    names = [name for listing in index.values() for name in listing.names]
    require_images(folder, names, "the key lists", GET)
    train = index["train"]
    notes: tuple[str, ...] = ()
    from_text = np.zeros(len(train), bool)
    if noisy:
        more = index["noisy"]
        clean_names = pd.Index([name for part in CLEAN for name in index[part].names])
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


def read_index(folder: Path, noisy: bool = True) -> dict[str, Listing]:
    """The clean images "train", "val" and "test", and with `noisy` the training images "noisy".

    Args:
        folder: that holds `clean_train_key_list.txt` and its siblings, `clean_label_kv.txt`, and
            with `noisy` also `noisy_train_key_list.txt` and `noisy_label_kv.txt`; images are not
            needed.

    Raises:
        DataUnavailable, InvalidData: see `read`.
    """
    keys = {part: f"clean_{part}_key_list.txt" for part in CLEAN}
    labels = dict.fromkeys(CLEAN, "clean_label_kv.txt")
    if noisy:
        keys["noisy"], labels["noisy"] = "noisy_train_key_list.txt", "noisy_label_kv.txt"
    require_files(folder, [*keys.values(), *dict.fromkeys(labels.values())], GET)
    labels_by_file = {file: _labels(folder / file) for file in dict.fromkeys(labels.values())}
    index = {
        part: _listing(folder / file, folder / labels[part], labels_by_file[labels[part]])
        for part, file in keys.items()
    }
    clean = [name for part in CLEAN for name in index[part].names]
    require_unique(f"{folder}: {', '.join(keys[part] for part in CLEAN)}", clean)
    return index


def _labels(path: Path) -> pd.Series:
    """The label of each image, by name."""
    names, values = columns(path, read_lines(path), 2)
    require_unique(path, names)
    labels = whole_numbers(path, values)
    if (labels >= CLASSES).any():
        row = int((labels >= CLASSES).argmax())
        raise InvalidData(
            f"{path}, line {row + 1}: label {labels[row]} is not one of 0 to {CLASSES - 1}: fetch "
            "the file again"
        )
    return pd.Series(labels, pd.Index(names))


def _listing(path: Path, labels: Path, label_of: pd.Series) -> Listing:
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
