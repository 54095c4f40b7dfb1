"""Pictures of your own, listed in a table: CSV or Parquet, one row per image.

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
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pyarrow import ArrowException
from scipy.sparse import csr_array

from rcir.data.datasets.folder import (
    HALVES,
    halves_of_classes,
    halves_of_each_class,
    labelled,
    of_parts,
)
from rcir.data.division import Source
from rcir.data.listing import require_images
from rcir.data.records import ImageSet
from rcir.data.relevance import SharedLabel, WithinRadius
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

COLUMNS = ("path", "label", "labels", "x", "y", "key", "group", "cluster", "split")
SPLITS = ("train", "query", "gallery")


def read(
    root: Path, path: str | Path, radius: float = 25.0, open_set: bool = True, seed: int = 0
) -> Source:
    """The images of a table.

    With a column `split` its parts are used; without gallery rows, the gallery is drawn from the
    queries, or from the training images if every `label` of a query is also one of theirs. Else:
    of a column `label`, the labels are halved, or with `open_set` False the images of each label,
    as `rcir.data.datasets.folder.read` does; of `labels` or places, a random half of the images,
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
        ...     source = read(Path(folder), "pictures.csv")
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
        return _published(file, table["split"], images, tuple(notes))
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
        file: the table, see `read`; all of its columns are kept.

    Returns:
        By name: `path`, `key` and `label` as text, `labels` as lists, `x` and `y` as numbers, and
        others as they are; None where a value is missing.

    Raises:
        DataUnavailable, InvalidData: as `read`.
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


def _published(file: Path, split: pd.Series, images: ImageSet, notes: tuple[str, ...]) -> Source:
    _refuse(file, split, ~split.isin(SPLITS), f"is not one of {', '.join(SPLITS)}")
    rows = {name: np.flatnonzero(split == name) for name in SPLITS}
    if not len(rows["train"]) or not len(rows["query"]):
        raise InvalidData(
            f"{file}: column split has {', '.join(f'{len(rows[name])} {name}' for name in SPLITS)} "
            "rows; train and query are needed"
        )
    gallery = rows["gallery"] if len(rows["gallery"]) else None
    return of_parts(images, rows["train"], rows["query"], gallery, notes)
