"""The `rcir` command: one file per subcommand, imported when it is asked for."""

from rcir.cli.main import main

__all__ = ["main"]
