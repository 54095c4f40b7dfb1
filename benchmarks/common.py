"""Command line, sizes, table and JSON that every benchmark shares."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

# A benchmark may be named like the package that it measures: that one is to be found first.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

T = TypeVar("T")
# Known before the command line is parsed: sizes are constants of the modules.
FORM = [argument for argument in sys.argv[1:] if argument == "--short"]


def sized(full: T, short: T) -> T:
    """The first in full, the second in the short form, `--short`."""
    return short if FORM else full


# Of two-digit numbers, `data.options`: what is left open has its defaults.
DIGITS = sized(
    {},
    {
        **{"train": 200, "validation": 100, "gallery": 200},
        **{"tuning": 300, "calibration": 300, "test": 300},
    },
)


def titled(title: str) -> str:
    """The title, which says so where it is that of the short form."""
    return sized(title, f"SHORT FORM, whose figures mean nothing: {title}")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line that every benchmark has: `--json FILE` and `--short`."""
    command = argparse.ArgumentParser(description=description, allow_abbrev=False)
    command.add_argument("--json", type=Path, help="write the figures to this file")
    command.add_argument(
        "--short", action="store_true", help="in seconds: whether it runs, by figures without sense"
    )
    return command


def spread(values: Sequence[float | None]) -> str:
    """Mean and standard deviation over seeds."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    deviation = f"±{np.std(numbers, ddof=1):.3f}" if len(numbers) > 1 else ""
    return f"{np.mean(numbers):.3f}{deviation}"


def report(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Mapping[str, float],
    path: Path | None,
) -> None:
    """Print a table and the figures; write the figures to a file, if one is named."""
    console = Console(width=120, highlight=False)
    table = Table(*columns, title=titled(title), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for name, value in figures.items():
        console.print(f"{name} = {value:.4g}")
    if path is not None:
        write_figures(figures, path)


def write_figures(figures: Mapping[str, float], path: Path) -> None:
    """Write figures as JSON, with the script, commit, date and hardware that they come from."""
    values = {
        "script": _command_line(),
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": _hardware(),
        "figures": dict(figures),
    }
    path.write_text(json.dumps(values, indent=1) + "\n")


def _command_line() -> str:
    """Return the command that runs, without the option that names the file of figures."""
    script, *options = sys.argv
    if "--json" in options:
        place = options.index("--json")
        del options[place : place + 2]
    options = [option for option in options if not option.startswith("--json=")]
    return shlex.join(["python", Path(script).resolve().relative_to(ROOT).as_posix(), *options])


def _commit() -> str:
    """Return the commit of the code, with a "+" if it was changed; "unknown" outside of git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _hardware() -> str:
    """Return the processor, the number of its cores, and the GPU that PyTorch uses, if any."""
    models = []
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    hardware = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        hardware += f", {torch.cuda.get_device_name()}"
    return hardware
