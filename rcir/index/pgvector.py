"""Vectors in PostgreSQL with pgvector: the connection, the options, the table, and the index."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, StaleCalibration
from rcir.imports import naming_extras
from rcir.index.base import check_vectors, require_range

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import Composed

Returned = TypeVar("Returned")
PgvectorMethod = Literal["hnsw", "ivfflat", "exact"]
OLDEST_PGVECTOR = (0, 8)  # of pgvector: the first that goes on where an index found too few
MAX_INDEXED_DIM = 2000  # dimensions that pgvector indexes, at most
# What decides an answer besides the vectors is never left to the server: neither to its planner,
# which takes or leaves an index by its statistics, nor to what its configuration says.
COMMON_SETTINGS = {"jit": "off", "work_mem": "64MB", "hnsw.scan_mem_multiplier": "1"}
BY_INDEX = {"enable_indexscan": "on"} | dict.fromkeys(
    ("enable_seqscan", "enable_sort", "enable_bitmapscan"), "off"
)
ONE_BY_ONE = {"enable_seqscan": "on", "enable_sort": "on"} | dict.fromkeys(
    ("enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"), "off"
)
PGVECTOR_FILE = "table.json"


def check_dsn(dsn: str) -> None:
    """Raise `InvalidConfig` unless libpq takes it as a connection string, without a password.

    Example:
        >>> check_dsn("host=db.example dbname=images password=secret")
        Traceback (most recent call last):
        rcir.errors.InvalidConfig: dsn holds a password, which would be stored with a retriever: \
leave it out, and give it by PGPASSWORD or ~/.pgpass, as libpq reads it
    """
    with naming_extras():
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    try:
        parts = conninfo_to_dict(dsn)
    except ProgrammingError:  # its message may hold the password
        raise InvalidConfig(
            'dsn is no connection string of libpq: give "host=... dbname=... user=..." or '
            '"postgresql://user@host/database"'
        ) from None
    if {"password", "sslpassword"} & parts.keys():
        raise InvalidConfig(
            "dsn holds a password, which would be stored with a retriever: leave it out, and give "
            "it by PGPASSWORD or ~/.pgpass, as libpq reads it"
        )


class Postgres:
    """One connection to a server, for one transaction at a time; copies have their own.

    Args:
        dsn: see `check_dsn`; what it leaves out is taken from PGHOST and the like.
        timeout: seconds to connect, and of each search.
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
        """The result of work in one snapshot; tried again, once, where the connection is lost.

        Raises:
            DataUnavailable: the server cannot be reached, fails, or takes longer than the timeout.
        """
        with self._lock, _in_words():
            try:
                return self._try(work)
            except _Lost:
                return self._try(work)

    def write(self, work: Callable[[Connection[Any]], Returned]) -> Returned:
        """The result of work in one transaction, of which all is done or nothing.

        Raises:
            DataUnavailable: the server cannot be reached, or fails.
        """
        with self._lock, _in_words():
            connection = self._connected()
            with connection.transaction():
                connection.execute("SET LOCAL statement_timeout = 0")
                connection.execute(f"SET LOCAL lock_timeout = {round(self.timeout * 1000)}")
                return work(connection)

    def alone(self, statement: Any) -> None:
        """Execute what no transaction can hold."""
        with self._lock, _in_words():
            self._connected().execute(statement)

    def _try(self, work: Callable[[Connection[Any]], Returned]) -> Returned:
        import psycopg

        connection, late = self._connected(), threading.Event()

        def give_up() -> None:  # of a server that does not even end what takes too long
            late.set()
            with suppress(OSError, psycopg.Error):
                twin = socket.socket(fileno=os.dup(connection.fileno()))
                twin.shutdown(socket.SHUT_RDWR)
                twin.close()

        timer = threading.Timer(self.timeout + 1, give_up)
        timer.daemon = True
        timer.start()
        try:
            with connection.pipeline(), connection.transaction():
                connection.execute(f"SET LOCAL statement_timeout = {round(self.timeout * 1000)}")
                return work(connection)
        except psycopg.OperationalError as error:
            slow = late.is_set() or isinstance(error, psycopg.errors.QueryCanceled)
            if slow:
                raise DataUnavailable(
                    f"PostgreSQL did not answer within {self.timeout:g} s: search again, with a "
                    "larger timeout if its load is usual"
                ) from error
            if connection.closed:
                raise _Lost(str(error)) from error
            raise
        finally:
            timer.cancel()

    def _connected(self) -> Connection[Any]:
        """The connection, a new one where the last was lost or is that of a parent process."""
        if self._process != os.getpid():
            self._forget()
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Connection[Any]:
        with naming_extras():
            import psycopg
            from pgvector.psycopg import register_vector
        seconds = max(2, round(self.timeout))  # libpq takes no less
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
                f"the database {state}; needed is pgvector 0.8 or later: install it on the server, "
                "then CREATE EXTENSION vector (or ALTER EXTENSION vector UPDATE)"
            )
        register_vector(connection)
        return connection


class _Lost(DataUnavailable):
    """The connection ended."""

    def __str__(self) -> str:
        return f"PostgreSQL ended the connection ({self.args[0]}): see that it runs, and try again"


@contextmanager
def _in_words() -> Iterator[None]:
    """Errors of psycopg as those of rcir."""
    with naming_extras():
        import psycopg
    try:
        yield
    except psycopg.errors.SerializationFailure as error:
        raise StaleCalibration(
            f"someone else changed the table at the same time ({_first_line(error)}): nothing was "
            "changed here; load the retriever again"
        ) from error
    except psycopg.errors.UndefinedTable as error:
        raise DataUnavailable(
            f"the table of the index is gone ({_first_line(error)}): build the retriever anew"
        ) from error
    except psycopg.errors.DuplicateTable as error:
        raise InvalidConfig(
            f"{_first_line(error)}, and is left alone: drop it, or choose another one by the "
            "option table"
        ) from error
    except psycopg.DataError as error:
        raise InvalidData(f"PostgreSQL refuses the vectors: {_first_line(error)}") from error
    except psycopg.OperationalError as error:
        raise DataUnavailable(
            f"PostgreSQL cannot be reached or failed ({_first_line(error)}): see that it runs, "
            "that the option dsn is right and that PGPASSWORD or ~/.pgpass holds the password if "
            "it asks for one"
        ) from error
    except psycopg.Error as error:
        raise DataUnavailable(f"PostgreSQL refuses ({_first_line(error)}): see its log") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


@dataclass(frozen=True)
class PgvectorOptions:
    """The options of `PgvectorIndex`.

    Args:
        dsn: libpq's connection string, without a password (PGPASSWORD, ~/.pgpass); what it leaves
            out is taken from PGHOST and the like.
        table: "name" or "schema.name", in small letters; it must not exist when it is built.
        method: "hnsw", "ivfflat", or "exact", which compares all vectors.
        m, ef_construction: of the HNSW graph: links, 2 to 100, and candidates while it is built, 4
            to 1,000, at least 2 m.
        ef_search, max_scan_tuples: of its search: candidates, 1 to 1,000; where they are fewer than
            asked for, it goes on until it has seen that many.
        lists, probes: of IVFFlat: number of lists, 1 to 32,768, and how many are searched.
        timeout: seconds to connect, and of a search; above 0.

    Raises:
        InvalidConfig: of one that is out of range.
        MissingPackage: psycopg is not installed.
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
        check_dsn(self.dsn)
        if not re.fullmatch(r"([a-z_][a-z0-9_]{0,49}\.)?[a-z_][a-z0-9_]{0,49}", self.table):
            raise InvalidConfig(
                f"table is {self.table!r}; a name, or schema.name, of small letters, digits and "
                "underscores, at most 50"
            )
        if self.method not in get_args(PgvectorMethod):
            raise InvalidConfig(
                f"method is {self.method!r}; one of {', '.join(get_args(PgvectorMethod))}"
            )
        lists = (1, 32768)
        require_range(self, m=(2, 100), ef_construction=(4, 1000), ef_search=(1, 1000))
        require_range(self, max_scan_tuples=(1, 2**31 - 1), lists=lists, probes=lists)
        if self.ef_construction < 2 * self.m:
            raise InvalidConfig(
                f"ef_construction is {self.ef_construction}; at least twice m, which is {self.m}"
            )
        if self.probes > self.lists:
            raise InvalidConfig(f"probes is {self.probes}; at most lists, which is {self.lists}")
        if not 0 < self.timeout < 1e6:
            raise InvalidConfig(f"timeout is {self.timeout}; seconds above 0")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The servers that the connection string names, or the file that names them."""
        from psycopg.conninfo import conninfo_to_dict

        parts = conninfo_to_dict(self.dsn)
        named = [str(parts.get(name, "")) for name in ("host", "hostaddr", "servicefile")]
        return tuple(host for text in named for host in text.split(",") if host)

    @property
    def built(self) -> str:
        """The index as CREATE INDEX names it, with what it is built by."""
        if self.method == "hnsw":
            chosen = f"m = {self.m}, ef_construction = {self.ef_construction}"
        else:
            chosen = f"lists = {self.lists}"
        return f"{self.method} (embedding vector_l2_ops) WITH ({chosen})"

    @property
    def search_settings(self) -> dict[str, str]:
        """The settings of PostgreSQL that decide what a search finds."""
        if self.method == "exact":
            return COMMON_SETTINGS | ONE_BY_ONE
        names = {"hnsw": ("ef_search", "max_scan_tuples"), "ivfflat": ("probes",)}[self.method]
        own = {f"{self.method}.{name}": str(getattr(self, name)) for name in names}
        order = "strict_order" if self.method == "hnsw" else "relaxed_order"
        own[f"{self.method}.iterative_scan"] = order
        if self.method == "ivfflat":
            own["ivfflat.max_probes"] = str(self.lists)
        return COMMON_SETTINGS | BY_INDEX | own


class PgvectorTable:
    """The statements about one table, each in a transaction of the caller.

    Its columns are id and embedding. Beside TABLE are TABLE_state, whose one row holds a UUID, and
    TABLE_changed, a trigger that writes another one with every INSERT, UPDATE, DELETE and TRUNCATE.

    Args:
        name: "name" or "schema.name".
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def create(self, connection: Connection[Any], dim: int, autovacuum: bool) -> None:
        """Make the table, empty, of vectors of so many dimensions."""
        columns = f"(id bigint PRIMARY KEY, embedding vector({dim}) NOT NULL)"
        storage = "" if autovacuum else " WITH (autovacuum_enabled = false)"
        for statement in (
            f"CREATE TABLE {{table}} {columns}{storage}",
            "CREATE TABLE {state} (contents uuid NOT NULL)",
            "INSERT INTO {state} VALUES (gen_random_uuid())",
            # With the rights of the owner: whoever may write to the table changes its state too.
            "CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER "
            "SET search_path = pg_catalog, pg_temp AS $$ BEGIN "
            "EXECUTE format('UPDATE %I.%I SET contents = gen_random_uuid()', "
            "TG_TABLE_SCHEMA, TG_TABLE_NAME || '_state'); RETURN NULL; END $$",
            "CREATE TRIGGER rcir_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION {function}()",
        ):
            connection.execute(self.sql(statement))

    def drop(self, connection: Connection[Any]) -> None:
        """Drop what `create` made."""
        connection.execute(self.sql("DROP TABLE {table}, {state}"))
        connection.execute(self.sql("DROP FUNCTION {function}()"))

    def lock(self, connection: Connection[Any], mode: str) -> None:
        """Keep others from what the mode conflicts with, until the transaction ends."""
        connection.execute(self.sql(f"LOCK TABLE {{table}} IN {mode} MODE"))

    def copy(self, connection: Connection[Any], vectors: NDArray[np.float32], first: int) -> None:
        """Add vectors (n, d), with ids from the first one on."""
        into = self.sql("COPY {table} (id, embedding) FROM STDIN (FORMAT BINARY)")
        with connection.cursor() as cursor, cursor.copy(into) as copy:
            copy.set_types(["int8", "vector"])
            for row in enumerate(vectors, first):
                copy.write_row(row)

    def delete(self, connection: Connection[Any], ids: NDArray[np.int64]) -> int:
        """Delete some rows; returns how many of them there were."""
        statement = self.sql("DELETE FROM {table} WHERE id = ANY(%s)")
        return connection.execute(statement, [ids.tolist()]).rowcount

    def ids(self, connection: Connection[Any]) -> NDArray[np.int64]:
        """Return all ids, ascending."""
        statement = self.sql("SELECT string_agg(int8send(id), ''::bytea ORDER BY id) FROM {table}")
        (joined,) = connection.execute(statement, binary=True).fetchone() or (None,)
        return np.frombuffer(joined or b"", ">i8").astype(np.int64)

    def state(self, connection: Connection[Any], graph: bool) -> tuple[str, str] | None:
        """The mark that identifies one content of the table; and what else decides what an
        index of it finds. None where it is lost.

        That is pgvector's version, the files of all indexes, which are others where one was built
        anew, and, of a graph, how often, and when, the table was vacuumed, which mends it.
        """
        vacuumed = (
            " || ' ' || pg_stat_get_vacuum_count({regclass}) + "
            "pg_stat_get_autovacuum_count({regclass}) || ' ' || coalesce(extract(epoch FROM "
            "greatest(pg_stat_get_last_vacuum_time({regclass}), "
            "pg_stat_get_last_autovacuum_time({regclass})))::text, '') || CASE WHEN EXISTS ("
            "SELECT 1 FROM pg_locks WHERE relation = {regclass} AND granted "
            "AND mode = 'ShareUpdateExclusiveLock') THEN ' in work' ELSE '' END"
        )
        statement = (
            "SELECT {state}.contents::text, (SELECT extversion || ' ' || "
            "string_agg(pg_relation_filenode(indexrelid)::text, ' ' ORDER BY indexrelid) "
            "FROM pg_extension, pg_index WHERE extname = 'vector' AND indrelid = {regclass} "
            f"GROUP BY extversion){vacuumed if graph else ''} FROM {{state}}"
        )
        row = connection.execute(self.sql(statement)).fetchone()
        return None if row is None or row[1] is None else (row[0], row[1])

    def nearest(
        self,
        connection: Connection[Any],
        vectors: NDArray[np.float32],
        k: int,
        settings: Mapping[str, str],
    ) -> list[tuple[int, bytes, bytes]]:
        """Return, in any order, each query's number from 1; the ids of up to k rows, as big-endian
        int64, and the L2 distances, as float64.
        """
        each = ", ".join(["set_config(%s, %s, true)"] * len(settings))
        connection.execute(f"SELECT {each}", [text for pair in settings.items() for text in pair])
        ties = ", id" if settings["enable_indexscan"] == "off" else ""  # no index has both orders
        statement = self.sql(
            "SELECT query.number::int, coalesce(found.ids, ''), coalesce(found.distances, '') "
            "FROM unnest(%b::vector[]) WITH ORDINALITY AS query (vector, number) "
            "CROSS JOIN LATERAL ("
            "SELECT string_agg(int8send(id), ''::bytea) AS ids, "
            "string_agg(float8send(distance), ''::bytea) AS distances FROM ("
            "SELECT id, embedding <-> query.vector AS distance FROM {table} "
            f"ORDER BY embedding <-> query.vector{ties} LIMIT %s) AS nearest) AS found"
        )
        return connection.execute(statement, [list(vectors), k], binary=True).fetchall()

    def sql(self, statement: str) -> Composed:
        """A statement with the names of the table and of what stands beside it."""
        from psycopg.sql import SQL, Identifier, Literal

        *schema, name = self.name.split(".")
        return SQL(statement).format(
            table=Identifier(*schema, name),
            state=Identifier(*schema, f"{name}_state"),
            function=Identifier(*schema, f"{name}_changed"),
            regclass=SQL("{}::regclass").format(Literal(self.name)),
        )


class PgvectorIndex:
    """A table of vectors, in a PostgreSQL server that holds pgvector 0.8 or later.

    A retriever's folder holds the options and what the table was like, no vectors. Beside the table
    TABLE is TABLE_state, whose one row a trigger writes anew with every INSERT, UPDATE, DELETE and
    TRUNCATE, whoever it is by. Every search reads it in the snapshot that it searches, with the
    files of all indexes of the table, for HNSW how often it was vacuumed, and pgvector's version,
    and refuses if that is not what this object left: `StaleCalibration`. Not noticed is what
    bypasses triggers (ALTER TABLE ... DISABLE TRIGGER, session_replication_role), unless it is
    found and new; and of HNSW insertions that were rolled back, until a VACUUM: links to them stay
    in the graph. Autovacuum is turned off for such a table; `remove` vacuums it.

    Rows have ids that rise; the position of one is the number of smaller ids. These are kept here,
    8 bytes each.
    """

    Options = PgvectorOptions
    server = "PostgreSQL"

    def __init__(self, options: PgvectorOptions) -> None:
        self.options = options
        self._server = Postgres(options.dsn, options.timeout)
        self._table = PgvectorTable(options.table)
        self._dim = 0
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._contents = self._files = ""  # see `PgvectorTable.state`

    @classmethod
    def build(cls, vectors: NDArray[np.float32], options: PgvectorOptions) -> Self:
        vectors = check_vectors(vectors)
        index = cls(options)
        index._dim, hnsw = vectors.shape[1], options.method == "hnsw"
        if index._dim > MAX_INDEXED_DIM and options.method != "exact":
            raise InvalidConfig(
                f"vectors have {index._dim} dimensions, and pgvector indexes at most "
                f'{MAX_INDEXED_DIM}: reduce them, or choose the method "exact"'
            )

        def fill(connection: Connection[Any]) -> tuple[str, str]:
            index._table.create(connection, index._dim, autovacuum=not hnsw)
            index._table.copy(connection, vectors, 0)
            if options.method != "exact":
                statement = f"CREATE INDEX ON {{table}} USING {options.built}"
                connection.execute(index._table.sql(statement))
            return index._known_state(connection)

        index._contents, index._files = index._server.write(fill)
        index._ids = np.arange(len(vectors))
        return index

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, vectors: NDArray[np.float32]) -> None:
        vectors = check_vectors(vectors, self._dim)
        if not len(vectors):
            return
        first = int(self._ids[-1]) + 1 if len(self) else 0
        self._change(lambda connection: self._table.copy(connection, vectors, first))
        self._ids = np.concatenate([self._ids, np.arange(first, first + len(vectors))])

    def remove(self, positions: NDArray[np.int64]) -> None:
        gone = np.unique(self._ids[np.asarray(positions, np.int64)])
        if not len(gone):
            return

        def delete(connection: Connection[Any]) -> None:
            if self._table.delete(connection, gone) != len(gone):
                raise self._changed()

        self._change(delete)
        self._ids = np.setdiff1d(self._ids, gone, assume_unique=True)
        if self.options.method == "hnsw":
            # Now, not when somebody else does: it mends the graph, which may change answers. Where
            # it fails, or finds that others still read the rows, a later one is another state.
            with suppress(DataUnavailable):
                self._server.alone(self._table.sql("VACUUM {table}"))
                contents, files = self._server.read(self._known_state)
                if contents == self._contents:
                    self._files = files

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See `Index.search`; returns the requested number of rows, or all of the table.

        Raises:
            DataUnavailable: the server cannot be reached, fails, or takes too long.
            StaleCalibration: the table was changed by someone else, or an index of it built anew.
            InvalidConfig: the search found fewer.
            InvalidData: the queries are not such vectors.
        """
        vectors = check_vectors(vectors, self._dim)
        distances = np.full((len(vectors), k), np.inf, np.float32)
        positions = np.full((len(vectors), k), -1, np.int64)
        count = min(k, len(self))

        def ask(connection: Connection[Any]) -> list[tuple[int, bytes, bytes]]:
            # Before the snapshot is taken: from then on nobody can empty or drop the table.
            self._table.lock(connection, "ACCESS SHARE")
            settings = self.options.search_settings
            rows = self._table.nearest(connection, vectors, max(count, 1), settings)
            # After the search, which then holds its index: no other one can take its place.
            self._check_state(self._known_state(connection))
            return rows

        found = self._server.read(ask)
        if not found or not count:
            return distances, positions
        short = min(len(ids) // 8 for _, ids, _ in found)
        if short < count or len(found) < len(vectors):
            more = "probes" if self.options.method == "ivfflat" else "ef_search or max_scan_tuples"
            raise InvalidConfig(
                f"{self.options.method} found {short} of the {count} nearest of {len(self)} "
                f'vectors: search with more {more}, or choose the method "exact"'
            )
        rows = np.array([row for row, _, _ in found]) - 1
        ids = np.frombuffer(b"".join(ids for _, ids, _ in found), ">i8").reshape(-1, count)
        apart = np.frombuffer(b"".join(each for _, _, each in found), ">f8").reshape(-1, count)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self) - 1)
        if (self._ids[at] != ids).any():
            raise self._changed()
        order = np.lexsort((at, apart))
        distances[rows, :count] = np.take_along_axis(apart, order, axis=1)
        positions[rows, :count] = np.take_along_axis(at, order, axis=1)
        return distances, positions

    def drop(self) -> None:
        """Drop the table and what records its changes, see `IsRemote.drop`."""

        def drop(connection: Connection[Any]) -> None:
            self._table.lock(connection, "ACCESS EXCLUSIVE")
            if self._known_state(connection)[0] != self._contents:
                raise self._changed()
            self._table.drop(connection)

        self._server.write(drop)

    @property
    def version(self) -> str:
        """A token of the table when this object last read or wrote it, and of how it is searched.

        The server is not asked: each `search` asks it, in its own snapshot.
        """
        chosen = " ".join(f"{name}={value}" for name, value in self.options.search_settings.items())
        return f"pgvector {self._contents} {self._files} {chosen}"

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

        def read(connection: Connection[Any]) -> tuple[NDArray[np.int64], tuple[str, str]]:
            index._table.lock(connection, "ACCESS SHARE")
            return index._table.ids(connection), index._known_state(connection)

        index._ids, (contents, index._files) = index._server.read(read)
        if contents != index._contents or len(index) != values["n"]:
            raise index._changed()
        return index

    def _change(self, work: Callable[[Connection[Any]], None]) -> None:
        """Change the table if it is as this object left it; others who write to it wait."""

        def changed(connection: Connection[Any]) -> tuple[str, str]:
            self._table.lock(connection, "SHARE ROW EXCLUSIVE")
            self._check_state(self._known_state(connection))
            work(connection)
            return self._known_state(connection)

        self._contents, self._files = self._server.write(changed)

    def _known_state(self, connection: Connection[Any]) -> tuple[str, str]:
        state = self._table.state(connection, self.options.method == "hnsw")
        if state is None:
            raise self._changed()
        return state

    def _check_state(self, state: tuple[str, str]) -> None:
        contents, files = state
        if contents != self._contents:
            raise self._changed()
        if files != self._files:
            self._files = files
            raise StaleCalibration(
                f"an index of the table {self.options.table}, or pgvector, is another one since "
                "this was loaded or calibrated, and may answer otherwise: `recalibrate`"
            )

    def _changed(self) -> StaleCalibration:
        return StaleCalibration(
            f"the table {self.options.table} was changed by someone else: which of its rows is "
            "which item is no longer known; build the retriever anew from its vectors"
        )
