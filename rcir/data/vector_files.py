"""Files of vectors with what is known of each: Parquet, .npz, or .npy with a CSV table beside it.

The columns are those of `VectorTable`; of a .npz file its arrays, of the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rcir.data.bursts import as_seconds
from rcir.data.names import require_unique
from rcir.data.tables import (
    is_list,
    list_values,
    missing_column,
    parse_columns,
    read_csv,
    read_parquet,
    read_schema,
)
from rcir.errors import DataUnavailable, InvalidData
from rcir.files import read_array, write_file, written_aside
from rcir.storage import as_text, is_file, is_folder, is_uri, list_files
from rcir.stored_vectors import StoredVectors

# In the metadata of a Parquet file's schema: what embedded the vectors; the number of shards; a
# digest of what the vectors were made of; and, as JSON, ids and reasons of what was left out.
MODEL_KEY, SHARDS_KEY = "rcir.model", "rcir.shards"
SOURCE_KEY, REJECTS_KEY = "rcir.source", "rcir.rejects"
SHARD = re.compile(r"part-.*\.parquet")
CLUSTER = "cluster"  # the column of clusters, unless another one is named
MATCH_COLUMNS = ("label", "labels", "x", "y")  # of what defines matches
COLUMNS_READ = ("id", "group", CLUSTER, *MATCH_COLUMNS, "uncertainty", "vector", "time")
NAMED_COLUMNS = (CLUSTER, "key", "encounter")  # read from columns that the user names
SHARED_FIELDS = ("ids", "labels", "places", "uncertainty", "group", "times", *NAMED_COLUMNS)
# Columns or arrays of a file by name; the model; and the names of all of them
_Columns: TypeAlias = tuple[dict[str, Any], str | None, list[str]]


@dataclass(frozen=True, eq=False)
class VectorTable:
    """n vectors, and the other columns of a file; None for columns that it lacks."""

    file: str  # its name, for messages
    vectors: NDArray[Any]  # (n, d), column `vector`
    ids: list[str] | None = None  # column `id`
    # (n,) whole numbers or texts, column `label`; or n lists of texts, column `labels`.
    labels: NDArray[Any] | list[list[str]] | None = None
    places: NDArray[np.float64] | None = None  # (n, 2), columns `x` and `y`
    uncertainty: NDArray[np.float64] | None = None  # (n,)
    group: NDArray[np.str_] | None = None  # (n,)
    cluster: NDArray[np.str_] | None = None  # (n,), this column, or the one named for clusters
    key: NDArray[np.str_] | None = None  # (n,), the column that is named for keys
    encounter: NDArray[np.str_] | None = None  # (n,), the column that is named for encounters
    times: list[Any] | None = None  # column `time`, as it is in the file; see `seconds`
    model: str | None = None  # what embedded them
    columns: tuple[str, ...] = ()  # the names of all columns or arrays of the file

    def __len__(self) -> int:
        return len(self.vectors)

    def seconds(self) -> NDArray[np.float64] | None:
        """Return the capture times (n,) in seconds, see `rcir.data.bursts.as_seconds`."""
        if self.times is None:
            return None
        return as_seconds(self.times, f"{self.file}: column time", first=1)


def read_vectors(path: Path, **named: str | None) -> VectorTable:
    """Read a file of vectors: Parquet, .npz, or .npy with a table beside it that ends in .csv.

    `named` are the columns of cluster, key and encounter; that of the clusters is by default
    `cluster`, if there is one. `InvalidData` if the file lacks a column, or a value is missing or
    wrong.
    """
    column_of = {name: column for name, column in named.items() if column is not None}
    readers = {".parquet": _parquet_columns, ".npz": _npz, ".npy": _npy}
    with _reading(path):
        if path.suffix.lower() != ".parquet" and is_uri(path):
            raise InvalidData(f"{as_text(path)}: in a bucket, vectors must be in Parquet files")
        if path.suffix.lower() not in readers:
            raise InvalidData(f"{path} must end in {', '.join(readers)}")
        names = (*COLUMNS_READ, *column_of.values())
        columns, model, present = readers[path.suffix.lower()](path, names)
        for name in ("vector", *column_of.values()):
            if name not in columns:
                raise missing_column(path, name, present)
        chosen = {name: columns[column] for name, column in column_of.items()}
        columns = {name: columns[name] for name in columns if name in COLUMNS_READ} | chosen
        return _table(path, columns, model, present)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise `DataUnavailable` for a file that is not there, and `InvalidData` for any error."""
    if not is_file(path):
        raise DataUnavailable(f"there is no file {as_text(path)}")
    try:
        yield
    except (DataUnavailable, InvalidData):
        raise
    except Exception as error:
        raise InvalidData(f"{as_text(path)} cannot be read: {error}") from error


def read_matches(path: Path) -> list[tuple[str, str]]:
    """Read a table of true matches, .csv or .parquet: ids in the columns `query` and `gallery`."""
    columns = read_table(path, ("query", "gallery"))
    return list(zip(columns["query"], columns["gallery"], strict=True))


def read_scores(path: Path) -> dict[tuple[str, str], float]:
    """Read scores of pairs, .csv or .parquet, in columns `query` and `item`, of ids, and `score`.

    `InvalidData` if a pair has two different scores.
    """
    columns = read_table(path, ("query", "item", "score"))
    pairs = list(zip(columns["query"], columns["item"], strict=True))
    values = columns["score"].tolist()
    scores = dict(zip(pairs, values, strict=True))
    for pair, value in zip(pairs, values, strict=True) if len(scores) < len(pairs) else ():
        if scores[pair] != value:
            raise InvalidData(f"{path}: {pair[0]} and {pair[1]} have two scores: remove one")
    return scores


def write_pairs(path: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """Write names of queries and ids of items, a line "query item" each, as hloc reads them.

    `InvalidData` if a name contains blanks, at which its readers would divide it.
    """
    for name in {name for pair in pairs for name in pair}:
        if len(name.split()) != 1:
            raise InvalidData(f"{name!r} has blanks, which a file of pairs cannot hold: rename it")
    write_file(path, "".join(f"{query} {item}\n" for query, item in pairs).encode())


def read_table(path: Path, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Return columns of a table, .csv or .parquet; `InvalidData` if it lacks one of `names`."""
    columns: dict[str, Any]
    with _reading(path):
        if path.suffix.lower() == ".csv":
            columns = dict(read_csv(path))
            present = list(columns)
        else:
            columns, _, present = _parquet_columns(path, (*names, *optional))
        for name in names:
            if name not in columns:
                raise missing_column(path, name, present)
        return parse_columns(path, columns, (*names, *optional))


def _parquet_columns(path: Path, names: Sequence[str]) -> _Columns:
    table = read_parquet(path, names)
    model = (table.schema.metadata or {}).get(MODEL_KEY.encode())
    columns: dict[str, Any] = {
        name: _matrix(path, column) if name == "vector" else list_values(path, name, column)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    present = read_schema(path).names
    return columns, None if model is None else model.decode(), present


def _npz(path: Path, names: Sequence[str]) -> _Columns:
    with np.load(path, allow_pickle=False) as archive:
        columns = {name: archive[name] for name in archive if name in names}
        model = str(archive["model"]) if "model" in archive else None
        return columns, model, list(archive)


def _npy(path: Path, names: Sequence[str]) -> _Columns:
    csv_file = path.with_suffix(".csv")
    if not csv_file.is_file():
        raise InvalidData(f"{path} needs a table {csv_file.name} beside it, one row per vector")
    table = read_csv(csv_file)
    columns = {name: values for name, values in table.items() if name in names}
    return columns | {"vector": read_array(path)}, None, list(table)


def _matrix(path: Path, column: Any) -> NDArray[Any]:
    """Return a column of lists as an array (n, d)."""
    import pyarrow as pa

    if not len(column):
        raise InvalidData(f"{path} holds no vectors")
    joined = column.combine_chunks()
    kind = joined.type
    if not is_list(kind) or not (
        pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)
    ):
        raise InvalidData(f"{path}: column vector is of type {kind}; it must hold lists of numbers")
    if joined.null_count:
        raise InvalidData(f"{path}: {joined.null_count} of {len(joined)} vectors are missing")
    values = joined.flatten()
    lengths = set(joined.value_lengths().unique().to_pylist())
    if len(lengths) != 1:
        raise InvalidData(f"{path}: vectors have different lengths ({sorted(lengths)[:3]})")
    if values.null_count:
        raise InvalidData(f"{path}: {values.null_count} numbers of the vectors are missing")
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(joined), lengths.pop())


def _table(
    path: Path, columns: dict[str, Any], model: str | None, present: list[str]
) -> VectorTable:
    vectors = _vectors(path, columns.pop("vector"))
    for name, values in columns.items():
        n = 1 if isinstance(values, np.ndarray) and not values.ndim else len(values)
        if n != len(vectors):
            raise InvalidData(f"{path}: got {n} values of {name} for {len(vectors)} vectors")
        if isinstance(values, np.ndarray):
            columns[name] = values.reshape(len(vectors), *values.shape[1:])
    kinds = [name for name in MATCH_COLUMNS if name in columns]
    if kinds not in ([], ["label"], ["labels"], ["x", "y"]):
        raise InvalidData(
            f"{path} has the columns {', '.join(kinds)}; it may have one of: label, labels, x and y"
        )
    read = parse_columns(path, columns, columns.keys() - {"time"})
    require_unique(read.get("id", ()), f"{path}: column id", "name each vector once")
    for name in {"label", "group", *NAMED_COLUMNS} & read.keys():
        read[name] = np.asarray(read[name])
    return VectorTable(
        file=path.name,
        vectors=vectors,
        ids=read.get("id"),
        labels=read.get("label", read.get("labels")),
        places=np.column_stack([read["x"], read["y"]]) if "x" in read else None,
        uncertainty=read.get("uncertainty"),
        group=read.get("group"),
        **{name: read.get(name) for name in NAMED_COLUMNS},
        times=list(columns["time"]) if "time" in columns else None,
        model=model,
        columns=tuple(present),
    )


def _vectors(path: Path, column: Any) -> NDArray[np.floating[Any]]:
    """Return vectors (n, d) of finite floats."""
    vectors = np.asarray(column)
    if vectors.dtype.kind not in "fiu" or vectors.ndim != 2:
        raise InvalidData(
            f"{path}: vectors are of type {vectors.dtype} and have shape {vectors.shape}; they "
            "must be real numbers, (n, d)"
        )
    if not vectors.size:
        raise InvalidData(f"{path} holds no vectors: their shape is {vectors.shape}")
    wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(wrong):
        raise InvalidData(
            f"{path}: {len(wrong)} of {len(vectors)} vectors are NaN or infinite, first in row "
            f"{wrong[0] + 1}: leave them out, or embed them again"
        )
    return vectors if vectors.dtype.kind == "f" else vectors.astype(np.float32)


def shard_name(number: int) -> str:
    """Return the file name of a shard, by its number from 0."""
    return f"part-{number:05d}.parquet"


def read_all_vectors(path: Path, **named: str | None) -> VectorTable:
    """Read the vectors of a file, or of all shards in a folder, as one table, see `read_vectors`.

    The vectors of shards are mapped from a temporary file; one shard at a time is in memory.
    """
    if not is_folder(path):
        return read_vectors(path, **named)
    from pyarrow import default_memory_pool

    tables: list[VectorTable] = []
    for file in _shards(path):
        table = read_vectors(file, **named)
        if tables:
            _require_alike(file, table, tables[0])
        else:
            dtype = np.promote_types(table.vectors.dtype, np.float32)
            stored = StoredVectors(table.vectors.shape[1], dtype)
        with np.errstate(over="ignore"):  # too large a number becomes infinite
            stored.append(table.vectors)
        tables.append(replace(table, vectors=table.vectors[:0].copy()))
        del table
        default_memory_pool().release_unused()  # else PyArrow keeps freed memory
    joined: dict[str, Any] = {}
    for name in SHARED_FIELDS:
        parts = [getattr(table, name) for table in tables]
        if parts[0] is not None:
            are_lists = isinstance(parts[0], list)
            joined[name] = list(chain.from_iterable(parts)) if are_lists else np.concatenate(parts)
    ids = joined.get("ids", ())
    if len(set(ids)) < len(ids):
        raise InvalidData(f"{path}: an id occurs in two shards: use each id once")
    return replace(tables[0], file=path.name, vectors=stored.vectors, **joined)


def _shards(folder: Path) -> list[Path]:
    """Return the shards in a folder, in order, or raise if there are none or some are missing."""
    from pyarrow import ArrowException

    shards = sorted(folder / name for name in list_files(folder) if SHARD.fullmatch(name))
    if not shards:
        raise DataUnavailable(
            f"the folder {as_text(folder)} holds no {shard_name(0)}: give a file of vectors, or a "
            "folder that `rcir embed` wrote"
        )
    n, stated = len(shards), None
    with suppress(ArrowException, OSError):  # an unreadable shard is refused when it is read
        stated = (read_schema(shards[0]).metadata or {}).get(SHARDS_KEY.encode())
    if stated not in (None, str(n).encode()) or shards[-1].name != shard_name(n - 1):
        raise InvalidData(
            f"{folder} holds {n} shards{'' if stated is None else f' of {stated.decode()}'}, and "
            "others are missing: run `rcir embed` again with the same arguments"
        )
    return shards


def _require_alike(file: Path, table: VectorTable, first: VectorTable) -> None:
    """Raise `InvalidData` unless two shards have the same columns, model and length of vectors."""
    facts, expected = (
        {name: getattr(shard, name) is None for name in SHARED_FIELDS}
        | {"model": shard.model, "length of vectors": shard.vectors.shape[1]}
        for shard in (table, first)
    )
    if different := [name for name in facts if facts[name] != expected[name]]:
        raise InvalidData(
            f"{file}: its {different[0]} differs from that of {first.file}: all shards must come "
            "from one model and have the same columns"
        )


def vector_table(
    vectors: NDArray[np.float32],
    ids: Any,
    columns: Mapping[str, Any],
    uncertainty: NDArray[np.float64] | None = None,
) -> Any:
    """Return the Arrow table of unit vectors (n, d) of pictures.

    Columns: ``id`` (string), ``vector`` (fixed_size_list of d float32), ``uncertainty`` (float64)
    if there is one, then the others, which are of Arrow.
    """
    import pyarrow

    n, d = vectors.shape
    for name, values in {"ids": ids, "uncertainty": uncertainty, **columns}.items():
        if values is not None and len(values) != n:
            raise InvalidData(f"got {len(values)} values of {name} for {n} vectors")
    require_free_names(columns)
    flat = pyarrow.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    arrays = {
        "id": pyarrow.array(ids, pyarrow.string()),
        "vector": pyarrow.FixedSizeListArray.from_arrays(flat, d),
    }
    if uncertainty is not None:
        arrays["uncertainty"] = pyarrow.array(np.asarray(uncertainty, np.float64))
    return pyarrow.table(arrays | dict(columns))


def require_free_names(columns: Iterable[str]) -> None:
    """Raise `InvalidData` if a column of pictures has the name of one of vectors."""
    if reserved := sorted({"id", "vector", "uncertainty"} & {*columns}):
        raise InvalidData(f"the name of column {reserved[0]!r} is reserved: rename it")


def write_tables(path: Path, tables: Iterable[Any], metadata: Mapping[str, str]) -> None:
    """Write Arrow tables with the same columns, one after the other, as one Parquet file."""
    from pyarrow import parquet

    with written_aside(path) as aside, aside.open("wb") as file:
        writer = None
        try:
            for table in tables:
                named = table.replace_schema_metadata(metadata)
                writer = writer or parquet.ParquetWriter(file, named.schema)
                writer.write_table(named)
        finally:  # an open writer would write to a closed file
            if writer is not None:
                writer.close()
