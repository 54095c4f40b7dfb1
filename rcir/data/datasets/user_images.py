"""Pictures of your own: in class folders, or listed in a table, CSV or Parquet."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pyarrow import ArrowException
from scipy.sparse import csr_array

from rcir.data.division import Source
from rcir.data.folders import SPLITS, scan_folder
from rcir.data.listing import require_images
from rcir.data.names import composed, require_utf8
from rcir.data.records import ImageSet
from rcir.data.relevance import SharedLabel, WithinRadius
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, printable

HALVES = 1  # sets these draws apart from those of `divide`, which has the same seed
NEEDED = (
    "needed are class folders, FOLDER/apple/1.jpg, or a table (data set 'table') that names the "
    "label or the place of each picture"
)


def read_folder(
    root: Path,
    path: str | Path,
    train: Sequence[str] | None = None,
    open_set: bool = True,
    seed: int = 0,
) -> Source:
    """A folder of class folders, which may be nested.

        fruit/apple/1.jpg             class "apple"
        fruit/pear/conference/2.jpg   class "pear/conference"

    `rcir.data.folders.scan_folder` has the rules: what a picture, a class and a split is, and what
    is skipped. Whether a picture can be decoded shows only when it is used.

    With folders of splits, these are used: `train` trains; `query`, or else `test`, or else `val`
    is the evaluation half; `val` beside another one is the validation split. Without `gallery`, it
    is drawn from the evaluation half, or from `train` if every class of the former is also one of
    `train`.

    Else `open_set` decides: True, and a random half of the classes, rounded up, trains and the
    others, that training never sees, evaluate. False, and the pictures of every class are halved at
    random, the larger half to train and be searched.

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
        InvalidData: no pictures, no class folders, or too few of them; or as `scan_folder`.
        InvalidConfig: `train` does not fit.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as above:
        ...     for name in ("fruit/apple/1.jpg", "fruit/apple/2.jpg", "fruit/pear/1.jpg"):
        ...         (Path(above) / name).parent.mkdir(parents=True, exist_ok=True)
        ...         (Path(above) / name).touch()
        ...     source = read_folder(Path(above), "fruit")
        >>> source.train.ids, source.queries.ids, source.gallery
        (['apple/1.jpg', 'apple/2.jpg'], ['pear/1.jpg'], 'queries')
    """
    folder = root / path
    if not folder.is_dir():
        raise DataUnavailable(f"there is no folder {folder}: name it with data.options.path")
    images, notes = _class_folders(folder)
    splits = images.attributes.get("split")
    if train is not None and (splits is not None or not open_set):
        reason = "open_set is false" if splits is None else f"{folder} has folders of splits"
        raise InvalidConfig(
            f"data.options.train names classes that train, but {reason}: leave it out"
        )
    if splits is not None:
        return published(images, splits, str(folder), notes)
    if open_set:
        return halves_of_classes(images, train, seed, notes)
    return halves_of_each_class(images, seed, notes)


def read_class_folders(
    folder: str | os.PathLike[str], tell: Callable[[str], object] | None = None
) -> ImageSet:
    """The pictures of class folders, with their classes as labels, for instance of a gallery.

    The rules are those of `rcir.data.folders.scan_folder`; pictures that lie in no class folder are
    left out.

    Args:
        folder: of the class folders.
        tell: called with one line if anything is left out.

    Returns:
        Pictures as paths; ids: the paths in the folder; the attributes "class", the name of the
        label, and "split", if the folder is divided into splits.

    Raises:
        DataUnavailable: there is no such folder.
        InvalidData: as `rcir.data.folders.scan_folder`, or there are no class folders.
    """
    if not Path(folder).is_dir():
        raise DataUnavailable(f"there is no folder {folder}: give the folder of the class folders")
    images, notes = _class_folders(Path(folder))
    if notes and tell is not None:
        tell(f"note: {printable('; '.join(notes))}")
    return images


def _class_folders(folder: Path) -> tuple[ImageSet, tuple[str, ...]]:
    """Return the pictures in class folders, and what to say of the others."""
    scanned, notes = scan_folder(folder), list[str]()
    rows = [row for row, label in enumerate(scanned.labels) if label is not None]
    outside = len(scanned.ids) - len(rows)
    if not rows:
        raise InvalidData(f"{folder} has {outside} pictures but no class folders: {NEEDED}")
    if outside:
        notes.append(f"left out: pictures outside of class folders ({outside:,})")
    ids = [scanned.ids[row] for row in rows]
    attributes = {}
    if scanned.splits is not None:
        attributes["split"] = np.array([scanned.splits[row] for row in rows])
    labels = [str(scanned.labels[row]) for row in rows]
    images = labelled([folder / name for name in ids], ids, labels, attributes)
    return images, (*scanned.notes, *notes)


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
    require_utf8(classes, "the labels", "rename them")
    names, labels = np.unique(np.array([*map(composed, classes)], str), return_inverse=True)
    try:
        order = np.argsort([int(name) for name in names], kind="stable")
    except ValueError:
        order = np.arange(len(names))
    numbers = np.argsort(order)[labels].astype(np.int64)
    return ImageSet(paths, numbers, ids, {"class": names[labels], **(attributes or {})})


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
    return Source.of_halves(images, trains, notes)


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


def published(images: ImageSet, splits: NDArray[Any], where: str, notes: tuple[str, ...]) -> Source:
    """Make a source of images whose splits are published.

    Args:
        images: n images.
        splits: (n,) values of `rcir.data.folders.SPLITS`; others are left out.
        where: what states the splits, for messages.
        notes: see `Source`.

    Raises:
        InvalidData: there are no training images, or none to evaluate on.
    """
    rows = {name: np.flatnonzero(splits == name) for name in dict.fromkeys(SPLITS.values())}
    rows = {name: of for name, of in rows.items() if len(of)}
    evaluation = "query" if "query" in rows else "test" if "test" in rows else "val"
    if not {"train", evaluation} <= rows.keys() or {"query", "test"} <= rows.keys():
        counts = ", ".join(f"{name} ({len(of):,})" for name, of in rows.items())
        raise InvalidData(
            f"{where}: the splits are {counts}; needed are train and one of query, test and val "
            "to evaluate on, or images without splits, which are then divided at random"
        )
    if evaluation == "val":
        notes += ("there is no split test: val is used to evaluate",)
    train, queries = images.subset(rows["train"]), images.subset(rows[evaluation])
    validation = None
    if evaluation != "val" and "val" in rows:
        validation = images.subset(rows["val"])
    gallery: ImageSet | Literal["queries", "train"] = "queries"
    if "gallery" in rows:
        gallery = images.subset(rows["gallery"])
    elif train.labels is not None and np.isin(np.asarray(queries.labels), train.labels).all():
        gallery = "train"
    return Source(train, queries, gallery, notes, validation)


COLUMNS = ("path", "label", "labels", "x", "y", "key", "group", "cluster", "split")


def read_table(
    root: Path, path: str | Path, radius: float = 25.0, open_set: bool = True, seed: int = 0
) -> Source:
    """The images of a table: CSV or Parquet, one row per image.

    | column | what |
    |---|---|
    | path | the image file; relative to the table's folder |
    | label | one label; images match if it is equal |
    | labels | several, separated by `;` or `|`, or a Parquet list; images match if they share one |
    | x, y | a place, in metres; images match if they are within a radius |
    | key | a unique name, what a retrieval returns; the path unless given |
    | group | kept as an attribute |
    | cluster | kept as an attribute: images of one cluster were made together |
    | split | train, val, test, query or gallery, in any capitals, see `read_folder` |

    Needed are `path` and exactly one of `label`, `labels`, and `x` with `y`.

    With a column `split` its parts are used; without gallery rows, the gallery is drawn from the
    queries, or from the training images if every `label` of a query is also one of theirs. Else:
    of a column `label`, the labels are halved, or with `open_set` False the images of each label,
    as `read_folder` does; of `labels` or places, a random half of the images,
    rounded up, trains and is searched, the others ask.

    Args:
        root: where a relative `path` starts.
        path: the table, .csv (UTF-8, with a header) or .parquet.
        radius: of places: distance up to which images match.
        open_set: of a column `label`: whether training sees the labels that evaluate.
        seed: decides random halves.

    Returns:
        Images as paths. Attributes: "class", the name of the label; "group"; "cluster". A row
        without any of several labels matches nothing.

    Raises:
        DataUnavailable: the table or an image is not there.
        InvalidData: the table cannot be read, or a column or value is missing, wrong or twice.
        InvalidConfig: the radius is not above 0.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows = ["path,label,split", "1.png,pear,train", "2.png,pear,query"]
        ...     _ = (Path(folder) / "pictures.csv").write_text("\\n".join(rows))
        ...     for name in ("1.png", "2.png"):
        ...         (Path(folder) / name).touch()
        ...     source = read_table(Path(folder), "pictures.csv")
        >>> source.train.ids, source.queries.ids, source.gallery
        (['1.png'], ['2.png'], 'train')
    """
    if not radius > 0 or not np.isfinite(radius):
        raise InvalidConfig(f"data.options.radius is {radius}; it must be above 0")
    file = root / path
    table = _table(file)
    kind = _kind(file, table)
    for name in ("path", "label", "key", "group", "cluster", "split"):
        if name in table:
            table[name] = _text(file, table[name])
    ids = table["key" if "key" in table else "path"]
    _refuse(file, ids, ids.duplicated(), "is there twice, and it names the image")
    require_utf8(ids.tolist(), str(file))
    paths = require_images(file.parent, table.path.tolist(), file.name, "correct the column path")

    attributes = {name: table[name].to_numpy(str) for name in ("group", "cluster") if name in table}
    notes = [f"column {name} was not used" for name in table if name not in COLUMNS]
    if kind == "label":
        images = labelled(paths, ids.tolist(), table.label.tolist(), attributes)
    elif kind == "labels":
        shared = _several(file, table["labels"])
        alone = int((np.diff(shared.labels.indptr) == 0).sum())
        notes += [f"{alone} images have no label and match nothing"] if alone else []
        images = ImageSet(paths, None, ids.tolist(), attributes, shared)
    else:
        places = WithinRadius(_numbers(file, table[["x", "y"]]), float(radius))
        images = ImageSet(paths, None, ids.tolist(), attributes, places)
    if "cluster" in table:
        images = replace(images, cluster="cluster")

    if "split" in table:
        return _published_rows(file, table["split"], images, tuple(notes))
    if kind == "label" and open_set:
        return halves_of_classes(images, None, seed, tuple(notes))
    if kind == "label":
        return halves_of_each_class(images, seed, tuple(notes))
    if len(images) < 2:
        raise InvalidData(f"{file} has one row: at least two are needed, better thousands")
    order = np.random.default_rng((seed, HALVES)).permutation(len(images))
    first, second = np.split(order, [(len(order) + 1) // 2])
    return Source(
        images.subset(np.sort(first)), images.subset(np.sort(second)), "train", tuple(notes)
    )


def read_columns(file: Path) -> dict[str, list[Any]]:
    """The columns of a table of pictures, of which `path` alone is needed.

    Args:
        file: the table, see `read_table`; all of its columns are kept.

    Returns:
        By name: `path`, `key` and `label` as text, `labels` as lists, `x` and `y` as numbers, and
        others as they are; None where a value is missing.

    Raises:
        DataUnavailable, InvalidData: as `read_table`.
    """
    table = _table(file)
    if "path" not in table:
        raise InvalidData(f"{file} has the columns {', '.join(map(str, table))}; needed is path")
    columns: dict[str, list[Any]] = {}
    for name in table:
        values = table[name]
        if name in ("path", "key", "label"):
            values = _text(file, values)
        elif name in ("x", "y"):
            values = pd.Series(_numbers(file, table[[name]])[:, 0])
        elif name == "labels":
            lists = values.str.split(r"[;|]", regex=True) if _is_text(values) else values
            values = lists.map(_names)
        columns[str(name)] = values.astype(object).where(values.notna(), None).tolist()
    ids = table["key" if "key" in table else "path"]
    _refuse(file, ids, ids.duplicated(), "is there twice, and it names the image")
    require_utf8(ids.tolist(), str(file))
    return columns


def _names(entries: Any) -> list[str]:
    """The labels of a picture, a list or nothing."""
    if not isinstance(entries, list | np.ndarray):
        return []
    return [name for name in (str(entry).strip() for entry in entries) if name]


def _table(file: Path) -> pd.DataFrame:
    if not file.is_file():
        raise DataUnavailable(f"there is no table {file}: name it with data.options.path")
    if file.suffix.lower() not in (".csv", ".parquet"):
        raise InvalidData(f"{file} is neither .csv nor .parquet: give one of these")
    try:
        if file.suffix.lower() == ".parquet":
            table = pd.read_parquet(file)
        else:
            with warnings.catch_warnings():
                # Of rows with more fields than the header, which would be cut.
                warnings.simplefilter("error", pd.errors.ParserWarning)
                table = pd.read_csv(
                    file,
                    dtype=str,
                    index_col=False,
                    encoding="utf-8-sig",
                    keep_default_na=False,
                    na_values=[""],
                )
    except (ValueError, OSError, ArrowException, pd.errors.ParserWarning) as error:
        raise InvalidData(f"{file} cannot be read: {error}") from error
    if not len(table):
        raise InvalidData(f"{file} has no rows: one per image is needed")
    return table.reset_index(drop=True)


def _kind(file: Path, table: pd.DataFrame) -> str:
    """Return the columns that decide what matches."""
    present = [name for name in ("label", "labels", "x", "y") if name in table]
    kinds = {("label",): "label", ("labels",): "labels", ("x", "y"): "places"}
    if "path" not in table or tuple(present) not in kinds:
        raise InvalidData(
            f"{file} has the columns {', '.join(map(str, table))}; needed are path and exactly one "
            "of: label, labels, x with y"
        )
    return kinds[tuple(present)]


def _refuse(file: Path, values: pd.Series, wrong: pd.Series, why: str) -> None:
    """Raise if any value is wrong; the first three are named."""
    if wrong.any():
        rows = np.flatnonzero(wrong)
        examples = ", ".join(f"row {row + 1} ({values.iloc[row]!r})" for row in rows[:3])
        raise InvalidData(
            f"{file}: column {values.name} {why}: {len(rows)} of {len(values)} rows, first "
            f"{examples}; the first row below the header is row 1"
        )


def _text(file: Path, values: pd.Series) -> pd.Series:
    missing = values.isna()
    text = values.astype(str).str.strip()
    _refuse(file, values, missing | (text == ""), "is empty")
    return text


def _numbers(file: Path, values: pd.DataFrame) -> NDArray[np.float64]:
    columns = []
    for name in values:
        numbers = pd.to_numeric(values[name], errors="coerce").astype(float)
        _refuse(file, values[name], ~np.isfinite(numbers), "is not a finite number")
        columns.append(numbers.to_numpy())
    return np.column_stack(columns)


def _several(file: Path, values: pd.Series) -> SharedLabel:
    """Read text with separators, or lists; labels are numbered in the order of their names."""
    lists = values.str.split(r"[;|]", regex=True) if _is_text(values) else values
    entries = lists.explode().dropna().astype(str).str.strip()
    entries = entries[entries != ""]
    if not len(entries):
        raise InvalidData(f"{file}: column labels is empty in all rows: nothing would match")
    names, numbers = np.unique(entries.to_numpy(str), return_inverse=True)
    rows = entries.index.to_numpy()
    counts = csr_array(
        (np.ones(len(rows), np.int64), (rows, numbers)), shape=(len(values), len(names))
    )
    return SharedLabel(counts.astype(np.bool_))


def _is_text(values: pd.Series) -> bool:
    values_present = values.dropna()
    return len(values_present) > 0 and all(isinstance(value, str) for value in values_present)


def _published_rows(
    file: Path, split: pd.Series, images: ImageSet, notes: tuple[str, ...]
) -> Source:
    splits = split.str.lower().map(SPLITS)
    _refuse(file, split, splits.isna(), f"is not one of {', '.join(SPLITS)}")
    return published(images, splits.to_numpy(str), f"{file}, column split", notes)


@dataclass(frozen=True)
class Pictures:
    """Pictures and what is known of them.

    Attributes:
        paths: n image files.
        ids: n names, unique: the path in the folder, or from the table.
        columns: what is known, by name, n values each; None where it is not known of a picture.
        notes: what was left out, and why.
    """

    paths: Sequence[Path]
    ids: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: slice) -> Pictures:
        """Return some of them."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Pictures(self.paths[rows], self.ids[rows], columns)


def list_pictures(source: Path) -> Pictures:
    """The pictures of a folder, or of a table that lists them.

    Of a folder, those in class folders have the column ``label``, and those of a folder that is
    divided into splits the column ``split``, see `rcir.data.folders.scan_folder`. Of a table
    (.csv or .parquet) with a column ``path``, relative to the table's folder, all other columns are
    kept: ``labels`` as lists, ``x`` and ``y`` as numbers, and of a .csv the others as text. A
    column ``key`` names the pictures, instead of their paths.

    Raises:
        DataUnavailable: there is no such folder or table, or an image of the table is missing.
        InvalidData: there are no pictures, or the table is wrong; or as `scan_folder`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("apple/1.jpg", "pear/1.jpg", "pear/notes.txt"):
        ...         Path(folder, name).parent.mkdir(exist_ok=True)
        ...         Path(folder, name).touch()
        ...     listing = list_pictures(Path(folder))
        >>> listing.ids, listing.columns
        (['apple/1.jpg', 'pear/1.jpg'], {'label': ['apple', 'pear']})
    """
    if source.is_dir():
        return _of_folder(source)
    if not source.is_file():
        raise DataUnavailable(f"{source} is neither a folder nor a table: give one that is there")
    columns = read_columns(source)
    names = columns.pop("path")
    ids = columns.pop("key", names)
    paths = require_images(source.parent, names, source.name, "correct the column path")
    return Pictures(paths, ids, columns)


def _of_folder(folder: Path) -> Pictures:
    scanned = scan_folder(folder)
    columns: dict[str, list[Any]] = {}
    if any(scanned.labels):
        columns["label"] = scanned.labels
    if scanned.splits is not None:
        columns["split"] = scanned.splits
    paths = [folder / name for name in scanned.ids]
    return Pictures(paths, scanned.ids, columns, scanned.notes)
