"""Index files of published data sets, and the images that they list."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from rcir.data.names import to_nfc
from rcir.data.records import ImageSet, Source
from rcir.data.relevance import Relevance
from rcir.errors import DataUnavailable, InvalidData
from rcir.storage import as_text, is_uri, join, list_files

Content = TypeVar("Content")
READ_ERRORS = (
    *(OSError, ValueError, TypeError, KeyError, IndexError, EOFError, NotImplementedError),
    # The last two are what scipy raises of some damaged files without compression.
    *(zlib.error, MatReadError, UnboundLocalError),
)
LEFT_OUT = "left out"  # the split of images that are counted only
MAX_DIGITS = 18  # of numbers in text files
Listings: TypeAlias = "dict[str, tuple[Path, dict[str, str]]]"  # of folders, their files by name


class Row(NamedTuple):
    """An image of a published data set."""

    file: str  # relative to the set's folder, with slashes; it is also the id
    split: str  # "train", "query", "gallery" or `LEFT_OUT`
    label: Any  # what the set's relevance is made of; of an image that is left out, the reason
    attributes: tuple[Any, ...] = ()


def source_of(
    folder: Path,
    rows: Iterable[Row],
    splits: Sequence[str] = ("train", "query"),
    *,
    attributes: Sequence[str] = (),
    cluster: str | None = None,
    relevance: Callable[[str, Sequence[Any]], Relevance] | None = None,
) -> Source:
    """Return a published data set from the rows of its images, whose files are in the folder.

    Without the split "gallery", training never sees the labels of the queries. `relevance` makes
    the relevance of a split from the labels of its rows; by default, equal labels match.
    `InvalidData` if a split is empty, an image is listed twice, or a label is in both halves.
    """
    by_split: dict[str, list[Row]] = {split: [] for split in (*splits, LEFT_OUT)}
    for row in rows:
        by_split[row.split].append(row)
    left_out = Counter(row.label for row in by_split.pop(LEFT_OUT))
    if not all(by_split.values()):
        counts = ", ".join(f"{split} ({len(images)})" for split, images in by_split.items())
        raise InvalidData(f"{folder} lists images of {counts}: each split needs some")
    if "gallery" not in splits and relevance is None:
        train_labels = {row.label for row in by_split["train"]}
        if both := [row.file for row in by_split["query"] if row.label in train_labels]:
            raise InvalidData(
                f"{folder}: {len(both)} images of the evaluation, for instance {both[0]}, have "
                "labels that are in both halves: fetch the index files again"
            )
    files = [row.file for images in by_split.values() for row in images]
    file, count = Counter(files).most_common(1)[0]
    if count > 1:
        raise InvalidData(f"{folder}: an index file lists {file} twice: fetch it again")
    paths = iter(require_images(folder, files, "the index files", "get all files of the set"))
    parts = {}
    for split, images in by_split.items():
        labels = [row.label for row in images]
        columns = zip(*(row.attributes for row in images), strict=True)
        parts[split] = ImageSet(
            [next(paths) for _ in images],
            np.array(labels, np.int64) if relevance is None else None,
            [row.file for row in images],
            dict(zip(attributes, map(np.array, columns), strict=True)),
            None if relevance is None else relevance(split, labels),  # type: ignore[arg-type]
            cluster,
        )
    notes = tuple(f"{n} {kind} were left out" for kind, n in left_out.items())
    return Source(parts["train"], parts["query"], parts.get("gallery", "queries"), notes)


def read_mat(
    path: Path, take: Callable[[Mapping[str, Any]], Content], squeeze: bool = False
) -> Content:
    """Return what `take` makes of the variables of a MATLAB file, up to version 7.2.

    `take` may fail as NumPy does: `InvalidData` is raised then. With `squeeze`, dimensions of size
    1, which MATLAB adds, are dropped.
    """
    try:
        return take(loadmat(path, squeeze_me=squeeze))
    except READ_ERRORS as error:
        raise InvalidData(f"{path} cannot be read ({error!r}): fetch it again") from error


def require_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the paths of files in a folder; `DataUnavailable` if one is missing."""
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise DataUnavailable(f"not in {folder}: {', '.join(absent)}")
    return [folder / name for name in names]


def require_images(
    folder: Path,
    names: Sequence[str],
    listed_in: str,
    get: str,
    total: int = 0,
    listings: Listings | None = None,
) -> list[Path]:
    """Return the paths of images, by default all `total` ones, in a folder.

    A name that the disk has in another Unicode form is found there. A folder is listed once, unless
    `listings`, to which it is added, have it.
    """
    places = {} if listings is None else listings
    paths, absent = [], []
    for name in names:
        place, slash, file = name.rpartition("/")
        if place not in places:
            on_disk = _folder_on_disk(folder, place or slash)
            files = list_files(on_disk)
            # Exact names override those that are equal in the composed form only.
            places[place] = on_disk, {to_nfc(x): x for x in files} | {x: x for x in files}
        on_disk, files_by_name = places[place]
        file_on_disk = files_by_name.get(file) or files_by_name.get(to_nfc(file))
        if file_on_disk is None:
            absent.append(name)
        else:
            paths.append(on_disk / file_on_disk)
    if absent:
        remedy = f"copy them again, or {get}"
        if any(PureWindowsPath(name).root or "\\" in name for name in absent):
            remedy = "write paths relative to this folder, with slashes, such as fruit/1.jpg"
        raise DataUnavailable(
            f"{len(absent)} of {total or len(names)} images listed in {listed_in} are missing from "
            f"{as_text(folder)}, for instance {', '.join(absent[:2])}: {remedy}"
        )
    return paths


def _folder_on_disk(folder: Path, place: str) -> Path:
    """Return the path of a folder inside another, whose names may have another Unicode form."""
    path = join(folder, place)
    if is_uri(path) or path.is_dir() or path.name in ("", ".."):
        return path
    outer = place.rpartition("/")[0]
    above = _folder_on_disk(folder, outer) if outer else folder
    if not above.is_dir():
        return path
    wanted = to_nfc(path.name)
    same = (child for child in above.iterdir() if to_nfc(child.name) == wanted)
    return next((child for child in same if child.is_dir()), path)


def read_lines(path: Path, columns: int, header: int = 0) -> Iterator[list[str]]:
    """Yield the fields of the lines of a text file, separated by white space, also of its header.

    `InvalidData` if a line below it has another number of fields than `columns`, or there is none.
    """
    try:
        lines = path.read_text("utf-8-sig").rstrip().split("\n")
    except (OSError, ValueError) as error:
        raise InvalidData(f"{path} cannot be read ({error}): fetch it again") from error
    if len(lines) <= header or not lines[-1]:
        raise InvalidData(f"{path} is empty or lists nothing: fetch it again")
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if number > header and len(fields) != columns:
            raise InvalidData(
                f"{path}, line {number}: {line[:80]!r} has {len(fields)} fields instead of "
                f"{columns}: fetch the file again"
            )
        yield fields


def read_pairs(path: Path) -> dict[str, str]:
    """Return the second field of each line of a text file by the first, which comes once."""
    pairs: dict[str, str] = {}
    for name, value in read_lines(path, 2):
        if name in pairs:
            raise InvalidData(f"{path} lists {name} twice: fetch it again")
        pairs[name] = value
    return pairs


def parse_whole_number(path: Path, line: int, value: str) -> int:
    """Return a number below 10^18, not negative; `InvalidData` names the line otherwise."""
    if not value.isdecimal() or len(value) > MAX_DIGITS:
        raise InvalidData(
            f"{path}, line {line}: {value[:80]!r} is not a whole number of at most {MAX_DIGITS} "
            "digits: fetch the file again"
        )
    return int(value)


def read_numbers(path: Path) -> dict[str, int]:
    """Return what `read_pairs` does, as whole numbers."""
    pairs = enumerate(read_pairs(path).items(), 1)
    return {name: parse_whole_number(path, line, value) for line, (name, value) in pairs}
