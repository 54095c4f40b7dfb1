"""What every benchmark shares: its command line, its table, its figures as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

# A benchmark may be named like the package that it measures: that one is to be found first.
sys.path.insert(0, str(Path(__file__).parents[1]))


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line that every benchmark has: `--json FILE`."""
    command = argparse.ArgumentParser(description=description)
    command.add_argument("--json", type=Path, help="write the figures to this file")
    return command


def report(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Mapping[str, float],
    path: Path | None,
) -> None:
    """Print a table and the figures; write the figures as `{"figures": {name: number}}`."""
    console = Console(width=120, highlight=False)
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name} = {value:.4g}")
    if path is not None:
        path.write_text(json.dumps({"figures": dict(figures)}, indent=1))
