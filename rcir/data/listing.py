"""Index files and the images that they list; MATLAB's among them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from rcir.data.names import composed
from rcir.data.records import ImageSet
from rcir.errors import DataUnavailable, InvalidData

Content = TypeVar("Content")
DAMAGED = (
    *(OSError, ValueError, TypeError, KeyError, IndexError, EOFError, NotImplementedError),
    # The last two are what scipy raises of some damaged files without compression.
    *(zlib.error, MatReadError, UnboundLocalError),
)


def read_mat(
    path: Path, take: Callable[[Mapping[str, Any]], Content], squeeze: bool = False
) -> Content:
    """Read variables of a MATLAB file.

    Args:
        path: a .mat file of MATLAB up to version 7.2.
        take: gets the variables by name; it may fail as NumPy does where they are not as expected.
        squeeze: whether to drop the dimensions of size 1, which MATLAB adds.

    Raises:
        InvalidData: the file is damaged, or has not what is taken.

    Example:
        >>> read_mat(Path("pyproject.toml"), len)
        Traceback (most recent call last):
        rcir.errors.InvalidData: pyproject.toml cannot be read (...): fetch it again
    """
    try:
        return take(loadmat(path, squeeze_me=squeeze))
    except DAMAGED as error:
        raise InvalidData(f"{path} cannot be read ({error!r}): fetch it again") from error


@dataclass(frozen=True)
class Listing:
    """Images that an index lists.

    Attributes:
        names: n image files, relative to the set's image folder, with slashes.
        labels: (n,) int64.
    """

    names: list[str]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def images(
        self, folder: Path, attributes: Mapping[str, NDArray[Any]] | None = None
    ) -> ImageSet:
        """The image files, in that folder; their names are the ids."""
        paths = [folder / name for name in self.names]
        return ImageSet(paths, self.labels, self.names, attributes or {})


def require_files(folder: Path, names: Sequence[str], get: str) -> list[Path]:
    """The files of a folder; `DataUnavailable`, saying how to get them, if one is not there."""
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise DataUnavailable(f"not in {folder}: {', '.join(absent)}; {get}")
    return [folder / name for name in names]


def require_images(folder: Path, names: Sequence[str], listed_in: str, get: str) -> list[Path]:
    """Return the paths of images in a folder; every folder is listed once.

    A name that the disk has in another Unicode form is found there.

    Raises:
        DataUnavailable: some images are missing.
    """
    places: dict[str, tuple[Path, dict[str, str]]] = {}  # each folder, and its files by name
    paths, absent = [], []
    for name in names:
        place, slash, file = name.rpartition("/")
        if place not in places:
            on_disk = _folder_on_disk(folder, place or slash)
            files = files_in(on_disk)
            # Exact names override those that are equal in the composed form only.
            places[place] = on_disk, {composed(x): x for x in files} | {x: x for x in files}
        on_disk, files_by_name = places[place]
        file_on_disk = files_by_name.get(file) or files_by_name.get(composed(file))
        if file_on_disk is None:
            absent.append(name)
        else:
            paths.append(on_disk / file_on_disk)
    if absent:
        remedy = f"copy them again, or {get}"
        if any(PureWindowsPath(name).root or "\\" in name for name in absent):
            remedy = "write paths relative to this folder, with slashes, such as fruit/1.jpg"
        raise DataUnavailable(
            f"{len(absent)} of {len(names)} images listed in {listed_in} are missing from "
            f"{folder}, for instance {', '.join(absent[:2])}: {remedy}"
        )
    return paths


def _folder_on_disk(folder: Path, place: str) -> Path:
    """Return the path of a folder inside another, whose names may have another Unicode form."""
    path = folder / place
    if path.is_dir() or path.name in ("", ".."):
        return path
    outer = place.rpartition("/")[0]
    above = _folder_on_disk(folder, outer) if outer else folder
    if not above.is_dir():
        return path
    wanted = composed(path.name)
    same = (child for child in above.iterdir() if composed(child.name) == wanted)
    return next((child for child in same if child.is_dir()), path)


def files_in(folder: Path) -> list[str]:
    """Names of the files directly in a folder; none if there is no such folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_file()]


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, without empty ones at its end."""
    try:
        text = path.read_text("utf-8-sig").rstrip()
    except (OSError, ValueError) as error:
        raise InvalidData(f"{path} cannot be read ({error}): fetch it again") from error
    if not text:
        raise InvalidData(f"{path} is empty: fetch it again")
    return text.split("\n")


def columns(path: Path, lines: Sequence[str], n: int, first: int = 1) -> list[list[str]]:
    """The n columns of lines whose fields are separated by white space.

    Args:
        path: of the file, for messages.
        lines: of the file, from line number `first` on.

    Raises:
        InvalidData: there are no lines, or one has more or fewer fields.

    Example:
        >>> columns(Path("images.txt"), ["1 a.jpg", "2 b.jpg"], 2)
        [['1', '2'], ['a.jpg', 'b.jpg']]
    """
    for row, line in enumerate(lines):
        if (n_columns := len(line.split())) != n:
            raise InvalidData(
                f"{path}, line {first + row}: {line[:80]!r} has {n_columns} fields, needed are "
                f"{n}: fetch the file again"
            )
    if not lines:
        raise InvalidData(f"{path} lists nothing: fetch it again")
    # Split once more, together: a list for each of a million lines is slow to keep.
    fields = " ".join(lines).split()
    return [fields[column::n] for column in range(n)]


def whole_numbers(path: Path, values: Sequence[str], first: int = 1) -> NDArray[np.int64]:
    """A column of numbers, none negative; `InvalidData` names the line that is not one."""
    for row, value in enumerate(values):
        if not value.isdecimal() or len(value) > 18:
            raise InvalidData(
                f"{path}, line {first + row}: {value[:80]!r} is not a whole number: fetch the file "
                "again"
            )
    return np.array([int(value) for value in values], np.int64)


def require_unique(listed_in: Path | str, names: Sequence[str]) -> None:
    """Raise `InvalidData` if a name comes twice."""
    twice = pd.Series(names, dtype=object).duplicated().to_numpy()
    if twice.any():
        raise InvalidData(
            f"{listed_in} lists {names[int(twice.argmax())]} twice: {twice.sum()} of {len(names)} "
            "entries are repeated; fetch it again"
        )


def require_same(path: Path, names: Sequence[str], other: Path, others: Sequence[str]) -> None:
    """Raise `InvalidData` if two files do not list the same images, in whatever order."""
    alone = set(names) ^ set(others)
    if alone:
        example = min(alone)
        where = path if example in set(names) else other
        raise InvalidData(
            f"{path} lists {len(names)} images and {other} {len(others)}; {len(alone)} are in one "
            f"of them only, for instance {example} in {where.name}: fetch both again"
        )
