"""Files of vectors with what is known of each: Parquet, .npz, or .npy with a CSV table beside it.

The columns are those of `VectorTable`; of a .npz file its arrays, of the same names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.names import require_utf8
from rcir.errors import DataUnavailable, InvalidData, printable
from rcir.files import read_array, write_file
from rcir.stored_vectors import StoredVectors

MODEL = "rcir.model"  # in the metadata of a Parquet file's schema
TEXT_COLUMNS = ("id", "group", "cluster")
COLUMNS_READ = (*TEXT_COLUMNS, "vector", "label", "labels", "x", "y", "uncertainty")
SEPARATORS = ";|"
# What a file may take in memory: so many bytes, or so many times its own size if that is more.
ALWAYS_ALLOWED, MAX_GROWTH = 256 * 2**20, 100


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
            array `vector` (n, d); or .npy, an array (n, d), with a table beside it of the same
            name that ends in .csv.

    Raises:
        DataUnavailable: there is no such file.
        InvalidData: it cannot be read, lacks a column, or a value is missing or wrong; or it would
            take far more memory than files of its size do.
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
    names = ("query", "gallery")
    try:
        is_csv = path.suffix.lower() == ".csv"
        table = _read_csv(path) if is_csv else _read_parquet(path, names)
        for name in names:
            if name not in table.column_names:
                raise _absent(path, name, table.column_names)
        values = [_objects(path, name, table[name]) for name in names]
    except InvalidData:
        raise
    except Exception as error:
        raise InvalidData(f"{path} cannot be read: {error}") from error
    columns = [_texts(path, name, of) for name, of in zip(names, values, strict=True)]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _parquet(path: Path) -> tuple[dict[str, Any], str | None]:
    table = _read_parquet(path, COLUMNS_READ)
    if "vector" not in table.column_names:
        from pyarrow import parquet

        raise _absent(path, "vector", parquet.read_schema(path).names)
    model = (table.schema.metadata or {}).get(MODEL.encode())
    arrays: dict[str, Any] = {
        name: _matrix(path, table[name]) if name == "vector" else _objects(path, name, table[name])
        for name in table.column_names
    }
    return arrays, None if model is None else model.decode()


def _npz(path: Path) -> tuple[dict[str, Any], str | None]:
    with np.load(path, allow_pickle=False) as archive:
        if "vector" not in archive:
            raise _absent(path, "vector", list(archive))
        sizes = [
            member.file_size
            for member in archive.zip.infolist()
            if member.filename.removesuffix(".npy") in (*COLUMNS_READ, "model")
        ]
        _require_room(path, "the file", sum(sizes))
        columns = {name: archive[name] for name in archive if name in COLUMNS_READ}
        model = str(archive["model"]) if "model" in archive else None
    return columns, model


def _require_room(path: Path, what: str, size: int) -> None:
    """Raise `InvalidData` if something in a file takes far more memory than the file's size."""
    limit = max(ALWAYS_ALLOWED, MAX_GROWTH * path.stat().st_size)
    if size > limit:
        raise InvalidData(
            f"{path}: {what} would take {size:,} bytes in memory, and from a file of this size at "
            f"most {limit:,} are read: if that is right, write it without compression and "
            "dictionaries, and with shorter texts"
        )


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


def _read_parquet(path: Path, names: Sequence[str]) -> Any:
    """Read those columns of these names that there are, texts as dictionaries.

    In a dictionary, a text that many rows have is in memory once, as it is in the file. PyArrow
    reads lists of such texts from one row group at a time only.
    """
    import pyarrow as pa
    from pyarrow import parquet

    metadata = parquet.read_metadata(path)
    leaves = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    read = {number: leaf for number, leaf in enumerate(leaves) if leaf.path.split(".")[0] in names}
    size = 0
    for row_group in map(metadata.row_group, range(metadata.num_row_groups)):
        for number, leaf in read.items():
            chunk = row_group.column(number)
            size += chunk.num_values * max(8, leaf.length) + chunk.total_uncompressed_size
    _require_room(path, "the file", size)
    texts = [leaf.path for leaf in read.values() if leaf.physical_type == "BYTE_ARRAY"]
    with parquet.ParquetFile(path, read_dictionary=texts) as file:
        columns = [name for name in file.schema_arrow.names if name in names]
        groups = [file.read_row_group(number, columns) for number in range(file.num_row_groups)]
        return pa.concat_tables(groups) if groups else file.read(columns)


def _is_list(kind: Any) -> bool:
    """Whether a column of that type holds lists, of any length or all of the same one."""
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _objects(path: Path, name: str, column: Any) -> list[Any]:
    """The values of a column, which may be lists of such."""
    import pyarrow as pa
    from pyarrow import compute

    joined = column.combine_chunks()
    leaf = joined.flatten() if _is_list(joined.type) else joined
    if pa.types.is_nested(leaf.type):
        raise InvalidData(f"{path}: column {name} is of type {joined.type}: give texts or numbers")
    if pa.types.is_dictionary(leaf.type) and len(leaf):
        longest = compute.max(compute.binary_length(leaf.dictionary)).as_py() or 0
        _require_room(path, f"column {name}", 4 * longest * len(leaf))
        if leaf is joined:
            joined = joined.dictionary_decode()  # much faster to list
    values: list[Any] = joined.to_pylist()
    return values


def _read_csv(path: Path) -> Any:
    """Read all columns as texts: "007" is another label than "7"."""
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
    if not _is_list(kind) or not (
        pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)
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
        n = 1 if isinstance(values, np.ndarray) and not values.ndim else len(values)
        if n != len(vectors):
            raise InvalidData(
                f"{path}: {len(vectors)} vectors and {n} values of {name}: give one each"
            )
        if isinstance(values, np.ndarray):
            _require_room(path, f"array {name}", 8 * values.size)
            columns[name] = values.reshape(len(vectors), *values.shape[1:]).tolist()
    kinds = [name for name in ("label", "labels", "x") if name in columns]
    if len(kinds) > 1 or ("x" in columns) != ("y" in columns):
        present = [name for name in ("label", "labels", "x", "y") if name in columns]
        raise InvalidData(
            f"{path} has the columns {', '.join(present)}; give at most one of: label, labels, x "
            "with y"
        )
    texts = {name: _texts(path, name, columns[name]) for name in TEXT_COLUMNS if name in columns}
    ids = texts.pop("id", None)
    if ids is not None and len(set(ids.tolist())) < len(ids):
        names, counts = np.unique(ids, return_counts=True)
        examples = ", ".join(printable(name) for name in names[counts > 1][:3].tolist())
        raise InvalidData(f"{path}: some ids come twice ({examples}): name each vector once")
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


def _vectors(path: Path, column: Any) -> NDArray[np.floating[Any]]:
    """(n, d) finite floats; whole numbers become such."""
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
        kind_names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidData(
            f"{path}: column {name} holds {kind_names}: give whole numbers or texts throughout"
        )
    return _array(path, name, [str(value) for value in values])


def _array(path: Path, name: str, texts: list[str]) -> NDArray[np.str_]:
    """(n,) texts, each of which takes as much memory as the longest."""
    require_utf8(texts, f"{path}, column {name}", "correct it")
    _require_room(path, f"column {name}", 4 * len(texts) * max(map(len, texts), default=0))
    return np.array(texts)


def _lists(path: Path, values: list[Any]) -> list[list[str]]:
    """Read lists, or texts with separators."""
    lists = []
    for value in values:
        if value is None:
            value = []
        if isinstance(value, str):
            for separator in SEPARATORS[1:]:
                value = value.replace(separator, SEPARATORS[0])
            value = [part.strip() for part in value.split(SEPARATORS[0])]
        if not isinstance(value, list) or not all(isinstance(part, str | int) for part in value):
            excerpt = printable(json.dumps(value, default=str))[:40]
            raise InvalidData(f"{path}: column labels holds {excerpt}: give lists of texts")
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


def _absent(path: Path, column: str, present: list[str]) -> InvalidData:
    listed = ", ".join(map(printable, present)) or "none"
    return InvalidData(f"{path} has no column {column}; it has {listed}: rename one, or add it")


SHARED_FIELDS = ("ids", "labels", "places", "uncertainty", "group", "cluster")


def shard_name(number: int) -> str:
    """The name of the file of a shard, by its number from 0.

    Example:
        >>> shard_name(3)
        'part-00003.parquet'
    """
    return f"part-{number:05d}.parquet"


def shards_of(path: Path) -> list[Path]:
    """The files of vectors that a path names: itself, or the shards in a folder, in order.

    Raises:
        DataUnavailable: the folder holds no shards.
        InvalidData: some shards of the row are missing.
    """
    if not path.is_dir():
        return [path]
    shards = sorted(path.glob("part-*.parquet"))
    if not shards:
        raise DataUnavailable(
            f"the folder {path} holds no {shard_name(0)}: give a file of vectors, or a folder that "
            "`rcir embed --shards` wrote"
        )
    stated = _number(shards[0])
    if stated not in (None, len(shards)) or shards[-1].name != shard_name(len(shards) - 1):
        raise InvalidData(
            f"{path} holds {len(shards)} shards{'' if stated is None else f' of {stated}'}, and "
            "others are missing: let `rcir embed` finish, with the arguments that it was begun with"
        )
    return shards


def _number(file: Path) -> int | None:
    """Return the number of shards that a shard states; None if it states none."""
    from pyarrow import ArrowException, parquet

    try:
        stated = (parquet.read_schema(file).metadata or {}).get(b"rcir.shards")
    except (ArrowException, OSError):
        return None  # whoever reads it refuses it
    return None if stated is None else int(stated)


def read_shards(path: Path) -> Iterator[VectorTable]:
    """The tables of a file of vectors, which is one, or of a folder of shards, one at a time.

    Raises:
        DataUnavailable, InvalidData: as `rcir.data.vector_files.read_vectors`; or the shards are
            not alike.
    """
    from pyarrow import default_memory_pool

    first: VectorTable | None = None
    for file in shards_of(path):
        table = read_vectors(file)
        if first is None:
            first = replace(table, vectors=table.vectors[:1].copy())
        for name in (*SHARED_FIELDS, "model"):
            expected, other = getattr(first, name), getattr(table, name)
            if (expected is None) != (other is None) or (name == "model" and expected != other):
                raise InvalidData(
                    f"{file}: its {name} is not as in {first.file}: shards are of one set of "
                    "vectors, embedded by one model"
                )
        if table.vectors.shape[1] != first.vectors.shape[1]:
            raise InvalidData(
                f"{file} holds vectors of {table.vectors.shape[1]} numbers, {first.file} of "
                f"{first.vectors.shape[1]}"
            )
        yield table
        del table
        default_memory_pool().release_unused()  # keeps what was freed, shard by shard, otherwise


def read_all_vectors(path: Path) -> VectorTable:
    """The vectors of a file, or of all shards in a folder, as one table.

    Those of shards are mapped from a temporary file: one shard at a time is in memory.

    Raises:
        DataUnavailable, InvalidData: as `read_shards`; or an id comes twice.
    """
    tables: list[VectorTable] = []
    stored: StoredVectors | None = None
    for table in read_shards(path):
        if not path.is_dir():
            return table
        stored = stored or StoredVectors(table.vectors.shape[1])
        with np.errstate(over="ignore"):  # too large a number becomes infinite
            stored.append(table.vectors)
        tables.append(replace(table, vectors=table.vectors[:0].copy()))
    assert stored is not None
    joined: dict[str, Any] = {"vectors": stored.vectors}
    for name in SHARED_FIELDS:
        parts = [getattr(one, name) for one in tables]
        if parts[0] is not None:
            lists = isinstance(parts[0], list)
            joined[name] = [each for part in parts for each in part] if lists else None
            if not lists:
                joined[name] = np.concatenate(parts)
    ids = joined.get("ids")
    if ids is not None and len(set(ids)) < len(ids):
        raise InvalidData(f"{path}: an id comes in two shards: name each vector once")
    return VectorTable(path.name, model=tables[0].model, **joined)


SOURCE = "rcir.source"  # in the metadata: a digest of what the vectors were made of


def write_vectors(
    path: Path,
    vectors: NDArray[np.float32],
    ids: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    uncertainty: NDArray[np.float64] | None,
    model: str,
    shards: int = 1,
    source: str | None = None,
) -> None:
    """Write vectors of pictures, with what is known of each, as one Parquet file or not at all.

    Columns: ``id`` (string), ``vector`` (fixed_size_list of d float32), ``uncertainty`` (float64)
    if there is one, then the others: ``label`` (string), ``labels`` (list of string), ``x`` and
    ``y`` (float64), any other as its values are. The schema's metadata names the model as
    ``rcir.model``, and the number of files as ``rcir.shards`` where there are several.

    Args:
        path: of the file; one that is there is replaced.
        vectors: (n, d), of unit length.
        ids: n names.
        columns: further columns by name, n values each; None where a value is not known.
        uncertainty: (n,), larger is less certain; None from an encoder that states none.
        model: what made the vectors; those of another model are not compared with these.
        shards: number of files that these vectors and others are written to, see
            `rcir.data.vector_files`.
        source: a digest of what they were made of, which goes into the metadata as
            ``rcir.source``.

    Raises:
        InvalidData: columns differ in length, or one has the name of those above.

    Example:
        >>> import tempfile
        >>> import pyarrow.parquet
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "vectors.parquet")
        ...     one = np.array([[0.6, 0.8]], np.float32)
        ...     write_vectors(path, one, ["1.jpg"], {"label": ["pear"]}, None, "timm:resnet18@1f")
        ...     pyarrow.parquet.read_table(path).to_pylist()
        [{'id': '1.jpg', 'vector': [0.6000000238418579, 0.800000011920929], 'label': 'pear'}]
    """
    import pyarrow
    from pyarrow import parquet

    n, d = vectors.shape
    lengths = {"ids": len(ids)} | {name: len(values) for name, values in columns.items()}
    if uncertainty is not None:
        lengths["uncertainty"] = len(uncertainty)
    for name, length in lengths.items():
        if length != n:
            raise InvalidData(f"{n} vectors but {length} values of {name}: give one each")
    if reserved := sorted({"id", "vector", "uncertainty"} & columns.keys()):
        raise InvalidData(f"column {reserved[0]!r} is written by itself: rename it")
    flat = pyarrow.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    arrays = {
        "id": pyarrow.array(list(ids), pyarrow.string()),
        "vector": pyarrow.FixedSizeListArray.from_arrays(flat, d),
    }
    if uncertainty is not None:
        arrays["uncertainty"] = pyarrow.array(np.asarray(uncertainty, np.float64))
    text, number = pyarrow.string(), pyarrow.float64()
    types = {"label": text, "labels": pyarrow.list_(text), "x": number, "y": number}
    arrays |= {
        name: pyarrow.array(list(values), types.get(name)) for name, values in columns.items()
    }
    metadata = {"rcir.model": model} | ({"rcir.shards": str(shards)} if shards > 1 else {})
    metadata |= {} if source is None else {SOURCE: source}
    table = pyarrow.table(arrays).replace_schema_metadata(metadata)
    buffer = pyarrow.BufferOutputStream()
    parquet.write_table(table, buffer)
    write_file(path, buffer.getvalue().to_pybytes())
