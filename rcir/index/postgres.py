"""A connection to PostgreSQL with pgvector: made when needed, its errors in words."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, StaleCalibration
from rcir.extras import naming_extras

if TYPE_CHECKING:
    from psycopg import Connection

Returned = TypeVar("Returned")
OLDEST_PGVECTOR = (0, 8)  # of pgvector: the first that goes on where an index found too few


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
        given = conninfo_to_dict(dsn)
    except ProgrammingError:  # its message may hold the password
        raise InvalidConfig(
            'dsn is no connection string of libpq: give "host=... dbname=... user=..." or '
            '"postgresql://user@host/database"'
        ) from None
    if {"password", "sslpassword"} & given.keys():
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
        asked = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
        row = connection.execute(asked).fetchone()
        if row is None or tuple(map(int, row[0].split(".")[:2])) < OLDEST_PGVECTOR:
            held = "has no extension vector" if row is None else f"has pgvector {row[0]}"
            connection.close()
            raise DataUnavailable(
                f"the database {held}; needed is pgvector 0.8 or later: install it on the server, "
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
            f"someone else changed the table at the same time ({_said(error)}): nothing was "
            "changed here; load the retriever again"
        ) from error
    except psycopg.errors.UndefinedTable as error:
        raise DataUnavailable(
            f"the table of the index is gone ({_said(error)}): build the retriever anew"
        ) from error
    except psycopg.errors.DuplicateTable as error:
        raise InvalidConfig(
            f"{_said(error)}, and is left alone: drop it, or choose another one by the option table"
        ) from error
    except psycopg.DataError as error:
        raise InvalidData(f"PostgreSQL refuses the vectors: {_said(error)}") from error
    except psycopg.OperationalError as error:
        raise DataUnavailable(
            f"PostgreSQL cannot be reached or failed ({_said(error)}): see that it runs, that the "
            "option dsn is right and that PGPASSWORD or ~/.pgpass holds the password if it asks "
            "for one"
        ) from error
    except psycopg.Error as error:
        raise DataUnavailable(f"PostgreSQL refuses ({_said(error)}): see its log") from error


def _said(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]
