"""Pictures that are to be embedded: those of a folder, or of a table; with what is known of each.

Unlike a data set they are not divided, and nothing has to be known of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rcir.data.images import ENDINGS
from rcir.errors import DataUnavailable, InvalidData


@dataclass(frozen=True)
class Pictures:
    """Pictures and what is known of them.

    Attributes:
        paths: n image files.
        ids: n names, unique: the path in the folder, or from the table.
        columns: what is known, by name, n values each; None where it is not known of a picture.
    """

    paths: Sequence[Path]
    ids: Sequence[str]
    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: slice) -> Pictures:
        """Return some of them."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Pictures(self.paths[rows], self.ids[rows], columns)


def list_pictures(source: Path) -> Pictures:
    """The pictures of a folder, or of a table that lists them.

    Of a folder, those in its folders have the column ``label``, the name of the folder that holds
    them directly; hidden files and folders are skipped, links to folders not followed. Of a table
    (.csv or .parquet) with a column ``path``, relative to the table's folder, all other columns are
    kept: ``labels`` as lists, ``x`` and ``y`` as numbers, and of a .csv the others as text. A
    column ``key`` names the pictures, instead of their paths.

    Raises:
        DataUnavailable: there is no such folder or table, or an image of the table is missing.
        InvalidData: there are no pictures, or the table is wrong.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("apple/1.jpg", "pear/1.jpg", "pear/notes.txt"):
        ...         Path(folder, name).parent.mkdir(exist_ok=True)
        ...         Path(folder, name).touch()
        ...     found = list_pictures(Path(folder))
        >>> found.ids, found.columns
        (['apple/1.jpg', 'pear/1.jpg'], {'label': ['apple', 'pear']})
    """
    if source.is_dir():
        return _of_folder(source)
    from rcir.data.datasets.table import read_columns  # pandas; a folder needs none

    if not source.is_file():
        raise DataUnavailable(f"{source} is neither a folder nor a table: give one that is there")
    columns = read_columns(source)
    names = columns.pop("path")
    ids = columns.pop("key", names)
    return Pictures([source.parent / name for name in names], ids, columns)


def _of_folder(folder: Path) -> Pictures:
    ids = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        relative = Path(place).relative_to(folder)
        for name in files:
            if name.lower().endswith(ENDINGS) and not name.startswith("."):
                ids.append((relative / name).as_posix())
    if not ids:
        raise InvalidData(f"{folder} has no pictures; pictures end in {', '.join(ENDINGS)}")
    ids.sort()
    try:
        "\n".join(ids).encode()
    except UnicodeEncodeError as error:
        name = "\n".join(ids)[: error.end].rpartition("\n")[2]
        raise InvalidData(
            f"{folder} holds a file or folder whose name is not UTF-8, {name!r}: rename it, since "
            "the vectors are stored with the names"
        ) from error
    labels = [name.rpartition("/")[0] or None for name in ids]
    columns = {"label": labels} if any(labels) else {}
    return Pictures([folder / name for name in ids], ids, columns)
