"""Data of your own: pictures in class folders or in a table, and sequences of features."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rcir.data.division import shuffle_by_class
from rcir.data.folders import SPLIT_BY_NAME, scan_folder
from rcir.data.labelling import gallery_relevance
from rcir.data.manifest import USED_COLUMNS, list_pictures
from rcir.data.records import ImageSet, Source
from rcir.data.relevance import WithinRadius
from rcir.data.tables import parse_columns
from rcir.data.vector_files import read_vectors
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, printable
from rcir.storage import as_text, is_file, is_folder, join

HALVES_STREAM = 1  # sets these draws apart from those of `divide`, which has the same seed


def read_folder(
    root: Path,
    path: str | Path,
    train: Sequence[str] | None = None,
    open_set: bool = True,
    seed: int = 0,
) -> Source:
    """Read a folder of class folders, by the rules of `rcir.data.folders.scan_folder`.

    Folders of splits are used if there are any: `train` trains; `query`, or else `test`, or else
    `val` is the evaluation half; `val` beside another one is the validation split. Without
    `gallery`, the gallery is drawn from the evaluation half, or from `train` if that has all of its
    classes.

    Args:
        root: where a relative `path` starts.
        path: the folder.
        train: names of the classes that train, instead of a random half of them.
        open_set: without folders of splits, True trains on a random half of the classes, rounded
            up, and evaluates on the others. False halves the pictures of every class at random; the
            larger half trains and is searched.
        seed: decides the random halves.
    """
    folder = join(root, path)
    images, notes = _read_class_folders(folder, "name it with data.options.path")
    splits = images.attributes.get("split")
    if train is not None and (splits is not None or not open_set):
        reason = "open_set is false" if splits is None else f"{folder} has folders of splits"
        raise InvalidConfig(
            f"data.options.train names classes that train, but {reason}: leave it out"
        )
    if splits is not None:
        return _use_splits(images, splits, str(folder), notes)
    return _halve_labels(images, open_set, seed, notes, train)


def read_class_folders(
    folder: str | os.PathLike[str], tell: Callable[[str], object] | None = None
) -> ImageSet:
    """Read class folders, with the classes as labels, for instance of a gallery.

    Args:
        folder: of the class folders, see `rcir.data.folders.scan_folder`; pictures outside of
            class folders are left out.
        tell: called with one line if anything is left out.

    Returns:
        Pictures as paths; ids: the paths in the folder; the attributes "class", the name of the
        label, and "split", if the folder is divided into splits.

    Raises:
        DataUnavailable: there is no such folder.
        InvalidData: as `scan_folder`, or there are no class folders.
    """
    images, notes = _read_class_folders(Path(folder), "pass the folder of the class folders")
    if notes and tell is not None:
        tell(f"note: {printable('; '.join(notes))}")
    return images


def _read_class_folders(folder: Path, remedy: str) -> tuple[ImageSet, tuple[str, ...]]:
    """Return the pictures in class folders, and notes on the others."""
    if not is_folder(folder):
        raise DataUnavailable(f"there is no folder {as_text(folder)}: {remedy}")
    pictures = scan_folder(folder)
    notes = pictures.notes
    if "label" not in pictures.columns:
        raise InvalidData(
            f"{folder} has {len(pictures)} pictures but no class folders: use class folders, "
            "FOLDER/apple/1.jpg, or a table (data set 'table') with the label or place of each"
        )
    outside = {row for row, label in enumerate(pictures.columns["label"]) if label is None}
    if outside:
        notes += (f"left out: pictures outside of class folders ({len(outside):,})",)
    pictures = pictures.without(outside)
    columns = {name: np.array(values, np.str_) for name, values in pictures.columns.items()}
    labels = columns.pop("label").tolist()
    return _label_images(pictures.paths, pictures.ids, labels, columns), notes


def _label_images(
    images: Sequence[Path] | NDArray[np.float32],
    ids: Sequence[str],
    classes: Sequence[str],
    attributes: Mapping[str, NDArray[np.str_]],
) -> ImageSet:
    """Number the sorted names of the classes, whole numbers by size, and keep them as "class"."""
    names, labels = np.unique(np.array(classes, str), return_inverse=True)
    try:
        order = np.argsort([int(name) for name in names], kind="stable")
    except ValueError:
        order = np.arange(len(names))
    numbers = np.argsort(order)[labels].astype(np.int64)
    return ImageSet(images, numbers, ids, {"class": names[labels], **attributes})


def _halve_labels(
    images: ImageSet,
    open_set: bool,
    seed: int,
    notes: tuple[str, ...],
    train: Sequence[str] | None = None,
) -> Source:
    """Train on a random half of the classes, or the named ones, or on half of every class."""
    names, labels = images.attributes["class"], np.asarray(images.labels)
    rng = np.random.default_rng((seed, HALVES_STREAM))
    if not open_set:
        order, place = shuffle_by_class(rng, labels, np.bincount(labels))
        first, second = np.sort(order[place % 2 == 0]), np.sort(order[place % 2 == 1])
        if not len(second):
            raise InvalidData(
                f"each of the {len(first)} images is alone in its class: have at least two images "
                "in some classes, one to search and one to query"
            )
        return Source(images.subset(first), images.subset(second), "train", notes)
    n = int(labels.max()) + 1
    if n < 2:
        raise InvalidData(
            f"all {len(labels)} images are of one class, {str(names[0])!r}: have at least two, one "
            "to train and one to evaluate on; preferably many"
        )
    if train is None:
        trains = np.isin(labels, rng.permutation(n)[: (n + 1) // 2])
    else:
        unknown = sorted(set(train) - set(names.tolist()))
        trains = np.isin(names, [*train])
        if unknown or trains.all() or not trains.any():
            raise InvalidConfig(
                f"data.options.train names {len(train)} of {n} classes"
                f"{f'; there is no {unknown[0]!r}' if unknown else ''}: name some, not all"
            )
    return Source.from_halves(images, trains, notes)


def _use_splits(
    images: ImageSet, splits: NDArray[Any], where: str, notes: tuple[str, ...]
) -> Source:
    """Divide images by their splits (n,), values of `SPLIT_BY_NAME`; others are left out."""
    parts = {
        name: images.subset(np.flatnonzero(splits == name))
        for name in dict.fromkeys(SPLIT_BY_NAME.values())
        if (splits == name).any()
    }
    evaluation = "query" if "query" in parts else "test" if "test" in parts else "val"
    if not {"train", evaluation} <= parts.keys() or {"query", "test"} <= parts.keys():
        counts = ", ".join(f"{name} ({len(part):,})" for name, part in parts.items())
        raise InvalidData(
            f"{where}: the splits are {counts}: use train and exactly one of query and test (or "
            "val), or no splits, so that images are divided at random"
        )
    if evaluation == "val":
        notes += ("there is no split test: val is used to evaluate",)
    train, queries = parts["train"], parts[evaluation]
    is_closed = train.labels is not None and np.isin(np.asarray(queries.labels), train.labels).all()
    drawn_from: Literal["queries", "train"] = "train" if is_closed else "queries"
    validation = None if evaluation == "val" else parts.get("val")
    return Source(train, queries, parts.get("gallery", drawn_from), notes, validation)


def read_table(
    root: Path, path: str | Path, radius: float = 25.0, open_set: bool = True, seed: int = 0
) -> Source:
    """Read the images of a table: CSV, TSV or Parquet, one row per image.

    Its columns are `path` and exactly one of `label`, `labels`, and `x` with `y`; and if wanted
    `key`, `group`, `cluster` and `split`. A column `split` is used like folders of splits
    (`read_folder`). Without it, the labels of a column `label` are halved, or the images of each
    label if `open_set` is False; of `labels` or places, a random half of the images, rounded up,
    trains and is searched, and the others are queries.

    Args:
        root: where a relative `path` starts.
        path: the table.
        radius: of places: distance up to which images match.
        open_set: of a column `label`: whether training sees the labels that evaluate.
        seed: decides random halves.
    """
    if not radius > 0 or not np.isfinite(radius):
        raise InvalidConfig(f"data.options.radius is {radius}; it must be above 0")
    file = join(root, path)
    if not is_file(file):
        raise DataUnavailable(f"there is no table {file}: name it with data.options.path")
    pictures = list_pictures(file)
    paths, ids, table = pictures.paths, pictures.ids, pictures.columns
    matching = tuple(name for name in ("label", "labels", "x", "y") if name in table)
    if matching not in (("label",), ("labels",), ("x", "y")):
        raise InvalidData(
            f"{file} has the columns path, {', '.join(map(printable, table))}; expected path "
            "and exactly one of label, labels, and x with y"
        )
    texts = parse_columns(file, table, ("group", "cluster"))
    attributes = {name: np.array(values, np.str_) for name, values in texts.items()}
    notes = [f"column {name} was not used" for name in table if name not in USED_COLUMNS]
    if "label" in table:
        images = _label_images(paths, ids, table["label"], attributes)
    elif "labels" in table:
        if n_unlabelled := table["labels"].count([]):
            notes.append(f"{n_unlabelled} images have no label and match nothing")
        if n_unlabelled == len(paths):
            raise InvalidData(f"{file}: column labels is empty in all rows: nothing would match")
        images = ImageSet(paths, None, ids, attributes, gallery_relevance(table["labels"], ids)[0])
    else:
        places = WithinRadius(np.column_stack([table["x"], table["y"]]), float(radius))
        images = ImageSet(paths, None, ids, attributes, places)
    if "cluster" in table:
        images = replace(images, cluster="cluster")

    if "split" in table:
        splits = _read_splits(file, table)
        return _use_splits(images, splits, f"{file}, column split", tuple(notes))
    if "label" in table:
        return _halve_labels(images, open_set, seed, tuple(notes))
    if len(images) < 2:
        raise InvalidData(f"{file} has one row: have at least two, preferably thousands")
    order = np.random.default_rng((seed, HALVES_STREAM)).permutation(len(images))
    halves = np.split(order, [(len(order) + 1) // 2])
    train, queries = (images.subset(np.sort(rows)) for rows in halves)
    return Source(train, queries, "train", tuple(notes))


def read_sequences(
    root: Path, path: str | Path, steps: int, open_set: bool = True, seed: int = 0
) -> Source:
    """Read sequences of features, such as those of the frames of a video, for the backbone "lstm".

    A row of the file is a sequence: the column `vector` holds the features of its steps one after
    the other, `label` its label; and if wanted `id`, `group` and `cluster`. Labels are halved as by
    `read_table`.

    Args:
        root: where a relative `path` starts.
        path: a file of vectors, see `rcir.data.vector_files.read_vectors`.
        steps: number of steps of every sequence.
        open_set: whether training sees the labels that evaluate.
        seed: decides random halves.
    """
    file = join(root, path)
    table = read_vectors(file)
    if table.labels is None or isinstance(table.labels, list):
        raise InvalidData(f"{file} has no column label: it must hold the label of each sequence")
    n, length = table.vectors.shape
    if steps < 1 or length % steps:
        raise InvalidConfig(
            f"data.options.steps is {steps}; it must divide {length}, the length of the vectors"
        )
    known = {"group": table.group, "cluster": table.cluster}
    attributes = {name: values for name, values in known.items() if values is not None}
    ids = [str(row) for row in range(n)] if table.ids is None else table.ids
    features = table.vectors.astype(np.float32).reshape(n, steps, -1)
    images = _label_images(features, ids, table.labels.astype(str).tolist(), attributes)
    if table.cluster is not None:
        images = replace(images, cluster="cluster")
    return _halve_labels(images, open_set, seed, ())


def _read_splits(file: Path, table: Mapping[str, Sequence[Any]]) -> NDArray[np.str_]:
    names = parse_columns(file, table, ("split",))["split"]
    for row, name in enumerate(names, 1):
        if name.lower() not in SPLIT_BY_NAME:
            raise InvalidData(
                f"{file}: column split has {printable(repr(name))} in row {row}; it must be one of "
                f"{', '.join(SPLIT_BY_NAME)}"
            )
    return np.array([SPLIT_BY_NAME[name.lower()] for name in names])
