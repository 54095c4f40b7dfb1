"""Vectors in a table of PostgreSQL: pgvector's HNSW, IVFFlat or exact search."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.errors import DataUnavailable, InvalidConfig, StaleCalibration
from rcir.index.base import check_vectors
from rcir.index.pgvector_options import PgvectorOptions
from rcir.index.pgvector_table import PgvectorTable
from rcir.index.postgres import Postgres

if TYPE_CHECKING:
    from psycopg import Connection

PGVECTOR_FILE = "table.json"
MOST_DIMENSIONS = 2000  # that pgvector indexes, at most


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

    def drop(self) -> None:
        """As `IsRemote.drop`: the table, and what tells of its changes."""

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
