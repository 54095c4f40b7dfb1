"""Vectors in PostgreSQL with pgvector: connection, options and index."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
import psycopg
from numpy.typing import NDArray
from pgvector.psycopg import register_vector
from psycopg import Connection, errors, sql
from psycopg.conninfo import conninfo_to_dict

from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, StaleCalibration
from rcir.index.base import Neighbours, check_vectors, no_neighbours, require_range
from rcir.options import require_choice
from rcir.stored_vectors import batches

Returned = TypeVar("Returned")
PgvectorMethod = Literal["hnsw", "ivfflat", "exact"]
OLDEST_PGVECTOR = (0, 8)  # the first version that continues a search that found too few rows
MAX_INDEXED_DIM = 2000  # of pgvector
# Every search sets all that decides its results: the planner would choose an index by statistics,
# and the server's configuration has defaults of its own.
COMMON_SETTINGS = {"jit": "off", "work_mem": "64MB", "hnsw.scan_mem_multiplier": "1"}
BY_INDEX = {"enable_indexscan": "on"} | dict.fromkeys(
    ("enable_seqscan", "enable_sort", "enable_bitmapscan"), "off"
)
ONE_BY_ONE = {"enable_seqscan": "on", "enable_sort": "on"} | dict.fromkeys(
    ("enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"), "off"
)
PGVECTOR_FILE = "table.json"
# Ids and vectors of `dim` numbers, and one row with a UUID, which a trigger replaces after every
# change. The trigger has the rights of the owner: every role that can write changes the UUID.
CREATE_TABLE = (
    "CREATE TABLE {table} (id bigint PRIMARY KEY, embedding vector({dim}) NOT NULL){storage}",
    "CREATE TABLE {state} (contents uuid NOT NULL)",
    "INSERT INTO {state} VALUES (gen_random_uuid())",
    "CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER "
    "SET search_path = pg_catalog, pg_temp AS $$ BEGIN "
    "EXECUTE format('UPDATE %I.%I SET contents = gen_random_uuid()', "
    "TG_TABLE_SCHEMA, TG_TABLE_NAME || '_state'); RETURN NULL; END $$",
    "CREATE TRIGGER rcir_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON {table} "
    "FOR EACH STATEMENT EXECUTE FUNCTION {function}()",
)
# The UUID, and a token of the index: pgvector's version and the files of all indexes, which a
# rebuild replaces.
TABLE_STATE = (
    "SELECT {state}.contents::text, (SELECT extversion || ' ' || "
    "string_agg(pg_relation_filenode(indexrelid)::text, ' ' ORDER BY indexrelid) "
    "FROM pg_extension, pg_index WHERE extname = 'vector' AND indrelid = {regclass} "
    "GROUP BY extversion){vacuums} FROM {state}"
)
# For a graph, also the number and time of vacuums, which repair it.
VACUUM_STATE = (
    " || ' ' || pg_stat_get_vacuum_count({regclass}) + "
    "pg_stat_get_autovacuum_count({regclass}) || ' ' || coalesce(extract(epoch FROM "
    "greatest(pg_stat_get_last_vacuum_time({regclass}), "
    "pg_stat_get_last_autovacuum_time({regclass})))::text, '') || CASE WHEN EXISTS ("
    "SELECT 1 FROM pg_locks WHERE relation = {regclass} AND granted "
    "AND mode = 'ShareUpdateExclusiveLock') THEN ' in work' ELSE '' END"
)
# In any order: the number of each query, from 1; ids of rows as big-endian int64; and L2 distances
# as float64.
NEAREST_ROWS = (
    "SELECT query.number::int, coalesce(found.ids, ''), coalesce(found.distances, '') "
    "FROM unnest(%b::vector[]) WITH ORDINALITY AS query (vector, number) "
    "CROSS JOIN LATERAL ("
    "SELECT string_agg(int8send(id), ''::bytea) AS ids, "
    "string_agg(float8send(distance), ''::bytea) AS distances FROM ("
    "SELECT id, embedding <-> query.vector AS distance FROM {table} "
    "ORDER BY embedding <-> query.vector{ties} LIMIT %s) AS nearest) AS found"
)


# Vectors as pgvector sends them, one after another in the order of a list of ids.
VECTORS_OF_IDS = (
    "SELECT coalesce(string_agg(vector_send(embedding), ''::bytea ORDER BY number), '') FROM "
    "unnest(%b::bigint[]) WITH ORDINALITY AS wanted (id, number) JOIN {table} USING (id)"
)


class Postgres:
    """One connection to a server, for one transaction at a time; copies have their own.

    All methods raise `DataUnavailable` if the server cannot be reached or fails.
    """

    def __init__(self, dsn: str, timeout: float) -> None:
        self.dsn, self.timeout = dsn, timeout
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"dsn": self.dsn, "timeout": self.timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._connection: Connection[Any] | None = None
        self._process, self._lock = os.getpid(), threading.RLock()

    def __del__(self) -> None:
        connection = self.__dict__.get("_connection")
        if connection is not None and self._process == os.getpid():
            connection.close()

    def read(self, work: Callable[[Connection[Any]], Returned]) -> Returned:
        """Return the result of work in one snapshot, within the timeout; reconnect once."""
        with self._lock, _errors_of_rcir():
            connection = self._connected()
            try:
                return self._read(connection, work)
            except psycopg.OperationalError:
                if not connection.closed:
                    raise
                return self._read(self._connected(), work)

    def write(self, work: Callable[[Connection[Any]], Returned]) -> Returned:
        """Return the result of work in one transaction, of which all is done or nothing."""
        with self._lock, _errors_of_rcir():
            connection = self._connected()
            with connection.transaction():
                connection.execute("SET LOCAL statement_timeout = 0")
                connection.execute(f"SET LOCAL lock_timeout = {round(self.timeout * 1000)}")
                return work(connection)

    def execute(self, statement: Any) -> None:
        """Execute a statement that cannot be in a transaction."""
        with self._lock, _errors_of_rcir():
            self._connected().execute(statement)

    def _read(
        self, connection: Connection[Any], work: Callable[[Connection[Any]], Returned]
    ) -> Returned:
        late = threading.Event()

        def disconnect() -> None:  # from a server that does not even cancel a statement
            late.set()
            with (
                suppress(OSError, psycopg.Error),
                socket.socket(fileno=os.dup(connection.fileno())) as twin,
            ):
                twin.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self.timeout + 1, disconnect)
        timer.daemon = True
        timer.start()
        try:
            with connection.pipeline(), connection.transaction():
                connection.execute(f"SET LOCAL statement_timeout = {round(self.timeout * 1000)}")
                return work(connection)
        except psycopg.OperationalError as error:
            if late.is_set() or isinstance(error, errors.QueryCanceled):
                raise DataUnavailable(
                    f"PostgreSQL did not answer within {self.timeout:g} s: search again, or "
                    "raise the option timeout"
                ) from error
            raise
        finally:
            timer.cancel()

    def _connected(self) -> Connection[Any]:
        """Return the connection, or a new one if it was lost or belongs to a parent process."""
        if self._process != os.getpid():
            self._forget()
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Connection[Any]:
        seconds = max(2, round(self.timeout))  # the least that libpq accepts
        connection = psycopg.connect(
            self.dsn, autocommit=True, prepare_threshold=None, connect_timeout=seconds
        )
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        statement = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
        row = connection.execute(statement).fetchone()
        if row is None or tuple(map(int, row[0].split(".")[:2])) < OLDEST_PGVECTOR:
            state = "has no extension vector" if row is None else f"has pgvector {row[0]}"
            connection.close()
            raise DataUnavailable(
                f"the database {state}; pgvector 0.8 or later is required: install it on the "
                "server, then CREATE EXTENSION vector (or ALTER EXTENSION vector UPDATE)"
            )
        register_vector(connection)
        return connection


@contextmanager
def _errors_of_rcir() -> Iterator[None]:
    """Raise errors of psycopg as errors of rcir."""
    try:
        yield
    except psycopg.Error as error:
        line = (str(error).strip() or type(error).__name__).partition("\n")[0]
        match error:
            case errors.SerializationFailure():
                raise StaleCalibration(
                    f"someone else changed the table at the same time ({line}): nothing was "
                    "changed here; load the retriever again"
                ) from error
            case errors.UndefinedTable():
                raise DataUnavailable(
                    f"the table is gone ({line}): build the retriever again"
                ) from error
            case errors.DuplicateTable():
                raise InvalidConfig(
                    f"{line}, and is left as it is: drop it, or set the option table"
                ) from error
            case psycopg.DataError():
                raise InvalidData(f"PostgreSQL refuses the vectors: {line}") from error
            case psycopg.OperationalError():
                raise DataUnavailable(
                    f"PostgreSQL cannot be reached or failed ({line}): check that it runs, the "
                    "option dsn, and the password in PGPASSWORD or ~/.pgpass"
                ) from error
            case _:
                raise DataUnavailable(f"PostgreSQL refuses ({line}): see its log") from error


@dataclass(frozen=True)
class PgvectorOptions:
    """The options of `PgvectorIndex`.

    Args:
        dsn: libpq's connection string, without a password (PGPASSWORD, ~/.pgpass); parameters that
            it lacks are taken from PGHOST and the like.
        table: "name" or "schema.name", in lower case; it must not exist when the index is built.
        method: "hnsw", "ivfflat", or "exact", which compares all vectors.
        m, ef_construction: of the HNSW graph: links, 2 to 100, and candidates while it is built, 4
            to 1,000, at least 2 m.
        ef_search, max_scan_tuples: of its search: candidates, 1 to 1,000; if more results are
            requested, it continues until it has visited `max_scan_tuples` vectors.
        lists, probes: of IVFFlat: number of lists, 1 to 32,768, and of those that are searched.
        timeout: seconds to connect, and of a search, 0.001 to 1,000,000.

    Raises:
        InvalidConfig: an option is out of range.
    """

    dsn: str = ""
    table: str = "rcir_vectors"
    method: PgvectorMethod = "hnsw"
    m: int = 16
    ef_construction: int = 64
    ef_search: int = 200
    max_scan_tuples: int = 20_000
    lists: int = 100
    probes: int = 10
    timeout: float = 30.0

    def __post_init__(self) -> None:
        try:
            parts = conninfo_to_dict(self.dsn)
        except psycopg.ProgrammingError:  # its message may contain the password
            raise InvalidConfig(
                'dsn is not a connection string of libpq: pass "host=... dbname=... user=..." or '
                '"postgresql://user@host/database"'
            ) from None
        if {"password", "sslpassword"} & parts.keys():
            raise InvalidConfig(
                "dsn contains a password, which would be stored with a retriever: use PGPASSWORD "
                "or ~/.pgpass, which libpq reads"
            )
        if not re.fullmatch(r"([a-z_][a-z0-9_]{0,49}\.)?[a-z_][a-z0-9_]{0,49}", self.table):
            raise InvalidConfig(
                f"table is {self.table!r}; it must be a name, or schema.name, of at most 50 lower "
                "case letters, digits and underscores"
            )
        require_choice("method", self.method, PgvectorMethod)
        require_range(
            self,
            m=(2, 100),
            ef_construction=(4, 1000),
            ef_search=(1, 1000),
            max_scan_tuples=(1, 2**31 - 1),
            lists=(1, 32768),
            probes=(1, 32768),
            timeout=(1e-3, 1e6),
        )
        if self.ef_construction < 2 * self.m:
            raise InvalidConfig(
                f"ef_construction is {self.ef_construction}; at least twice m, which is {self.m}"
            )
        if self.probes > self.lists:
            raise InvalidConfig(f"probes is {self.probes}; at most lists, which is {self.lists}")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Servers that the connection string names, or the file that names them."""
        parts = conninfo_to_dict(self.dsn)
        texts = [str(parts.get(name, "")) for name in ("host", "hostaddr", "servicefile")]
        return tuple(host for text in texts for host in text.split(",") if host)

    @property
    def index_sql(self) -> str:
        """The index with its build parameters, as in CREATE INDEX."""
        hnsw = f"m = {self.m}, ef_construction = {self.ef_construction}"
        parameters = hnsw if self.method == "hnsw" else f"lists = {self.lists}"
        return f"{self.method} (embedding vector_l2_ops) WITH ({parameters})"

    @property
    def search_settings(self) -> dict[str, str]:
        """The settings of PostgreSQL that decide what a search finds."""
        by_method = {
            "exact": ONE_BY_ONE,
            "hnsw": BY_INDEX
            | {
                "hnsw.ef_search": str(self.ef_search),
                "hnsw.max_scan_tuples": str(self.max_scan_tuples),
                "hnsw.iterative_scan": "strict_order",
            },
            "ivfflat": BY_INDEX
            | {
                "ivfflat.probes": str(self.probes),
                "ivfflat.iterative_scan": "relaxed_order",
                "ivfflat.max_probes": str(self.lists),
            },
        }
        return COMMON_SETTINGS | by_method[self.method]


class PgvectorIndex:
    """A table of vectors in a PostgreSQL server with pgvector 0.8 or later.

    A retriever's folder contains the options and the state of the table, no vectors. Every search
    compares this state with the present one, in its own snapshot, and raises `StaleCalibration` if
    anyone else changed the table or its index; docs/indexes.md says what is not detected.
    Autovacuum is off for a table with HNSW, because a VACUUM may change answers.

    Ids of rows, also in memory, are ascending; a row's position is the number of smaller ids.
    """

    Options = PgvectorOptions
    server = "PostgreSQL"

    def __init__(self, options: PgvectorOptions) -> None:
        self.options = options
        self._server = Postgres(options.dsn, options.timeout)
        self._dim = 0
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._contents = self._token = ""  # see `TABLE_STATE`

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: PgvectorOptions) -> Self:
        vectors = check_vectors(vectors)
        index = cls(options)
        index._dim = vectors.shape[1]
        if index._dim > MAX_INDEXED_DIM and options.method != "exact":
            raise InvalidConfig(
                f"vectors have {index._dim} dimensions, and pgvector indexes at most "
                f'{MAX_INDEXED_DIM}: reduce them, or choose the method "exact"'
            )

        def fill(connection: Connection[Any]) -> tuple[str, str]:
            storage = " WITH (autovacuum_enabled = false)" if options.method == "hnsw" else ""
            for statement in CREATE_TABLE:
                connection.execute(index._fill_in(statement, storage=sql.SQL(storage)))
            index._copy(connection, vectors, 0)
            if options.method != "exact":
                create = f"CREATE INDEX ON {{table}} USING {options.index_sql}"
                connection.execute(index._fill_in(create))
            return index._read_state(connection)

        index._contents, index._token = index._server.write(fill)
        index._ids = np.arange(len(vectors))
        return index

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, vectors: NDArray[np.float32]) -> None:
        vectors = check_vectors(vectors, self._dim)
        if not len(vectors):
            return
        first = int(self._ids[-1]) + 1 if len(self) else 0
        self._change(lambda connection: self._copy(connection, vectors, first))
        self._ids = np.concatenate([self._ids, np.arange(first, first + len(vectors))])

    def remove(self, positions: NDArray[np.int64]) -> None:
        ids = np.unique(self._ids[np.asarray(positions, np.int64)])
        if not len(ids):
            return

        def delete(connection: Connection[Any]) -> None:
            statement = self._fill_in("DELETE FROM {table} WHERE id = ANY(%s)")
            if connection.execute(statement, [ids.tolist()]).rowcount != len(ids):
                raise self._changed()

        self._change(delete)
        self._ids = np.setdiff1d(self._ids, ids, assume_unique=True)
        if self.options.method == "hnsw":
            # Now, because a VACUUM repairs the graph and may change answers. If it fails, or others
            # can still read the rows, a later VACUUM makes the calibration stale.
            with suppress(DataUnavailable):
                self._server.execute(self._fill_in("VACUUM {table}"))
                contents, token = self._server.read(self._read_state)
                if contents == self._contents:
                    self._token = token

    def search(self, vectors: NDArray[np.float32], k: int) -> Neighbours:
        """See `Index.search`; returns k rows, or all if the table has fewer.

        Raises:
            DataUnavailable: the server cannot be reached, fails, or takes too long.
            StaleCalibration: somebody else changed the table, or rebuilt an index of it.
            InvalidConfig: the search found fewer rows.
            InvalidData: the queries are not such vectors.
        """
        vectors = check_vectors(vectors, self._dim)
        distances, positions = no_neighbours(len(vectors), k)
        count, settings = min(k, len(self)), self.options.search_settings
        ties = ", id" if self.options.method == "exact" else ""  # no index has both orders
        statement = self._fill_in(NEAREST_ROWS, ties=sql.SQL(ties))

        def query(connection: Connection[Any]) -> list[tuple[int, bytes, bytes]]:
            # Before the snapshot is taken: from then on nobody can empty or drop the table.
            self._lock(connection, "ACCESS SHARE")
            calls = ", ".join(["set_config(%s, %s, true)"] * len(settings))
            connection.execute(
                f"SELECT {calls}", [text for pair in settings.items() for text in pair]
            )
            values = [list(vectors), max(count, 1)]
            rows = connection.execute(statement, values, binary=True).fetchall()
            # After the search, whose lock prevents that its index is replaced.
            self._check_state(connection)
            return rows

        results = self._server.read(query)
        if not results or not count:
            return distances, positions
        least = min(len(ids) // 8 for _, ids, _ in results)
        if least < count or len(results) < len(vectors):
            more = "probes" if self.options.method == "ivfflat" else "ef_search or max_scan_tuples"
            raise InvalidConfig(
                f"{self.options.method} found {least} of the {count} nearest of {len(self)} "
                f'vectors: search with more {more}, or choose the method "exact"'
            )
        rows = np.array([number for number, _, _ in results]) - 1
        ids = np.frombuffer(b"".join(row[1] for row in results), ">i8").reshape(-1, count)
        exact = np.frombuffer(b"".join(row[2] for row in results), ">f8").reshape(-1, count)
        places = np.minimum(np.searchsorted(self._ids, ids), len(self) - 1)
        if (self._ids[places] != ids).any():
            raise self._changed()
        order = np.lexsort((places, exact))
        distances[rows, :count] = np.take_along_axis(exact, order, axis=1)
        positions[rows, :count] = np.take_along_axis(places, order, axis=1)
        return distances, positions

    def vectors_at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Index.vectors_at`; raises the errors of `search`."""
        ids = self._ids[np.asarray(positions, np.int64)]
        statement = self._fill_in(VECTORS_OF_IDS)

        def query(connection: Connection[Any]) -> list[bytes]:
            self._lock(connection, "ACCESS SHARE")
            parts = []
            for rows in batches(len(ids), self._dim):
                row = connection.execute(statement, [ids[rows].tolist()], binary=True).fetchone()
                assert row is not None
                parts.append(row[0])
            self._check_state(connection)
            return parts

        # Before each vector, its number of dimensions and a number that is not used.
        row_type = np.dtype([("head", ">i2", 2), ("vector", ">f4", self._dim)])
        table = np.frombuffer(b"".join(self._server.read(query)), row_type)
        if len(table) != len(ids):
            raise self._changed()
        return table["vector"].astype(np.float32)

    def drop(self) -> None:
        """Drop the table and what records its changes, see `IsRemote.drop`."""

        def drop(connection: Connection[Any]) -> None:
            self._lock(connection, "ACCESS EXCLUSIVE")
            if self._read_state(connection)[0] != self._contents:
                raise self._changed()
            connection.execute(self._fill_in("DROP TABLE {table}, {state}"))
            connection.execute(self._fill_in("DROP FUNCTION {function}()"))

        self._server.write(drop)

    @property
    def version(self) -> str:
        """A token of the table as last read or written, and of how it is searched."""
        settings = " ".join(f"{name}={text}" for name, text in self.options.search_settings.items())
        return f"pgvector {self._contents} {self._token} {settings}"

    def save(self, folder: Path) -> None:
        values = {"contents": self._contents, "n": len(self), "dim": self._dim}
        (folder / PGVECTOR_FILE).write_text(json.dumps(values))

    @classmethod
    def load(cls, folder: Path, options: PgvectorOptions) -> Self:
        """See `Index.load`.

        Raises:
            DataUnavailable: the server cannot be reached, or the table is gone.
            StaleCalibration: the table was changed since.
        """
        values = json.loads((folder / PGVECTOR_FILE).read_text())
        index = cls(options)
        index._dim, index._contents = int(values["dim"]), str(values["contents"])

        def read(connection: Connection[Any]) -> tuple[bytes, tuple[str, str]]:
            index._lock(connection, "ACCESS SHARE")
            joined = "SELECT string_agg(int8send(id), ''::bytea ORDER BY id) FROM {table}"
            row = connection.execute(index._fill_in(joined), binary=True).fetchone()
            return (row and row[0]) or b"", index._read_state(connection)

        ids, (contents, index._token) = index._server.read(read)
        index._ids = np.frombuffer(ids, ">i8").astype(np.int64)
        if contents != index._contents or len(index) != values["n"]:
            raise index._changed()
        return index

    def _change(self, work: Callable[[Connection[Any]], None]) -> None:
        """Change the table unless somebody else did; other writers wait."""

        def change(connection: Connection[Any]) -> tuple[str, str]:
            self._lock(connection, "SHARE ROW EXCLUSIVE")
            self._check_state(connection)
            work(connection)
            return self._read_state(connection)

        self._contents, self._token = self._server.write(change)

    def _copy(self, connection: Connection[Any], vectors: NDArray[np.float32], first: int) -> None:
        """Add vectors (n, d), with ids from the first one on."""
        into = self._fill_in("COPY {table} (id, embedding) FROM STDIN (FORMAT BINARY)")
        with connection.cursor() as cursor, cursor.copy(into) as copy:
            copy.set_types(["int8", "vector"])
            for row in enumerate(vectors, first):
                copy.write_row(row)

    def _lock(self, connection: Connection[Any], mode: str) -> None:
        """Prevent operations that conflict with a lock mode until the transaction ends."""
        connection.execute(self._fill_in(f"LOCK TABLE {{table}} IN {mode} MODE"))

    def _read_state(self, connection: Connection[Any]) -> tuple[str, str]:
        """Return the UUID of the table's content, and a token of its index, see `TABLE_STATE`."""
        vacuums = self._fill_in(VACUUM_STATE if self.options.method == "hnsw" else "")
        row = connection.execute(self._fill_in(TABLE_STATE, vacuums=vacuums)).fetchone()
        if row is None or row[1] is None:
            raise self._changed()
        return row[0], row[1]

    def _check_state(self, connection: Connection[Any]) -> None:
        contents, token = self._read_state(connection)
        if contents != self._contents:
            raise self._changed()
        if token != self._token:
            self._token = token
            raise StaleCalibration(
                f"an index of the table {self.options.table}, or pgvector, was replaced or "
                "vacuumed since this was loaded or calibrated, and may answer differently: "
                "call `recalibrate`"
            )

    def _changed(self) -> StaleCalibration:
        return StaleCalibration(
            f"the table {self.options.table} was changed by someone else: which of its rows is "
            "which item is no longer known; build the retriever again from its vectors"
        )

    def _fill_in(self, statement: str, **parts: sql.Composable) -> sql.Composed:
        """Return a statement with the names of the table, its state, function and class."""
        *schema, name = self.options.table.split(".")
        return sql.SQL(statement).format(
            table=sql.Identifier(*schema, name),
            state=sql.Identifier(*schema, f"{name}_state"),
            function=sql.Identifier(*schema, f"{name}_changed"),
            regclass=sql.SQL("{}::regclass").format(sql.Literal(self.options.table)),
            dim=sql.Literal(self._dim),
            **parts,
        )
