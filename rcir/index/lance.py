"""LanceDB tables as galleries: one version is searched, whatever becomes of the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rcir.errors import DataUnavailable, InvalidConfig, InvalidData
from rcir.index.attached import (
    AttachedIndex,
    AttachedOptions,
    Hits,
    Keys,
    Rows,
    as_date,
    refused_value,
)
from rcir.index.base import require_range

SCANNED = 1 << 14  # rows that are read together
ROW = "_rowid"


@dataclass(frozen=True)
class LanceOptions(AttachedOptions):
    """The options of `LanceIndex`, beside those of `AttachedOptions`.

    Args:
        nprobes: lists of an IVF index that are searched, at least 1; more of them where a part has
            too few rows in these.
        refine_factor: times as many candidates as requested are ranked by exact distances if the
            index holds codes, at least 1.
    """

    nprobes: int = 20
    refine_factor: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version and not self.version.isdecimal():
            raise InvalidConfig(f"version is {self.version!r}; a LanceDB table numbers them")
        require_range(self, nprobes=(1, 1e6), refine_factor=(1, 1000))


class LanceIndex(AttachedIndex):
    """A version of a LanceDB table; rows are named by their row ids."""

    Options = LanceOptions
    errors = (OSError, RuntimeError, ValueError)
    filters = True

    @cached_property
    def engine(self) -> Any:
        """The table, at its version."""
        with self.reading():
            table = lancedb.connect(self.options.location).open_table(self.options.collection)
            if self.options.version:
                table.checkout(int(self.options.version))
        return table

    @cached_property
    def _index(self) -> tuple[str, str] | None:
        """Kind and metric of the index; None if there is none, or it is not to be used."""
        with self.reading():
            indexes = [] if self.options.exact else self.engine.list_indices()
        for index in indexes:
            if list(index.columns) == [self.options.column("vector")]:
                return index.index_type.lower(), index.index_details["metric_type"].lower()
        return None

    @property
    def engine_metric(self) -> str:
        return super().engine_metric if self._index is None else self._index[1]

    def latest(self) -> str:
        return str(self.engine.version)

    def state(self) -> str:
        """Return number and time of the version that is searched."""
        with self.reading():
            times = {each["version"]: each["timestamp"] for each in self.engine.list_versions()}
            number = self.engine.version
        if number not in times:
            name = self.options.collection
            raise DataUnavailable(f"version {number} of {name} was cleaned up: attach it again")
        return f"{number}@{times[number].timestamp():.6f}"

    def names(self) -> list[str]:
        return [str(name) for name in self.engine.schema.names]

    def count(self) -> int:
        with self.reading():
            return int(self.engine.count_rows(self._filter()))

    def scan(self, names: Sequence[str]) -> Iterator[Rows]:
        query = self.engine.search().limit(max(self.count(), 1)).with_row_id(True)
        if condition := self._filter():
            query = query.where(condition)
        with self.reading():
            reader = query.select(self._columns(names)).to_batches(SCANNED)
            batch = next(reader, None)
        while batch is not None:
            yield self._rows(pa.Table.from_batches([batch]), names)
            with self.reading():
                batch = next(reader, None)

    def fetch(self, keys: Keys, names: Sequence[str]) -> Rows:
        query = self.engine.take_row_ids(keys.tolist()).with_row_id()
        with self.reading():
            table = query.select(self._columns(names)).to_arrow()
        return self._rows(table, names)

    def _columns(self, names: Sequence[str]) -> list[str]:
        return list(dict.fromkeys([*names, self.options.column("vector")]))

    def _rows(self, table: Any, names: Sequence[str]) -> Rows:
        name = self.options.column("vector")
        column = table.column(name).combine_chunks()
        if not pa.types.is_fixed_size_list(column.type) or column.null_count:
            raise InvalidData(
                f"column {name} holds {column.type}, {column.null_count} of them missing; LanceDB "
                "searches lists of a fixed size, such as fixed_size_list<float>[128], without gaps"
            )
        vectors = np.asarray(column.flatten().to_numpy(zero_copy_only=False), np.float32)
        columns = {name: table.column(name).to_pylist() for name in names}
        keys = table.column(ROW).to_numpy().astype(np.int64)
        return Rows(keys, vectors.reshape(len(table), -1), columns)

    def find(self, vectors: NDArray[np.float32], k: int, part: str | None) -> Hits:
        metric, condition = self.engine_metric, self._filter(part)
        # The last one twice, because a single query would have no number.
        query = self.engine.search(
            [*vectors, vectors[-1]], vector_column_name=self.options.column("vector")
        )
        query = query.distance_type(metric).select(["_distance"]).with_row_id(True).limit(k)
        if self._index is None:
            query = query.bypass_vector_index()
        else:
            query = query.nprobes(self.options.nprobes)
            if not self._index[0].endswith("flat"):
                query = query.refine_factor(self.options.refine_factor)
        if condition is not None:
            if self._index is not None:
                query = query.maximum_nprobes(0)  # until there are k; slow without a filter
            query = query.where(condition, prefilter=True)
        with self.reading():
            table = query.to_arrow()
        table = table.filter(pa.compute.less(table.column("query_index"), len(vectors)))
        far = np.maximum(table.column("_distance").to_numpy().astype(np.float64), 0)
        numbers, keys = (table.column(name).to_pylist() for name in ("query_index", ROW))
        return zip(numbers, keys, (np.sqrt(far) if metric == "l2" else far).tolist(), strict=True)

    def _filter(self, part: str | None = None) -> str | None:
        """Return the condition of the rows that are searched; None for all rows."""
        tests = []
        for column, operator, values in self.options.conditions(part):
            kind = self.engine.schema.field(column).type
            texts = [_literal(column, kind, value) for value in values]
            tests.append(f"`{column}` {operator} ({', '.join(texts)})")
        return " AND ".join(tests) or None


def _literal(column: str, kind: pa.DataType, value: Any) -> str:
    """Return a value in SQL, for a column of a type, or raise `InvalidConfig`."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_date(kind):
        return f"date '{as_date(column, value).date()}'"
    if pa.types.is_timestamp(kind):
        return f"timestamp '{as_date(column, value).isoformat()}'"
    try:
        converted = pa.scalar(value).cast(kind).as_py()
    except (pa.ArrowException, OverflowError, ValueError):
        raise refused_value(column, value, str(kind)) from None
    if isinstance(converted, Decimal):
        return f"CAST('{converted}' AS DECIMAL({kind.precision}, {kind.scale}))"
    quoted = "'" + str(converted).replace("'", "''") + "'"
    return quoted if isinstance(converted, str) else str(converted)
