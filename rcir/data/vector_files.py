"""Files of vectors with what is known of each: Parquet, .npz, or .npy with a CSV table beside it.

The columns are those of `VectorTable`; of a .npz file its arrays, of the same names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import DataUnavailable, InvalidData
from rcir.files import read_array
from rcir.printable import printable

MODEL = "rcir.model"  # in the metadata of a Parquet file's schema
TEXT_COLUMNS = ("id", "group", "cluster")
COLUMNS_READ = (*TEXT_COLUMNS, "vector", "label", "labels", "x", "y", "uncertainty")
SEPARATORS = ";|"


@dataclass(frozen=True, eq=False)
class VectorTable:
    """n vectors, and what a file says of them; None where it says nothing.

    Attributes:
        file: its name, for messages.
        vectors: (n, d), column `vector`.
        ids: n names, column `id`.
        labels: (n,) whole numbers or texts, column `label`; or n lists of texts, column `labels`.
        places: (n, 2), columns `x` and `y`.
        uncertainty: (n,), column of that name.
        group, cluster: (n,) texts, columns of that name.
        model: what embedded them.
    """

    file: str
    vectors: NDArray[Any]
    ids: list[str] | None = None
    labels: NDArray[Any] | list[list[str]] | None = None
    places: NDArray[np.float64] | None = None
    uncertainty: NDArray[np.float64] | None = None
    group: NDArray[np.str_] | None = None
    cluster: NDArray[np.str_] | None = None
    model: str | None = None

    def __len__(self) -> int:
        return len(self.vectors)


def read_vectors(path: Path) -> VectorTable:
    """Read a file of vectors.

    Args:
        path: .parquet, with a column `vector` of lists of numbers of one length; .npz, with an
            array `vector` (n, d); or .npy, an array (n, d), beside which lies a table of the same
            name that ends in .csv.

    Raises:
        DataUnavailable: there is no such file.
        InvalidData: it cannot be read, lacks a column, or a value is missing or wrong.
    """
    if not path.is_file():
        raise DataUnavailable(f"there is no file {path}")
    readers = {".parquet": _parquet, ".npz": _npz, ".npy": _npy}
    if path.suffix.lower() not in readers:
        raise InvalidData(f"{path} is none of {', '.join(readers)}: give one of these")
    try:
        columns, model = readers[path.suffix.lower()](path)
    except InvalidData:
        raise
    except Exception as error:  # whoever wrote the file
        raise InvalidData(f"{path} cannot be read: {error}") from error
    return _table(path, columns, model)


def read_matches(path: Path) -> list[tuple[str, str]]:
    """The true matches that a table lists: pairs of a query's id and a gallery item's.

    Args:
        path: .csv or .parquet with the columns `query` and `gallery`.

    Raises:
        DataUnavailable: there is no such file.
        InvalidData: it cannot be read, or lacks a column.
    """
    if not path.is_file():
        raise DataUnavailable(f"there is no table {path}")
    try:
        table = _read_csv(path) if path.suffix.lower() == ".csv" else _read_parquet(path)
    except Exception as error:
        raise InvalidData(f"{path} cannot be read: {error}") from error
    for name in ("query", "gallery"):
        if name not in table.column_names:
            raise _absent(path, name, table.column_names)
    columns = [_texts(path, name, table[name].to_pylist()) for name in ("query", "gallery")]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _parquet(path: Path) -> tuple[dict[str, Any], str | None]:
    table = _read_parquet(path)
    model = (table.schema.metadata or {}).get(MODEL.encode())
    columns = {name: table[name] for name in table.column_names if name in COLUMNS_READ}
    if "vector" not in columns:
        raise _absent(path, "vector", table.column_names)
    found: dict[str, Any] = {"vector": _matrix(path, columns.pop("vector"))}
    found |= {name: values.to_pylist() for name, values in columns.items()}
    return found, None if model is None else model.decode()


def _npz(path: Path) -> tuple[dict[str, Any], str | None]:
    with np.load(path, allow_pickle=False) as archive:
        if "vector" not in archive:
            raise _absent(path, "vector", list(archive))
        columns = {name: archive[name] for name in archive if name in COLUMNS_READ}
        model = str(archive["model"]) if "model" in archive else None
    return {
        name: values if name == "vector" else values.tolist() for name, values in columns.items()
    }, model


def _npy(path: Path) -> tuple[dict[str, Any], str | None]:
    beside = path.with_suffix(".csv")
    if not beside.is_file():
        raise InvalidData(
            f"beside {path} there is no {beside.name}, which says what each vector is of: a table "
            "with a header, and a row for each vector"
        )
    table = _read_csv(beside)
    columns = {name: table[name].to_pylist() for name in table.column_names if name in COLUMNS_READ}
    return columns | {"vector": read_array(path)}, None


def _read_parquet(path: Path) -> Any:
    from pyarrow import parquet

    return parquet.read_table(path)


def _read_csv(path: Path) -> Any:
    """All columns as texts: "007" is another label than "7"."""
    import pyarrow as pa
    from pyarrow import csv

    with csv.open_csv(path) as reader:
        names = reader.schema.names
    types = {name: pa.string() for name in names}
    return csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=types))


def _matrix(path: Path, column: Any) -> NDArray[Any]:
    """(n, d) of a column of lists."""
    import pyarrow as pa

    if not len(column):
        raise InvalidData(f"{path} holds no vectors")
    joined = column.combine_chunks()
    kind = joined.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and (
        not pa.types.is_fixed_size_list(kind)
    ):
        raise InvalidData(f"{path}: column vector is of type {kind}; it must hold lists of numbers")
    if joined.null_count:
        raise InvalidData(f"{path}: {joined.null_count} of {len(joined)} vectors are missing")
    values = joined.flatten()
    lengths = set(joined.value_lengths().unique().to_pylist())
    if len(lengths) != 1:
        some = ", ".join(map(str, sorted(lengths)[:3]))
        raise InvalidData(f"{path}: vectors have different lengths ({some}): give all the same")
    if values.null_count:
        raise InvalidData(f"{path}: {values.null_count} numbers of the vectors are missing")
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(joined), lengths.pop())


def _table(path: Path, columns: dict[str, Any], model: str | None) -> VectorTable:
    vectors = _vectors(path, columns.pop("vector"))
    for name, values in columns.items():
        if len(values) != len(vectors):
            raise InvalidData(
                f"{path}: {len(vectors)} vectors and {len(values)} values of {name}: give one each"
            )
    kinds = [name for name in ("label", "labels", "x") if name in columns]
    if len(kinds) > 1 or ("x" in columns) != ("y" in columns):
        there = [name for name in ("label", "labels", "x", "y") if name in columns]
        raise InvalidData(
            f"{path} has the columns {', '.join(there)}; give at most one of: label, labels, x "
            "with y"
        )
    texts = {name: _texts(path, name, columns[name]) for name in TEXT_COLUMNS if name in columns}
    ids = texts.pop("id", None)
    if ids is not None and len(set(ids.tolist())) < len(ids):
        names, counts = np.unique(ids, return_counts=True)
        shown = ", ".join(printable(name) for name in names[counts > 1][:3].tolist())
        raise InvalidData(f"{path}: some ids come twice ({shown}): name each vector once")
    labels: NDArray[Any] | list[list[str]] | None = None
    places = None
    if "label" in columns:
        labels = _labels(path, columns["label"])
    elif "labels" in columns:
        labels = _lists(path, columns["labels"])
    elif "x" in columns:
        places = np.column_stack([_numbers(path, name, columns[name]) for name in ("x", "y")])
    stated = columns.get("uncertainty")
    return VectorTable(
        path.name,
        vectors,
        None if ids is None else ids.tolist(),
        labels,
        places,
        None if stated is None else _numbers(path, "uncertainty", stated),
        model=model,
        **texts,
    )


def _vectors(path: Path, given: Any) -> NDArray[np.floating[Any]]:
    """(n, d) finite floats; whole numbers become such."""
    vectors = np.asarray(given)
    if vectors.dtype.kind not in "fiu" or vectors.ndim != 2:
        raise InvalidData(
            f"{path}: vectors are of type {vectors.dtype} and have shape {vectors.shape}; they "
            "must be real numbers, (n, d)"
        )
    if not len(vectors):
        raise InvalidData(f"{path} holds no vectors")
    wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(wrong):
        raise InvalidData(
            f"{path}: {len(wrong)} of {len(vectors)} vectors are NaN or infinite, first in row "
            f"{wrong[0] + 1}: leave them out, or embed them anew"
        )
    return vectors if vectors.dtype.kind == "f" else vectors.astype(np.float32)


def _labels(path: Path, values: list[Any]) -> NDArray[Any]:
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return np.array(values, np.int64)
    return _texts(path, "label", values)


def _texts(path: Path, name: str, values: list[Any]) -> NDArray[np.str_]:
    missing = [row for row, value in enumerate(values) if value is None or value == ""]
    if missing:
        raise InvalidData(
            f"{path}: column {name} is empty in {len(missing)} of {len(values)} rows, first in row "
            f"{missing[0] + 1}"
        )
    kinds = {type(value) for value in values}
    if not kinds <= {str, int}:
        named = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidData(
            f"{path}: column {name} holds {named}: give whole numbers or texts throughout"
        )
    return np.array([str(value) for value in values])


def _lists(path: Path, values: list[Any]) -> list[list[str]]:
    """Of lists, or of texts with separators."""
    lists = []
    for value in values:
        if value is None:
            value = []
        if isinstance(value, str):
            for separator in SEPARATORS[1:]:
                value = value.replace(separator, SEPARATORS[0])
            value = [part.strip() for part in value.split(SEPARATORS[0])]
        if not isinstance(value, list) or not all(isinstance(part, str | int) for part in value):
            shown = printable(json.dumps(value, default=str))[:40]
            raise InvalidData(f"{path}: column labels holds {shown}: give lists of texts")
        lists.append([str(part) for part in value if part != ""])
    return lists


def _numbers(path: Path, name: str, values: list[Any]) -> NDArray[np.float64]:
    try:
        numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    except (ValueError, TypeError) as error:
        raise InvalidData(f"{path}: column {name} holds others than numbers ({error})") from error
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        raise InvalidData(
            f"{path}: column {name} is no finite number in {len(wrong)} of {len(numbers)} rows, "
            f"first in row {wrong[0] + 1}"
        )
    return numbers


def _absent(path: Path, column: str, there: list[str]) -> InvalidData:
    known = ", ".join(map(printable, there)) or "none"
    return InvalidData(f"{path} has no column {column}; it has {known}: rename one, or add it")
