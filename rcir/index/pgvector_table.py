"""A table of vectors in PostgreSQL with pgvector, and beside it what tells whether it changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import Composed

COPIED_AT_ONCE = 1 << 23  # bytes of vectors that are sent together
COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
COPY_TRAILER = b"\xff\xff"


class PgvectorTable:
    """The statements about one table, each in a transaction of whoever calls.

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
        kept = "" if autovacuum else " WITH (autovacuum_enabled = false)"
        for statement in (
            f"CREATE TABLE {{table}} {columns}{kept}",
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
            copy.write(COPY_HEADER)
            for block in _rows(vectors, first):
                copy.write(block)
            copy.write(COPY_TRAILER)

    def delete(self, connection: Connection[Any], ids: NDArray[np.int64]) -> int:
        """Delete some rows; returns how many of them there were."""
        statement = self.sql("DELETE FROM {table} WHERE id = ANY(%s)")
        return connection.execute(statement, [ids.tolist()]).rowcount

    def ids(self, connection: Connection[Any]) -> NDArray[np.int64]:
        """All ids, rising."""
        asked = self.sql("SELECT string_agg(int8send(id), ''::bytea ORDER BY id) FROM {table}")
        (held,) = connection.execute(asked, binary=True).fetchone() or (None,)
        return np.frombuffer(held or b"", ">i8").astype(np.int64)

    def state(self, connection: Connection[Any], graph: bool) -> tuple[str, str] | None:
        """The mark that tells one content of the table from another; and what else decides what an
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
        asked = (
            "SELECT {state}.contents::text, (SELECT extversion || ' ' || "
            "string_agg(pg_relation_filenode(indexrelid)::text, ' ' ORDER BY indexrelid) "
            "FROM pg_extension, pg_index WHERE extname = 'vector' AND indrelid = {regclass} "
            f"GROUP BY extversion){vacuumed if graph else ''} FROM {{state}}"
        )
        row = connection.execute(self.sql(asked)).fetchone()
        return None if row is None or row[1] is None else (row[0], row[1])

    def nearest(
        self,
        connection: Connection[Any],
        vectors: NDArray[np.float32],
        k: int,
        settings: Mapping[str, str],
    ) -> list[tuple[int, bytes, bytes]]:
        """Of each query its number from 1, in any order; of up to k rows the ids, as big-endian
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


def _rows(vectors: NDArray[np.float32], first: int) -> Iterator[bytes]:
    """Rows of ids and vectors as PostgreSQL's binary COPY reads them, some at a time."""
    dim = vectors.shape[1]
    row = np.dtype(
        [
            *(("fields", ">i2"), ("id_bytes", ">i4"), ("id", ">i8"), ("vector_bytes", ">i4")),
            *(("dim", ">i2"), ("unused", ">i2"), ("vector", ">f4", (dim,))),
        ]
    )
    together = max(1, COPIED_AT_ONCE // row.itemsize)
    for start in range(0, len(vectors), together):
        some = vectors[start : start + together]
        rows = np.zeros(len(some), row)
        rows["fields"], rows["id_bytes"], rows["vector_bytes"] = 2, 8, 4 + 4 * dim
        rows["dim"], rows["vector"] = dim, some
        rows["id"] = np.arange(first + start, first + start + len(some))
        yield rows.tobytes()
