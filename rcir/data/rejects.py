"""Images that cannot be read: all are listed in a table, and a number of them is tolerated."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rcir.data.records import ImageSet
from rcir.errors import InvalidConfig, InvalidData, InvalidImage
from rcir.files import write_file
from rcir.terminal import working

if TYPE_CHECKING:
    from rcir.data.preprocessing import Preprocessing

REJECTS_FILE = "rejects.csv"  # in the folder of a run
REJECT_COLUMNS = ("id", "reason")
CHECKED_TOGETHER = 1024  # images that are checked together


def check_max_rejects(max_rejects: float, option: str = "max_rejects") -> None:
    """Raise `InvalidConfig` unless this is a share below 1 or a whole number, at least 0."""
    if not (0 <= max_rejects < 1 or (max_rejects >= 1 and float(max_rejects).is_integer())):
        raise InvalidConfig(
            f"{option} is {max_rejects}; give a whole number of images, or a share below 1"
        )


def count_allowed(max_rejects: float, n: int) -> int:
    """Return the number of n images that may be unreadable; a share above 0 allows at least one."""
    if max_rejects >= 1:
        return int(max_rejects)
    return max(1, math.floor(max_rejects * n)) if max_rejects > 0 else 0


def find_unreadable(parts: Iterable[ImageSet], preprocessing: Preprocessing) -> dict[str, str]:
    """Decode images, except arrays, and return the ids of unreadable ones with their errors."""
    rejects: dict[str, str] = {}
    pictures = [part for part in parts if not isinstance(part.images, np.ndarray)]
    with working("checking images", sum(map(len, pictures)), logged=True) as work:
        for part in pictures:
            for start in range(0, len(part), CHECKED_TOGETHER):
                chunk = part.images[start : start + CHECKED_TOGETHER]
                for row, reason in preprocessing.find_faults(chunk).items():
                    rejects[part.ids[start + row]] = reason
                work.advance(len(chunk))
    return rejects


def tolerate(rejects: Mapping[str, str], n: int, max_rejects: float, table: Path) -> str | None:
    """Write the table of rejects of n images, or remove it; return a line for the screen, or None.

    Raise `InvalidImage` for more than allowed.
    """
    if not rejects:
        table.unlink(missing_ok=True)
        return None
    write_rejects(table, rejects)
    counts = f"{len(rejects):,} of {n:,} images cannot be read"
    if len(rejects) > (allowed := count_allowed(max_rejects, n)):
        examples = "; ".join(f"{name}: {reason}" for name, reason in [*rejects.items()][:3])
        raise InvalidImage(
            f"{counts}, and --max-rejects {max_rejects:g} allows {allowed:,}. {table} lists all "
            "of them: replace or remove them, or leave them out with --max-rejects "
            f"{len(rejects)}. The first: {examples}"
        )
    return f"{counts} and are left out; {table} lists them"


def write_rejects(table: Path, rejects: Mapping[str, str]) -> None:
    """Write the table of rejects, CSV in UTF-8, all of it or nothing."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([REJECT_COLUMNS, *rejects.items()])
    table.parent.mkdir(parents=True, exist_ok=True)
    write_file(table, text.getvalue().encode(errors="backslashreplace"))


def read_rejects(table: Path) -> dict[str, str]:
    """Return the rejects of a table, none if it does not exist; raise `InvalidData` for damage."""
    if not table.exists():
        return {}
    try:
        with table.open(newline="", encoding="utf-8") as file:
            return {row["id"]: row["reason"] for row in csv.DictReader(file, strict=True)}
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise InvalidData(f"{table} is damaged ({error!r}): remove it, and train again") from error
