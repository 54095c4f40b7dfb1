"""Pictures of your own in class folders.

    fruit/apple/1.jpg             class "apple"
    fruit/pear/conference/2.jpg   class "pear/conference"

A class is the folder that holds its pictures directly. A picture is what has the ending of one;
whether it can be decoded shows only when it is used.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rcir.data.division import Source
from rcir.data.images import ENDINGS
from rcir.data.records import ImageSet
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

HALVES = 1  # sets these draws apart from those of `divide`, which has the same seed
OUTSIDE = "pictures outside of class folders"
NEEDED = (
    "needed are class folders, FOLDER/apple/1.jpg, or a table (data set 'table') that names the "
    "label or the place of each picture"
)


def read(
    root: Path,
    path: str | Path,
    train: Sequence[str] | None = None,
    open_set: bool = True,
    seed: int = 0,
) -> Source:
    """A folder of class folders, which may be nested.

    With folders `train`, `query` and `gallery` directly in it, or `train` and `test`, these are
    the parts. The gallery of `train` and `test` is drawn from `test`, or from `train` if every
    class of `test` is also one of `train`.

    Else `open_set` decides: True, and a random half of the classes, rounded up, trains and the
    others, that training never sees, evaluate. False, and the pictures of every class are halved at
    random, the larger half to train and be searched.

    Hidden files and folders are skipped; links to folders are not followed.

    Args:
        root: where a relative `path` starts.
        path: the folder.
        train: names of the classes that train, instead of a random half of them.
        open_set: see above.
        seed: decides which classes train, or, where `open_set` is False, which pictures.

    Returns:
        Pictures as paths; ids: the paths in the folder; the attribute "class": the class's name.

    Raises:
        DataUnavailable: there is no such folder.
        InvalidData: no pictures, no class folders, or too few of them.
        InvalidConfig: `train` does not fit.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as above:
        ...     for name in ("fruit/apple/1.jpg", "fruit/apple/2.jpg", "fruit/pear/1.jpg"):
        ...         (Path(above) / name).parent.mkdir(parents=True, exist_ok=True)
        ...         (Path(above) / name).touch()
        ...     source = read(Path(above), "fruit")
        >>> source.train.ids, source.queries.ids, source.gallery
        (['apple/1.jpg', 'apple/2.jpg'], ['pear/1.jpg'], 'queries')
    """
    folder = root / path
    if not folder.is_dir():
        raise DataUnavailable(f"there is no folder {folder}: name it with data.options.path")
    names, left_out = _list(folder)
    parts = _parts_in(folder)
    if train is not None and (parts or not open_set):
        raise InvalidConfig(
            "data.options.train names classes that train, but "
            f"{f'{folder} has the parts {parts}' if parts else 'open_set is false'}: leave it away"
        )
    if parts:
        return _published(folder, names, left_out, parts)
    images = labelled(
        [folder / name for name in names], names, [name.rpartition("/")[0] for name in names]
    )
    if open_set:
        return halves_of_classes(images, train, seed, _notes(left_out))
    return halves_of_each_class(images, seed, _notes(left_out))


def labelled(
    paths: Sequence[Path],
    ids: Sequence[str],
    classes: Sequence[str],
    attributes: dict[str, NDArray[np.str_]] | None = None,
) -> ImageSet:
    """Images of one label each, with the attribute "class", its name.

    Args:
        classes: n names; sorted, they get the labels 0, 1, ...; whole numbers in order of size.
    """
    names, labels = np.unique(np.array(classes, str), return_inverse=True)
    try:
        order = np.argsort([int(name) for name in names], kind="stable")
    except ValueError:
        order = np.arange(len(names))
    numbers = np.argsort(order)[labels].astype(np.int64)
    return ImageSet(paths, numbers, ids, {"class": names[labels], **(attributes or {})})


def of_parts(
    images: ImageSet,
    train: NDArray[np.int64],
    queries: NDArray[np.int64],
    gallery: NDArray[np.int64] | None,
    notes: tuple[str, ...],
) -> Source:
    """Rows of published parts. Without a gallery, it is drawn as `read` says."""
    searched: ImageSet | Literal["queries", "train"] = "queries"
    if gallery is not None:
        searched = images.subset(gallery)
    elif images.labels is not None and np.isin(images.labels[queries], images.labels[train]).all():
        searched = "train"
    return Source(images.subset(train), images.subset(queries), searched, notes)


def halves_of_classes(
    images: ImageSet, train: Sequence[str] | None, seed: int, notes: tuple[str, ...]
) -> Source:
    """A random half of the classes, or those named, train; the others evaluate."""
    names, labels = images.attributes["class"], np.asarray(images.labels)
    n = int(labels.max()) + 1
    if n < 2:
        raise InvalidData(
            f"all {len(labels)} images are of one class, {str(names[0])!r}: at least two are "
            "needed, one to train and one to evaluate on; better many"
        )
    if train is None:
        order = np.random.default_rng((seed, HALVES)).permutation(n)
        trains = np.isin(labels, order[: (n + 1) // 2])
    else:
        unknown = sorted(set(train) - set(names.tolist()))
        trains = np.isin(names, [*train])
        if unknown or trains.all() or not trains.any():
            raise InvalidConfig(
                f"data.options.train names {len(train)} of {n} classes"
                f"{f'; there is no {unknown[0]!r}' if unknown else ''}: name some, not all"
            )
    first, second = images.subset(np.flatnonzero(trains)), images.subset(np.flatnonzero(~trains))
    return Source(first, second, "queries", notes)


def halves_of_each_class(images: ImageSet, seed: int, notes: tuple[str, ...]) -> Source:
    """Half of the images of every class, rounded up, trains and is searched; the others ask."""
    order = np.random.default_rng((seed, HALVES)).permutation(len(images))
    labels = np.asarray(images.labels)[order]
    order = order[np.argsort(labels, kind="stable")]
    counts = np.bincount(labels)
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    first, second = np.sort(order[place % 2 == 0]), np.sort(order[place % 2 == 1])
    if not len(second):
        raise InvalidData(
            f"each of the {len(first)} images is alone in its class: at least two of a class are "
            "needed, one to search and one to ask"
        )
    return Source(images.subset(first), images.subset(second), "train", notes)


def _list(folder: Path) -> tuple[list[str], Counter[str]]:
    """Return every picture in its folders, sorted by name, and how many files are left out."""
    names, left_out = [], Counter[str]()
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        left_out["links to folders"] += sum(Path(place, name).is_symlink() for name in folders)
        relative = Path(place).relative_to(folder).as_posix()
        for name in files:
            if name.startswith("."):
                continue
            if not name.lower().endswith(ENDINGS):
                left_out["files without the ending of a picture"] += 1
            elif relative == ".":
                left_out[OUTSIDE] += 1
            else:
                names.append(f"{relative}/{name}")
    if not names:
        outside = left_out[OUTSIDE]
        what = f"{outside} pictures but no class folders" if outside else "no pictures"
        raise InvalidData(f"{folder} has {what}: {NEEDED}; pictures end in {', '.join(ENDINGS)}")
    return sorted(names), left_out


def _parts_in(folder: Path) -> tuple[str, ...]:
    """The names of the folders that are the published parts, if they are there."""
    for parts in (("train", "query", "gallery"), ("train", "test")):
        if all((folder / name).is_dir() for name in parts):
            return parts
    return ()


def _published(
    folder: Path, names: list[str], left_out: Counter[str], parts: tuple[str, ...]
) -> Source:
    tops = [name.partition("/")[0] for name in names]
    for top in tops:
        if top not in parts:
            left_out[f"pictures in {top}"] += 1
    names = [name for name, top in zip(names, tops, strict=True) if top in parts]
    split = [name.split("/") for name in names]
    for part in parts:
        depths = [len(pieces) for pieces in split if pieces[0] == part]
        if min(depths, default=0) < 3:
            raise InvalidData(
                f"{folder / part} has no pictures, or some outside of class folders: {NEEDED}"
            )
    images = labelled(
        [folder / name for name in names], names, ["/".join(pieces[1:-1]) for pieces in split]
    )
    which = np.array([pieces[0] for pieces in split])
    rows = {part: np.flatnonzero(which == part) for part in parts}
    queries = rows["query" if "query" in rows else "test"]
    return of_parts(images, rows["train"], queries, rows.get("gallery"), _notes(left_out))


def _notes(left_out: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{n} {what} were left out" for what, n in sorted(left_out.items()) if n)
