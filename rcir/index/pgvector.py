"""Vectors in a table of PostgreSQL: pgvector's HNSW, IVFFlat or exact search."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from rcir.errors import DataUnavailable, InvalidConfig, StaleCalibration
from rcir.index.base import check_vectors
from rcir.index.pgvector_table import PgvectorTable
from rcir.index.postgres import Postgres, check_dsn

if TYPE_CHECKING:
    from psycopg import Connection

PgvectorMethod = Literal["hnsw", "ivfflat", "exact"]
PGVECTOR_FILE = "table.json"
MOST_DIMENSIONS = 2000  # that pgvector indexes, at most
PARAMETER_RANGES = {
    **{"m": (2, 100), "ef_construction": (4, 1000), "ef_search": (1, 1000)},
    **{"max_scan_tuples": (1, 2**31 - 1), "lists": (1, 32768), "probes": (1, 32768)},
}
# What decides an answer besides the vectors is never left to the server: neither to its planner,
# which takes or leaves an index by its statistics, nor to what its configuration says.
COMMON_SETTINGS = {"jit": "off", "work_mem": "64MB", "hnsw.scan_mem_multiplier": "1"}
BY_INDEX = {"enable_indexscan": "on"} | dict.fromkeys(
    ("enable_seqscan", "enable_sort", "enable_bitmapscan"), "off"
)
ONE_BY_ONE = {"enable_seqscan": "on", "enable_sort": "on"} | dict.fromkeys(
    ("enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"), "off"
)


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
        for name, (least, most) in PARAMETER_RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; {least} to {most}")
        if self.ef_construction < 2 * self.m:
            raise InvalidConfig(
                f"ef_construction is {self.ef_construction}; at least twice m, which is {self.m}"
            )
        if self.probes > self.lists:
            raise InvalidConfig(f"probes is {self.probes}; at most lists, which is {self.lists}")
        if not 0 < self.timeout < 1e6:
            raise InvalidConfig(f"timeout is {self.timeout}; seconds above 0")

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
        named = {"hnsw": ("ef_search", "max_scan_tuples"), "ivfflat": ("probes",)}[self.method]
        own = {f"{self.method}.{name}": str(getattr(self, name)) for name in named}
        order = "strict_order" if self.method == "hnsw" else "relaxed_order"
        own[f"{self.method}.iterative_scan"] = order
        if self.method == "ivfflat":
            own["ivfflat.max_probes"] = str(self.lists)
        return COMMON_SETTINGS | BY_INDEX | own


class PgvectorIndex:
    """A table of vectors, in a PostgreSQL server that holds pgvector 0.8 or later.

    A retriever's folder holds the options and what the table was like, no vectors. Beside the table
    TABLE is TABLE_state, whose one row a trigger writes anew with every INSERT, UPDATE, DELETE and
    TRUNCATE, whoever it is by. Every search reads it in the snapshot that it searches, with the
    files of all indexes of the table, for HNSW how often it was vacuumed, and pgvector's version,
    and refuses if that is not what this object left: `StaleCalibration`. Not noticed is what bypasses
    triggers (ALTER TABLE ... DISABLE TRIGGER, session_replication_role), unless it is found and
    new; and of HNSW insertions that were rolled back, until a VACUUM: links to them stay in the
    graph. Autovacuum is turned off for such a table; `remove` vacuums it.

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
        if index._dim > MOST_DIMENSIONS and options.method != "exact":
            raise InvalidConfig(
                f"vectors have {index._dim} dimensions; pgvector indexes at most "
                f"{MOST_DIMENSIONS}: "
                'reduce them, or choose the method "exact"'
            )

        def fill(connection: Connection[Any]) -> tuple[str, str]:
            index._table.create(connection, index._dim, autovacuum=not hnsw)
            index._table.copy(connection, vectors, 0)
            if options.method != "exact":
                made = f"CREATE INDEX ON {{table}} USING {options.built}"
                connection.execute(index._table.sql(made))
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

        def copy(connection: Connection[Any]) -> tuple[str, str]:
            self._begin_change(connection)
            self._table.copy(connection, vectors, first)
            return self._known_state(connection)

        self._contents, self._files = self._server.write(copy)
        self._ids = np.concatenate([self._ids, np.arange(first, first + len(vectors))])

    def remove(self, positions: NDArray[np.int64]) -> None:
        gone = np.unique(self._ids[np.asarray(positions, np.int64)])
        if not len(gone):
            return

        def delete(connection: Connection[Any]) -> tuple[str, str]:
            self._begin_change(connection)
            if self._table.delete(connection, gone) != len(gone):
                raise self._changed()
            return self._known_state(connection)

        self._contents, self._files = self._server.write(delete)
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
        """As `Index.search`; of as many rows as were asked for, or as the table holds.

        Raises:
            DataUnavailable: the server cannot be reached, fails, or takes too long.
            StaleCalibration: the table was changed by someone else, or an index of it built anew.
            InvalidConfig: the search found fewer.
            InvalidData: the queries are no such vectors.
        """
        vectors = check_vectors(vectors, self._dim)
        distances = np.full((len(vectors), k), np.inf, np.float32)
        positions = np.full((len(vectors), k), -1, np.int64)
        count = min(k, len(self))

        def ask(connection: Connection[Any]) -> list[tuple[int, bytes, bytes]]:
            # Before the snapshot is taken: from then on nobody can empty or drop the table.
            self._table.lock(connection, "ACCESS SHARE")
            settings = self.options.search_settings
            found = self._table.nearest(connection, vectors, max(count, 1), settings)
            # After the search, which then holds its index: no other one can take its place.
            self._check_state(self._known_state(connection))
            return found

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

    @property
    def version(self) -> str:
        """A token of the table when this object last read or wrote it, and of how it is searched.

        The server is not asked: each `search` asks it, in its own snapshot.
        """
        chosen = " ".join(f"{name}={value}" for name, value in self.options.search_settings.items())
        return f"pgvector {self._contents} {self._files} {chosen}"

    def save(self, folder: Path) -> None:
        held = {"contents": self._contents, "n": len(self), "dim": self._dim}
        (folder / PGVECTOR_FILE).write_text(json.dumps(held))

    @classmethod
    def load(cls, folder: Path, options: PgvectorOptions) -> Self:
        """As `Index.load`.

        Raises:
            DataUnavailable: the server cannot be reached, or the table is gone.
            StaleCalibration: the table was changed since.
        """
        held = json.loads((folder / PGVECTOR_FILE).read_text())
        index = cls(options)
        index._dim, index._contents = int(held["dim"]), str(held["contents"])

        def read(connection: Connection[Any]) -> tuple[NDArray[np.int64], tuple[str, str]]:
            index._table.lock(connection, "ACCESS SHARE")
            return index._table.ids(connection), index._known_state(connection)

        index._ids, (contents, index._files) = index._server.read(read)
        if contents != index._contents or len(index) != held["n"]:
            raise index._changed()
        return index

    def _begin_change(self, connection: Connection[Any]) -> None:
        """Lock the table for others who write, and see that it is as this object left it."""
        self._table.lock(connection, "SHARE ROW EXCLUSIVE")
        self._check_state(self._known_state(connection))

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
