"""Pictures of your own: in class folders, or listed in a table, CSV or Parquet."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pyarrow import ArrowException
from scipy.sparse import csr_array

from rcir.data.division import Source
from rcir.data.images import ENDINGS
from rcir.data.listing import require_images
from rcir.data.records import ImageSet
from rcir.data.relevance import SharedLabel, WithinRadius
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

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

    A class is the folder that holds its pictures directly. A picture is what has the ending of one;
    whether it can be decoded shows only when it is used.

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
        ...     source = read_folder(Path(above), "fruit")
        >>> source.train.ids, source.queries.ids, source.gallery
        (['apple/1.jpg', 'apple/2.jpg'], ['pear/1.jpg'], 'queries')
    """
    folder = root / path
    if not folder.is_dir():
        raise DataUnavailable(f"there is no folder {folder}: name it with data.options.path")
    pictures, left_out = _pictures_in(folder)
    names = [name for name in pictures if "/" in name]
    left_out["pictures outside of class folders"] = outside = len(pictures) - len(names)
    if not names:
        what = f"{outside} pictures but no class folders" if outside else "no pictures"
        raise InvalidData(f"{folder} has {what}: {NEEDED}; pictures end in {', '.join(ENDINGS)}")
    layouts = (("train", "query", "gallery"), ("train", "test"))
    parts = next((x for x in layouts if all((folder / name).is_dir() for name in x)), ())
    if train is not None and (parts or not open_set):
        raise InvalidConfig(
            "data.options.train names classes that train, but "
            f"{f'{folder} has the parts {parts}' if parts else 'open_set is false'}: leave it away"
        )
    if parts:
        return _published_folders(folder, names, left_out, parts)
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
    """Rows of published parts. Without a gallery, it is drawn as `read_folder` says."""
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


def _pictures_in(folder: Path) -> tuple[list[str], Counter[str]]:
    """Return every picture below a folder, sorted by name, and how much else is left out."""
    names, left_out = [], Counter[str]()
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        left_out["links to folders"] += sum(Path(place, name).is_symlink() for name in folders)
        relative = Path(place).relative_to(folder)
        for name in files:
            if name.startswith("."):
                continue
            if name.lower().endswith(ENDINGS):
                names.append((relative / name).as_posix())
            else:
                left_out["files without the ending of a picture"] += 1
    return sorted(names), left_out


def _published_folders(
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


COLUMNS = ("path", "label", "labels", "x", "y", "key", "group", "cluster", "split")
SPLITS = ("train", "query", "gallery")


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
    | split | train, query or gallery |

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
    paths = [file.parent / name for name in table.path]
    require_images(file.parent, table.path.tolist(), file.name, "correct the column path")

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
    require_images(file.parent, columns["path"], file.name, "correct the column path")
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
    _refuse(file, split, ~split.isin(SPLITS), f"is not one of {', '.join(SPLITS)}")
    rows = {name: np.flatnonzero(split == name) for name in SPLITS}
    if not len(rows["train"]) or not len(rows["query"]):
        raise InvalidData(
            f"{file}: column split has {', '.join(f'{len(rows[name])} {name}' for name in SPLITS)} "
            "rows; train and query are needed"
        )
    gallery = rows["gallery"] if len(rows["gallery"]) else None
    return of_parts(images, rows["train"], rows["query"], gallery, notes)


@dataclass(frozen=True)
class Pictures:
    """Pictures and what is known of them.

    Attributes:
        paths: n image files.
        ids: n names, unique: the path in the folder, or from the table.
        columns: what is known, by name, n values each; None where it is not known of a picture.
    """

    paths: Sequence[Path]
    ids: Sequence[str]
    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: slice) -> Pictures:
        """Return some of them."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Pictures(self.paths[rows], self.ids[rows], columns)


def list_pictures(source: Path) -> Pictures:
    """The pictures of a folder, or of a table that lists them.

    Of a folder, those in its folders have the column ``label``, the name of the folder that holds
    them directly; hidden files and folders are skipped, links to folders not followed. Of a table
    (.csv or .parquet) with a column ``path``, relative to the table's folder, all other columns are
    kept: ``labels`` as lists, ``x`` and ``y`` as numbers, and of a .csv the others as text. A
    column ``key`` names the pictures, instead of their paths.

    Raises:
        DataUnavailable: there is no such folder or table, or an image of the table is missing.
        InvalidData: there are no pictures, or the table is wrong.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("apple/1.jpg", "pear/1.jpg", "pear/notes.txt"):
        ...         Path(folder, name).parent.mkdir(exist_ok=True)
        ...         Path(folder, name).touch()
        ...     found = list_pictures(Path(folder))
        >>> found.ids, found.columns
        (['apple/1.jpg', 'pear/1.jpg'], {'label': ['apple', 'pear']})
    """
    if source.is_dir():
        return _of_folder(source)
    if not source.is_file():
        raise DataUnavailable(f"{source} is neither a folder nor a table: give one that is there")
    columns = read_columns(source)
    names = columns.pop("path")
    ids = columns.pop("key", names)
    return Pictures([source.parent / name for name in names], ids, columns)


def _of_folder(folder: Path) -> Pictures:
    ids, _ = _pictures_in(folder)
    if not ids:
        raise InvalidData(f"{folder} has no pictures; pictures end in {', '.join(ENDINGS)}")
    try:
        "\n".join(ids).encode()
    except UnicodeEncodeError as error:
        name = "\n".join(ids)[: error.end].rpartition("\n")[2]
        raise InvalidData(
            f"{folder} holds a file or folder whose name is not UTF-8, {name!r}: rename it, since "
            "the vectors are stored with the names"
        ) from error
    labels = [name.rpartition("/")[0] or None for name in ids]
    columns = {"label": labels} if any(labels) else {}
    return Pictures([folder / name for name in ids], ids, columns)
