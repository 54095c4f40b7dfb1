"""Tables of PostgreSQL with pgvector as galleries, in transactions that can only read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import psycopg
from numpy.typing import NDArray
from pgvector.psycopg import register_vector
from psycopg.conninfo import conninfo_to_dict
from psycopg.sql import Identifier

from rcir.errors import InvalidConfig
from rcir.index.attached import (
    AttachedIndex,
    AttachedOptions,
    Hits,
    Keys,
    Rows,
    as_date,
    as_keys,
    as_rows,
)
from rcir.index.base import require_range

SCANNED = 1 << 13  # rows that are read together
OPERATORS = {"l2": "<->", "cosine": "<=>", "dot": "<#>"}
METRICS = {"l2_ops": "l2", "cosine_ops": "cosine", "ip_ops": "dot"}
# The planner would choose by statistics, and a server's configuration has defaults of its own: with
# them, HNSW returns 40 rows.
BY_INDEX = dict.fromkeys(("enable_seqscan", "enable_sort", "enable_bitmapscan"), "off") | {
    "hnsw.iterative_scan": "strict_order",
    "hnsw.max_scan_tuples": str(2**31 - 1),
    "ivfflat.iterative_scan": "relaxed_order",
}
INDEXES = (  # of approximate search, with their columns and files, which a rebuild replaces
    "SELECT pg_get_indexdef(indexrelid), pg_relation_filenode(indexrelid), opcname, attname, "
    "indpred IS NULL AND indisvalid AND string_to_array(extversion, '.')::int[] >= '{0,8}' FROM "
    "pg_index JOIN pg_class ON pg_class.oid = indexrelid JOIN pg_am ON pg_am.oid = relam JOIN "
    "pg_opclass ON pg_opclass.oid = indclass[0] LEFT JOIN pg_attribute ON attrelid = indrelid AND "
    "attnum = indkey[0], pg_extension WHERE amname IN ('hnsw', 'ivfflat') AND indrelid = "
    "%s::regclass AND extname = 'vector' ORDER BY indexrelid"
)
TYPES = (
    "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
    "WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"
)
NEAREST = (
    "SELECT query.number::int - 1, near.id, near.distance FROM unnest(%b::vector[]) "
    "WITH ORDINALITY AS query (vector, number) CROSS JOIN LATERAL ("
    "SELECT {id} AS id, {vector} {operator} query.vector::{type} AS distance FROM {table}{where} "
    "ORDER BY {vector} {operator} query.vector::{type} LIMIT %s) AS near"
)
_lock = threading.RLock()  # a connection is in one transaction at a time


@dataclass(frozen=True)
class PgvectorOptions(AttachedOptions):
    """The options of `PgvectorIndex`, beside those of `AttachedOptions`.

    Args:
        ef_search: candidates of the search of HNSW, 1 to 1,000; at least the depth is used.
        probes: lists of IVFFlat that are searched, at least 1.
        timeout: seconds to wait for the server, at least 1.
    """

    ef_search: int = 200
    probes: int = 10
    timeout: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range(self, ef_search=(1, 1000), probes=(1, 32768), timeout=(1, 1e6))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Servers that the connection string names, or the file that names them."""
        try:
            parts = conninfo_to_dict(self.location)
        except psycopg.ProgrammingError:  # its message may contain the password
            parts = {"password": ""}
        if {"password", "sslpassword"} & parts.keys():
            raise InvalidConfig(
                "the address must be a connection string, without a password: pass "
                '"pgvector:postgresql://user@host/database#TABLE", and set PGPASSWORD'
            )
        texts = [str(parts.get(name, "")) for name in ("host", "hostaddr", "servicefile")]
        return tuple(host for text in texts for host in text.split(",") if host)


class PgvectorIndex(AttachedIndex):
    """A table with a unique column of ids, by which rows are named."""

    Options = PgvectorOptions
    errors = (psycopg.Error, OSError)
    filters = True

    @cached_property
    def engine(self) -> psycopg.Connection[Any]:
        """The connection."""
        seconds = self.options.timeout
        connection = psycopg.connect(self.options.location, connect_timeout=seconds)
        connection.execute("SELECT set_config('statement_timeout', %s, false)", [f"{seconds}s"])
        connection.execute("SET TIME ZONE 'UTC'")  # in which `where` states times
        connection.commit()
        connection.read_only = True
        register_vector(connection)
        return connection

    def _execute(self, statement: str, values: Sequence[Any], **settings: str) -> list[Any]:
        """Return the rows of a statement."""
        with _lock, self.reading():
            if self.engine.closed:  # as the last statement noticed
                del self.engine
            with self.engine.transaction():
                for pair in settings.items():
                    self.engine.execute("SELECT set_config(%s, %s, true)", pair)
                return self.engine.execute(statement, values, binary=True).fetchall()

    def _filled(self, statement: str, **parts: str) -> str:
        """Return a statement with the names of table and columns, and further parts."""
        names = {name: _quoted(self.options.column(name)) for name in ("id", "vector")}
        return statement.format(table=self._name.replace("%", "%%"), **names, **parts)

    @property
    def _name(self) -> str:
        return Identifier(*self.options.collection.split(".")).as_string()

    @cached_property
    def _types(self) -> Mapping[str, str]:
        return dict(self._execute(TYPES, [self._name]))

    @cached_property
    def _indexed_by(self) -> str | None:
        """The metric of the index that is used; None if all vectors are compared."""
        column, metrics = self.options.column("vector"), []
        for definition, _, operators, indexed, is_usable in self._execute(INDEXES, [self._name]):
            if self.options.exact or indexed not in (column, None):
                continue
            metric = METRICS.get(operators.partition("_")[2])
            if indexed is None or not is_usable or metric is None or metric in metrics:
                raise InvalidConfig(
                    f"an index cannot be used ({definition}): it must be valid, of all of column "
                    f"{column}, by cosine, L2 or inner product, the only one by it, and searched "
                    "by pgvector 0.8 or later: replace it, update pgvector, or pass exact=True"
                )
            metrics.append(metric)
        wanted = super().engine_metric
        return wanted if wanted in metrics else metrics[0] if metrics else None

    @property
    def engine_metric(self) -> str:
        return self._indexed_by or super().engine_metric

    def token(self) -> str:
        return str(self._execute(INDEXES, [self._name]))

    def names(self) -> list[str]:
        return list(self._types)

    def count(self) -> int:
        where, values = self._where()
        statement = self._filled("SELECT count(*) FROM {table}") + where
        return int(self._execute(statement, values)[0][0])

    def _select(self, names: Sequence[str], end: str) -> str:
        columns = "".join(f", {_quoted(name)}" for name in names)
        statement = "SELECT {id}, {vector}::vector{columns} FROM {table}" + end
        return self._filled(statement, columns=columns, type=self._types[self.options.column("id")])

    def scan(self, names: Sequence[str]) -> Iterator[Rows]:
        where, values = self._where()
        statement = self._select(names, "") + where
        with (
            _lock,
            self.reading(),
            self.engine.transaction(),
            self.engine.cursor("rcir", binary=True) as cursor,
        ):
            cursor.execute(statement, values)
            while rows := cursor.fetchmany(SCANNED):
                yield self._rows(rows, names)

    def fetch(self, keys: Keys, names: Sequence[str]) -> Rows:
        wanted = keys.tolist() if keys.dtype.kind == "i" else [key.decode() for key in keys]
        statement = self._select(names, " WHERE {id} = ANY(%s::{type}[])")
        return self._rows(self._execute(statement, [wanted]), names)

    def _rows(self, rows: Sequence[Any], names: Sequence[str]) -> Rows:
        columns = {name: [row[number] for row in rows] for number, name in enumerate(names, 2)}
        vectors = as_rows([row[1] and row[1].to_numpy() for row in rows])
        return Rows(as_keys([row[0] for row in rows]), vectors, columns)

    def find(self, vectors: NDArray[np.float32], k: int, part: str | None) -> Hits:
        metric, (where, values) = self.engine_metric, self._where(part)
        operator, kind = OPERATORS[metric], self._types[self.options.column("vector")]
        settings = {"enable_indexscan": "off"}
        if self._indexed_by is not None:
            ef = str(min(max(self.options.ef_search, k), 1000))
            settings = BY_INDEX | {"hnsw.ef_search": ef, "ivfflat.probes": str(self.options.probes)}
        statement = self._filled(NEAREST, operator=operator, type=kind, where=where)
        rows = self._execute(statement, [list(vectors), *values, k], **settings)
        return [(number, key, far + (metric == "dot")) for number, key, far in rows]

    def _where(self, part: str | None = None) -> tuple[str, list[Any]]:
        """Return the condition of the rows that are searched, and its values."""
        tests, texts = [], []
        for column, operator, values in self.options.conditions(part):
            tests.append(f"{_quoted(column)} {operator} ({', '.join(['%s'] * len(values))})")
            for value in values:  # a text takes the type of the column
                is_whole = isinstance(value, float) and value.is_integer()
                texts.append(str(int(value) if is_whole else value))
                if self._types[column].startswith(("date", "timestamp")):
                    as_date(column, value)
        return " WHERE " * bool(tests) + " AND ".join(tests), texts


def _quoted(name: str) -> str:
    """Return a name for statements that are executed with values."""
    return Identifier(name).as_string().replace("%", "%%")
