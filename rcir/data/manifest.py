"""Lists of pictures of any length, read in chunks: folders, tables, WebDataset, Hugging Face.

Nothing holds the whole list: a plan on disk has a row per picture, of which workers read theirs.
"""

from __future__ import annotations

import json
import os
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ArrowException, parquet

from rcir.data.folders import CHUNK, Pictures, stream_folder
from rcir.data.images import IMAGE_ENDINGS
from rcir.data.listing import Listings, require_images
from rcir.data.names import MISSING_VALUES, as_ids, normalise, require_unique, require_utf8
from rcir.data.tables import (
    list_values,
    missing_column,
    parse_columns,
    read_schema,
    require_different,
    stream_csv,
)
from rcir.data.vector_files import write_tables
from rcir.errors import DataUnavailable, InvalidData
from rcir.storage import as_text, is_file, is_folder, is_uri, join, list_files, open_file

TABLE_ENDINGS = (".csv", ".tsv", ".parquet")
USED_COLUMNS = ("path", "label", "labels", "x", "y", "key", "group", "cluster", "split")
TYPES = {  # of columns, whatever the source has
    **{"label": pa.string(), "labels": pa.list_(pa.string())},
    **{"x": pa.float64(), "y": pa.float64()},
}
DATASET_FILES = ("state.json", "dataset_dict.json")  # of a Hugging Face data set on disk
THREADS = 16  # that ask a file system, which may be far away
PLACE = ("path", "start", "size", "id")  # the first columns of a plan; others begin with a point


@dataclass(frozen=True)
class Manifest:
    """Pictures in chunks, with the types of their columns; notes are complete after the last."""

    chunks: Iterator[Pictures]
    types: Mapping[str, pa.DataType] = field(default_factory=dict)  # by default texts
    notes: Sequence[str] = ()


def read_manifest(source: Path) -> Manifest:
    """Read a list of pictures.

    Args:
        source: a folder of class folders (`rcir.data.folders.scan_folder`); a table
            (`list_pictures`); a WebDataset, one .tar file or a folder of them, of which .cls files
            are labels; or the folder of a Hugging Face data set. The last two are local.

    Raises:
        DataUnavailable: it does not exist, or pictures are missing.
        InvalidData: it has no pictures, or holds something else.
    """
    if not (is_file(source) or is_folder(source)):
        raise DataUnavailable(f"there is no folder or table {as_text(source)}: check the path")
    names = list_files(source)
    is_dataset = not {*DATASET_FILES}.isdisjoint(names)
    is_tar = source.suffix.lower() == ".tar"
    tars = [source] if is_tar else sorted(source / name for name in names if name.endswith(".tar"))
    if is_uri(source) and (is_dataset or tars):
        raise InvalidData(
            f"{as_text(source)} holds a WebDataset or a Hugging Face data set, which are read from "
            "local folders: copy it into one"
        )
    if is_dataset:
        return _read_dataset(source)
    if tars:
        return _read_tars(source, tars)
    if is_folder(source):
        notes, chunks = stream_folder(source)
        return Manifest(chunks, notes=notes)
    if source.suffix.lower() not in TABLE_ENDINGS:
        raise InvalidData(
            f"{as_text(source)} must end in {', '.join(TABLE_ENDINGS)} or .tar, or be a folder"
        )
    return _read_table(source)


def list_pictures(source: Path) -> Pictures:
    """List the pictures of a source, see `read_manifest`, of a table all columns but the names.

    `labels` are lists, `x` and `y` numbers, and values of .csv and .tsv files otherwise texts.
    """
    manifest = read_manifest(source)
    return Pictures.joined(manifest.chunks, manifest.notes)


def _read_table(file: Path) -> Manifest:
    types: dict[str, pa.DataType] = {}
    listings: Listings = {}  # which all chunks use
    with _reading(file):
        if file.suffix.lower() == ".parquet":
            schema = read_schema(file)
            types = {name.strip(): schema.field(name).type for name in schema.names}

    def chunks() -> Iterator[Pictures]:
        start = 0
        with _reading(file):
            for table in _parquet_chunks(file) if types else stream_csv(file):
                if "path" not in table:
                    raise missing_column(file, "path", list(table))
                chunk = _pictures(file, table, start + 1, listings)
                start += len(chunk)
                yield chunk
        if not start:
            raise InvalidData(f"{as_text(file)} has no rows: one per image is needed")

    column = "key" if "key" in (types or next(stream_csv(file), {})) else "path"
    remedy = "leave out copies, or add a column key"
    return Manifest(_unique(chunks, f"{as_text(file)}: column {column}", remedy), types)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise `InvalidData` for errors of a file in the block."""
    try:
        yield
    except InvalidData:
        raise
    except (ValueError, OSError, ArrowException, tarfile.TarError, LookupError) as error:
        raise InvalidData(f"{as_text(file)} cannot be read: {error}") from error


def _parquet_chunks(file: Path) -> Iterator[dict[str, list[Any]]]:
    """Yield the columns of a Parquet table, some rows at a time; without an index of pandas."""
    with open_file(file) as opened, parquet.ParquetFile(opened) as table:
        names = [n for n in table.schema_arrow.names if not n.startswith("__index_level_")]
        stripped = [name.strip() for name in names]
        require_different(file, stripped)
        for batch in table.iter_batches(CHUNK, columns=names):
            yield {
                name: list_values(file, name, pa.chunked_array([column]))
                if name in USED_COLUMNS
                else column.to_pylist()
                for name, column in zip(stripped, batch.columns, strict=True)
            }


def _pictures(
    file: Path, table: Mapping[str, list[Any]], first: int, listings: Listings
) -> Pictures:
    """Return the pictures of some rows of a table, with None for missing values.

    A backslash separates folders, as on Windows, unless it is part of a file's name.
    """
    columns: dict[str, list[Any]] = {
        name: [None if isinstance(value, float) and np.isnan(value) else value for value in values]
        for name, values in table.items()
    }
    columns |= _parsed(file, table, ("path", "key", *TYPES), first)
    for name in columns.keys() & {"path", "key"}:
        columns[name] = [text.strip() for text in columns[name]]
    folder = file.parent
    names = [
        name.replace("\\", "/") if "\\" in name and not is_file(join(folder, name)) else name
        for name in columns.pop("path")
    ]
    ids = columns.pop("key", names)
    paths = [join(folder, name) for name in names]
    absent = [row for row, is_there in enumerate(_are_files(paths)) if not is_there]
    if absent:  # or named in another Unicode form
        listed = [names[row] for row in absent]
        total = first - 1 + len(names)
        remedy = "correct the column path"
        found = require_images(folder, listed, file.name, remedy, total, listings)
        for row, path in zip(absent, found, strict=True):
            paths[row] = path
    return Pictures(paths, ids, columns)


def _parsed(
    file: Path, columns: Mapping[str, list[Any]], names: Iterable[str], first: int
) -> dict[str, list[Any]]:
    """Return the named columns, read by their rules, with labels as texts."""
    parsed = parse_columns(file, columns, names, first)
    listed = {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in parsed.items()}
    return listed | {"label": [*map(str, listed["label"])]} if "label" in listed else listed


def _label(text: str) -> str | None:
    """Return a label as it is compared; None if it stands for a missing one."""
    label = normalise(text)
    return None if label in MISSING_VALUES else label


def _are_files(paths: Sequence[Path]) -> Iterator[bool]:
    """Yield whether each path is a file; several threads, since a file system may be far away."""
    step = -(-len(paths) // THREADS)
    parts = [paths[start : start + step] for start in range(0, len(paths), step)] if step else []
    with ThreadPoolExecutor(THREADS) as pool:
        yield from chain.from_iterable(pool.map(lambda part: [*map(os.path.isfile, part)], parts))


def _unique(chunks: Callable[[], Iterator[Pictures]], what: str, remedy: str) -> Iterator[Pictures]:
    """Yield chunks; `InvalidData` after the last one if there was none, or an id comes twice."""
    hashes: list[NDArray[np.int64]] = []
    for chunk in chunks():
        hashes.append(np.fromiter(map(hash, chunk.ids), np.int64, len(chunk)))
        yield chunk
    if not hashes:
        raise InvalidData(f"{what} has no pictures; they end in {', '.join(IMAGE_ENDINGS)}")
    values, counts = np.unique(np.concatenate(hashes), return_counts=True)
    if (counts > 1).any():  # of equal names, or by chance
        common = set(values[counts > 1].tolist())
        names = enumerate(chain.from_iterable(chunk.ids for chunk in chunks()), 1)
        suspects = [(row, name) for row, name in names if hash(name) in common]
        require_unique([n for _, n in suspects], what, remedy, [row for row, _ in suspects])


def _read_tars(source: Path, files: Sequence[Path]) -> Manifest:
    """Read a WebDataset: members of a .tar file that differ in their endings are one sample."""
    notes: list[str] = []

    def chunks() -> Iterator[Pictures]:
        n_without = 0
        samples: list[tuple[Path, str, tuple[int, int], str | None]] = []
        for file in files:
            with _reading(file):
                for key, span, label in _samples(file):
                    if span is None:
                        n_without += 1
                        continue
                    samples.append((file, key, span, label))
                    if len(samples) == CHUNK:
                        yield _of_samples(samples)
                        samples = []
        if samples:
            yield _of_samples(samples)
        notes[:] = [f"left out: samples without a picture ({n_without:,})"] if n_without else []

    remedy = "each key of a sample names a picture"
    return Manifest(_unique(chunks, str(source), remedy), notes=notes)


def _samples(file: Path) -> Iterator[tuple[str, tuple[int, int] | None, str | None]]:
    """Yield the key of each sample of a .tar file, the bytes of its picture, and its label."""
    last: str | None = None
    span: tuple[int, int] | None = None
    label: str | None = None
    with tarfile.open(file, "r:") as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # which it would keep
            place, slash, name = member.name.rpartition("/")
            if not member.isfile() or name.startswith("."):  # hidden, such as those of macOS
                continue
            stem, _, ending = name.partition(".")
            key = f"{place}{slash}{stem}"
            if key != last:
                if last is not None:
                    yield last, span, label
                last, span, label = key, None, None
            if f".{name}".lower().endswith(IMAGE_ENDINGS):
                span = member.offset_data, member.size
            elif ending == "cls" and (content := archive.extractfile(member)) is not None:
                label = _label(content.read().decode())
    if last is not None:
        yield last, span, label


def _of_samples(samples: Sequence[tuple[Path, str, tuple[int, int], str | None]]) -> Pictures:
    files, keys, spans, labels = zip(*samples, strict=True)
    require_utf8(keys, str(files[0].parent), "name the members of the archives in UTF-8")
    return Pictures(list(files), list(keys), {"label": list(labels)}, spans=list(spans))


def _read_dataset(folder: Path) -> Manifest:
    """Read a Hugging Face data set on disk where its Arrow files lie."""
    with _reading(folder):
        splits = [""]
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        files: list[tuple[str, Path]] = []
        for split in splits:
            state = json.loads((folder / split / "state.json").read_text())
            if state.get("_indices_data_files"):
                raise InvalidData(f"{folder} has indices: call flatten_indices() before saving")
            files += [(split, folder / split / x["filename"]) for x in state["_data_files"]]
        if not files:
            raise InvalidData(f"{folder} has no files of data: save it again")
        with pa.memory_map(str(files[0][1])) as mapped:
            layout = _Features(folder, pa.ipc.open_stream(mapped).schema)
    types = {name: layout.schema.field(name).type for name in layout.others}
    types |= {name: pa.string() for name in (*layout.classes, *(["split"] * any(splits)))}

    def chunks() -> Iterator[Pictures]:
        rows = dict.fromkeys(splits, 0)
        for split, file in files:
            with _reading(file), pa.memory_map(str(file)) as mapped:
                content = mapped.read_buffer()
                for batch in pa.ipc.open_stream(content):
                    for start in range(0, len(batch), CHUNK):
                        part = batch.slice(start, CHUNK)
                        yield layout.pictures(file, content, part, split, rows[split])
                        rows[split] += len(part)

    return Manifest(_unique(chunks, str(folder), "name each once"), types)


class _Features:
    """The columns of a Hugging Face data set: one holds pictures, others numbers of classes."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = stored.get("info", {}).get("features", {})
        kinds = {name: x.get("_type") for name, x in features.items() if isinstance(x, dict)}
        pictures = [name for name in schema.names if kinds.get(name) == "Image"]
        if not pictures:
            raise InvalidData(f"{folder} has no column of images; it has {', '.join(schema.names)}")
        self.schema, self.picture = schema, pictures[0]
        classes = [name for name in schema.names if kinds.get(name) == "ClassLabel"]
        self.classes = {name: [*map(_label, features[name]["names"])] for name in classes}
        self.others = [name for name in schema.names if name not in (*pictures, *classes, "id")]

    def pictures(
        self, file: Path, content: pa.Buffer, batch: pa.RecordBatch, split: str, start: int
    ) -> Pictures:
        """Return the pictures of some rows, whose bytes lie in the file."""
        stored, names = (batch.column(self.picture).field(part) for part in ("bytes", "path"))
        width = np.int64 if pa.types.is_large_binary(stored.type) else np.int32
        _, ends, data = stored.buffers()
        edges = np.frombuffer(ends, width)[stored.offset : stored.offset + len(stored) + 1]
        origin = 0 if data is None else data.address - content.address
        if not 0 <= origin <= content.size:
            raise InvalidData(f"{file} is compressed: save it without compression")
        paths, spans = [], []
        present = zip(stored.is_valid().to_pylist(), names.to_pylist(), strict=True)
        for row, (is_stored, name) in enumerate(present):
            first, end = int(edges[row]), int(edges[row + 1])
            paths.append(file if is_stored or not name else file.parent / name)
            spans.append((origin + first, end - first) if is_stored else None)
        columns = {name: batch.column(name).to_pylist() for name in self.others}
        columns |= _parsed(file, columns, TYPES, start + 1)
        for name, classes in self.classes.items():
            numbers = batch.column(name).to_pylist()  # -1 where the class is unknown
            columns[name] = [None if n is None or n < 0 else classes[n] for n in numbers]
        if split:
            columns["split"] = [split] * len(batch)
        prefix = f"{split}/" if split else ""
        ids = [f"{prefix}{start + row}" for row in range(len(batch))]
        if "id" in batch.schema.names:
            ids = as_ids(batch.column("id").to_pylist(), f"{file}: column id", start + 1)
        return Pictures(paths, ids, columns, spans=spans)


def write_plan(path: Path, manifest: Manifest) -> Plan:
    """Write a row per picture, a row group per chunk."""
    try:
        write_tables(path, (_plan_table(chunk, manifest.types) for chunk in manifest.chunks), {})
    finally:
        pa.default_memory_pool().release_unused()
    return Plan(path)


def _plan_table(pictures: Pictures, types: Mapping[str, pa.DataType]) -> pa.Table:
    spans = [span or (None, None) for span in pictures.spans or [None] * len(pictures)]
    columns = {
        "path": pa.array([os.fsencode(_absolute(path)) for path in pictures.paths], pa.binary()),
        "start": pa.array([start for start, _ in spans], pa.int64()),
        "size": pa.array([size for _, size in spans], pa.int64()),
        "id": pa.array(pictures.ids, pa.string()),
    }
    for name, values in pictures.columns.items():
        kind = TYPES.get(name, types.get(name, pa.string()))
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        columns[f".{name}"] = pa.array(values, kind)
    return pa.table(columns)


def _absolute(path: Path) -> Path:
    return path if is_uri(path) else path.absolute()


@dataclass(frozen=True)
class Plan:
    """A plan on disk, which workers read."""

    path: Path

    @cached_property
    def _file(self) -> parquet.ParquetFile:
        return parquet.ParquetFile(self.path)

    @cached_property
    def _ends(self) -> list[int]:
        groups = range(self._file.metadata.num_row_groups)
        return [*accumulate(self._file.metadata.row_group(n).num_rows for n in groups)]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __len__(self) -> int:
        return self._ends[-1]

    @cached_property
    def unlabelled(self) -> int:
        """The number of pictures whose label is missing, if there is a column of labels."""
        groups = (self._file.metadata.row_group(n) for n in range(len(self._ends)))
        columns = (group.column(n) for group in groups for n in range(group.num_columns))
        return sum(x.statistics.null_count for x in columns if x.path_in_schema == ".label")

    @cached_property
    def names(self) -> list[str]:
        """The names of the columns of metadata; without `label` if no picture has one."""
        names = [name[1:] for name in self._file.schema_arrow.names[len(PLACE) :]]
        return [name for name in names if name != "label" or self.unlabelled < len(self)]

    def rows(self, start: int, stop: int) -> tuple[list[tuple[Path, int | None, int]], pa.Table]:
        """Return the places of some pictures, as `read_place` takes them; and ids and metadata."""
        first, last = bisect_right(self._ends, start), bisect_right(self._ends, stop - 1)
        before = self._ends[first - 1] if first else 0
        table = self._file.read_row_groups(range(first, last + 1)).slice(
            start - before, stop - start
        )
        paths, starts, sizes = (table.column(name).to_pylist() for name in PLACE[:3])
        places = [
            (Path(os.fsdecode(path)), start, size or 0)
            for path, start, size in zip(paths, starts, sizes, strict=True)
        ]
        table = table.select(["id", *(f".{name}" for name in self.names)])
        return places, table.rename_columns(["id", *self.names]).replace_schema_metadata()


def read_place(path: Path, start: int | None, size: int) -> Path | bytes:
    """Return the file of a picture, or the bytes of one among several in a file."""
    if start is None:
        return path
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)
