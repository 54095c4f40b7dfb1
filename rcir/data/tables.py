"""Tables: CSV and Parquet files of images, vectors and matches, all read by the same rules.

A CSV file has a header. Its separator (comma, semicolon or tab) is the one of the header, or of a
line such as "sep=;" before it. It is UTF-8, or another encoding of Unicode with a byte-order mark.
Its values are texts; blanks around them and around the names of columns do not count, and empty
values are missing (None).
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rcir.data.names import as_ids, as_label_lists, as_labels, as_numbers, as_texts
from rcir.errors import InvalidData, printable
from rcir.storage import as_text, open_file

COLUMN_READERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("id", "path", "key", "query", "gallery", "item"), as_ids),
    **{"label": as_labels, "query_label": as_labels, "labels": as_label_lists},
    **dict.fromkeys(("group", "cluster", "encounter", "split"), as_texts),
    **dict.fromkeys(("x", "y", "uncertainty", "score", "distance", "relevant"), as_numbers),
}
FIELD_SEPARATORS = (",", ";", "\t")
HEADER_LINES = 100  # in which the header ends
CHUNK = 1 << 13  # rows that are yielded together
BYTE_ORDER_MARKS = {  # those of UTF-32 begin as those of UTF-16 do
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def stream_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text with their ends; `InvalidData` if it has another encoding."""
    with open_file(path) as file:
        start = file.read(4)
        marked = (name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark))
        encoding = next(marked, "utf-8")
        file.seek(0)
        try:
            with io.TextIOWrapper(file, encoding, newline="") as lines:
                for line in lines:
                    if "\0" in line:  # as UTF-16 has them, if it is read as another encoding
                        raise UnicodeError
                    yield line
            return
        except UnicodeError:
            pass
    with open_file(path) as file:
        text = file.read().decode(encoding, "replace")
    wrong = min(place for mark in "\0\ufffd" if (place := text.find(mark)) >= 0)
    raise InvalidData(
        f"{path} cannot be read: line {len((text[:wrong] + '.').splitlines())} is not text in "
        f"{encoding.removesuffix('-sig').upper()}: save the file as UTF-8, which Excel calls 'CSV "
        "UTF-8', or convert it, for instance with `iconv -f CP1252 -t UTF-8`"
    )


def read_csv(path: Path) -> dict[str, list[str | None]]:
    """Return the columns of a CSV file by name; columns without a name are left out.

    `InvalidData` if a row has more or fewer fields than the header, or two columns have one name.
    """
    columns: dict[str, list[str | None]] = {}
    for chunk in stream_csv(path):
        for name, values in chunk.items():
            columns.setdefault(name, []).extend(values)
    return columns


def stream_csv(path: Path) -> Iterator[dict[str, list[str | None]]]:
    """Yield the columns of a CSV file as `read_csv` does, of some rows at a time; at least once."""
    lines = stream_lines(path)
    first = next(lines, "")
    stated = re.fullmatch(r"sep=([,;\t])\r?\n", first, re.IGNORECASE)  # Excel reads and hides it
    head = list(islice(lines, HEADER_LINES)) if stated else [first, *islice(lines, HEADER_LINES)]
    separator = stated[1] if stated else _separator("".join(head))
    # The empty line in place of a stated separator lets lines keep their numbers.
    rows = _rows(chain(["\n"] if stated else (), head, lines), separator)
    records: list[list[str]] = []
    header: list[str] | None = None
    n_chunks = 0
    try:
        for row in rows:
            blank = len(row) < 2 and not "".join(row).strip()
            if not row or (blank and (header is None or len(header) > 1)):
                continue
            if header is None:
                header = [name.strip() for name in row]
                require_different(path, [name for name in header if name])
                continue
            if len(row) != len(header):
                if len(row) < len(header) or any(map(str.strip, row[len(header) :])):
                    raise InvalidData(
                        f"{path} cannot be read: line {rows.line_num} has {len(row)} fields and "
                        f"the header {len(header)}: quote values that contain the separator"
                    )
                row = row[: len(header)]
            records.append(row)
            if len(records) == CHUNK:
                yield _columns(header, records)
                records, n_chunks = [], n_chunks + 1
    except csv.Error as error:
        raise InvalidData(
            f"{path} cannot be read: line {rows.line_num}: {error}: check the quotation marks"
        ) from error
    if header is None:
        raise InvalidData(f"{path} cannot be read: it is empty: expected a header and rows")
    if records or not n_chunks:
        yield _columns(header, records)


def _columns(header: list[str], records: list[list[str]]) -> dict[str, list[str | None]]:
    columns = zip(*records, strict=True) if records else ((),) * len(header)
    return {
        name: [value.strip() or None for value in column]
        for name, column in zip(header, columns, strict=True)
        if name
    }


def read_parquet(path: Path, names: Collection[str]) -> Any:
    """Return an Arrow table of the columns with these names; missing ones are ignored.

    Blanks around names do not count.
    """
    import pyarrow as pa
    from pyarrow import parquet

    with open_file(path) as opened, parquet.ParquetFile(opened) as file:
        columns = [name for name in file.schema_arrow.names if name.strip() in names]
        require_different(path, [name.strip() for name in columns])
        # PyArrow reads lists of categories from one row group at a time only.
        groups = [file.read_row_group(number, columns) for number in range(file.num_row_groups)]
        table = pa.concat_tables(groups) if groups else file.read(columns)
    renamed = table.rename_columns([name.strip() for name in table.column_names])
    return renamed.replace_schema_metadata(table.schema.metadata)


def read_schema(path: Path) -> Any:
    """Return the schema of a Parquet file, of which no more is read."""
    from pyarrow import parquet

    with open_file(path, lazily=True) as file:
        return parquet.read_schema(file)


def list_values(path: Path, name: str, column: Any) -> list[Any]:
    """Return the values of an Arrow column, which may be lists of texts or numbers."""
    import pyarrow as pa

    joined = column.combine_chunks()
    leaf = joined.flatten() if is_list(joined.type) else joined
    if pa.types.is_nested(leaf.type):
        raise InvalidData(f"{path}: column {name} is of type {joined.type}: give texts or numbers")
    if leaf is joined and pa.types.is_dictionary(joined.type):
        joined = joined.dictionary_decode()  # much faster to list
    values: list[Any] = joined.to_pylist()
    return values


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is that of lists, of any length or all of the same one."""
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def parse_columns(
    file: Path, columns: Mapping[str, Any], names: Iterable[str], first: int = 1
) -> dict[str, Any]:
    """Return those of the named columns that a file has, each read by the rule for its name.

    Messages count rows from `first`.
    """
    return {
        name: COLUMN_READERS[name](columns[name], f"{as_text(file)}: column {name}", first=first)
        for name in names
        if name in columns
    }


def missing_column(table: Path | str, column: str, present: Sequence[str]) -> InvalidData:
    """Return the error of a table without a column, which names the columns that there are."""
    listed = ", ".join(map(printable, present)) or "none"
    wanted = re.findall(r"\w+", column)
    renamed = [
        f"rename {printable(name)} to {name.lower()}"
        for name in present
        if name not in wanted and name.lower() in wanted
    ]
    remedy = ", ".join(renamed) or "rename one, or add it"
    return InvalidData(f"{as_text(table)} has no column {column}; it has {listed}: {remedy}")


def _rows(lines: Iterable[str], separator: str) -> Any:
    return csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)


def _separator(text: str) -> str:
    """Return the separator that divides the header into the most columns."""
    n_columns = {}
    for separator in FIELD_SEPARATORS:
        try:
            n_columns[separator] = len(next(_rows(io.StringIO(text, newline=""), separator), []))
        except csv.Error:
            n_columns[separator] = 0
    return max(FIELD_SEPARATORS, key=n_columns.__getitem__)


def require_different(path: Path, names: Sequence[str]) -> None:
    """Raise `InvalidData` if a table has two columns of the same name."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InvalidData(f"{path} has several columns {printable(twice[0])}: rename them")
