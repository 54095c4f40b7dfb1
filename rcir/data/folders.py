"""The reader of folders of pictures, for every command: labels, splits, and what is skipped."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any

from rcir import storage
from rcir.data.images import IMAGE_ENDINGS
from rcir.data.names import MISSING_VALUES, require_utf8, to_nfc
from rcir.errors import InvalidData, printable

# By the name of a folder or a value of a column `split`, in any capitals.
SPLIT_BY_NAME = {
    "train": "train",
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    "test": "test",
    "query": "query",
    "gallery": "gallery",
}
# Made by file managers, network drives and archivers; compared without regard to capitals.
SYSTEM_FOLDERS = frozenset(
    (
        *("@eadir", "@tmp", "#recycle", "#snapshot"),  # Synology
        *("@recycle", "@recently-snapshot", "@__thumb"),  # QNAP
        *("$recycle.bin", "system volume information", "found.000"),  # Windows
        *("__macosx", "network trash folder", "temporary items"),  # macOS
        *("lost+found", "lost.dir"),  # Linux, Android
    )
)
OTHER_FILES = "files that are not pictures"
SHOWN_ENDINGS = 3
CHUNK = 1 << 13  # pictures that are listed together


@dataclass(frozen=True)
class Pictures:
    """n pictures with their metadata."""

    paths: Sequence[Path]
    ids: Sequence[str]  # unique: the path in the folder, with slashes, or from the table
    columns: Mapping[str, Sequence[Any]]  # metadata by name; None where a value is unknown
    notes: tuple[str, ...] = ()  # sentences on what was left out, and what else matters
    # In files that hold several pictures, the first byte and the number of bytes of each.
    spans: Sequence[tuple[int, int] | None] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    @classmethod
    def joined(cls, chunks: Iterable[Pictures], notes: Iterable[str] = ()) -> Pictures:
        """Join pictures with the same columns."""
        paths: list[Path] = []
        ids: list[str] = []
        columns: dict[str, list[Any]] = {}
        for chunk in chunks:
            paths += chunk.paths
            ids += chunk.ids
            for name, values in chunk.columns.items():
                columns.setdefault(name, []).extend(values)
        return cls(paths, ids, columns, tuple(notes))

    def without(self, rows: Collection[int]) -> Pictures:
        """Return the pictures that are not in some rows, without notes."""
        if not rows:
            return self
        kept = [row not in rows for row in range(len(self))]
        columns = {name: [*compress(values, kept)] for name, values in self.columns.items()}
        return Pictures([*compress(self.paths, kept)], [*compress(self.ids, kept)], columns)


def scan_folder(folder: Path) -> Pictures:
    """List the pictures below a folder.

        apple/1.jpg                   label "apple"
        pear/conference/2.jpg         label "pear/conference"
        train/apple/1.jpg             label "apple", split "train"

    Their columns are ``label``, None outside of class folders, if there are any, and ``split``,
    "train", "val", "test", "query" or "gallery", if the folder is divided into splits.

    A picture has the ending of one; no file is opened. The folders `train`, `val` (or `valid`,
    `validation`), `test`, `query` and `gallery`, in any capitals, are splits if no other folder
    with pictures lies beside them. Beside other folders they are classes if all of their pictures
    lie directly in them, and are refused if they contain class folders.

    Hidden files and folders, the folders of file managers and network drives, other files and links
    to folders are skipped and counted. Names of labels that differ in their Unicode form only are
    the same.
    """
    notes, chunks = stream_folder(folder)
    return Pictures.joined(chunks, notes)


def stream_folder(folder: Path) -> tuple[tuple[str, ...], Iterator[Pictures]]:
    """Return notes on a folder, and its pictures as `scan_folder` lists them, in chunks.

    The folder is walked twice: which folders are splits depends on all of them.
    """
    skipped, other_endings, tops = Counter[str](), Counter[str](), Counter[str]()

    def names() -> Iterator[str]:
        for name in _pictures_below(folder, skipped, other_endings):
            top, slash, _ = name.partition("/")
            tops[top if slash else ""] += 1
            yield name

    notes: list[str] = []
    split_of, has_labels = _split_folders(folder, names(), notes)
    note = _note(skipped, other_endings)
    if not tops:
        raise InvalidData(
            f"{storage.as_text(folder)} has no pictures{f' ({note})' if note else ''}; "
            f"pictures end in {', '.join(IMAGE_ENDINGS)}"
        )
    if split_of:
        sizes = Counter[str]()
        for top, count in tops.items():
            sizes[split_of.get(top, "none")] += count
        notes.append(f"splits: {', '.join(f'{name} ({n:,})' for name, n in sizes.items())}")

    def chunks() -> Iterator[Pictures]:
        listed = _pictures_below(folder, Counter(), Counter())
        while ids := list(islice(listed, CHUNK)):
            require_utf8(ids, str(folder))
            labels: list[str | None] = []
            for name in ids:
                label = name.rpartition("/")[0]
                if split_of and "/" in name:
                    label = label.partition("/")[2]
                labels.append(to_nfc(label) or None)
            _require_present(folder, labels)
            columns = {"label": labels} if has_labels else {}
            if split_of:
                columns["split"] = [split_of.get(name.partition("/")[0]) for name in ids]
            yield Pictures([folder / name for name in ids], ids, columns)

    return (*([note] if note else ()), *notes), chunks()


def _require_present(folder: Path, labels: Iterable[str | None]) -> None:
    """Raise `InvalidData` if a class folder has a name that stands for a missing label."""
    for label in set(labels):
        if label is not None and label.strip() in MISSING_VALUES:
            raise InvalidData(
                f"{folder} has the class folder {printable(repr(label))}, a name that programs "
                "write where a label is missing: rename the folder"
            )


def _pictures_below(
    folder: Path, skipped: Counter[str], other_endings: Counter[str]
) -> Iterator[str]:
    """Yield the paths of pictures in the folder in their order, and count what is skipped."""
    if storage.is_uri(folder):
        for info in storage.list_objects(folder):
            *places, last = info.name.lower().split("/")
            if any(part.startswith(".") for part in (*places, last)):
                skipped["hidden files and folders"] += 1
            elif not SYSTEM_FOLDERS.isdisjoint(places):
                skipped["folders of file managers and network drives"] += 1
            elif last.endswith(IMAGE_ENDINGS):
                yield info.name
            else:
                skipped[OTHER_FILES] += 1
                other_endings[Path(last).suffix] += 1
        return

    def names_in(inside: str) -> Iterator[str]:
        names = []  # of folders with a slash, by which they are ordered as the paths in them
        with os.scandir(folder / inside) as entries:
            for entry in entries:
                name = entry.name.lower()
                if name.startswith("."):
                    skipped["hidden files and folders"] += 1
                elif entry.is_dir(follow_symlinks=False):
                    if name in SYSTEM_FOLDERS:
                        skipped["folders of file managers and network drives"] += 1
                    else:
                        names.append(f"{entry.name}/")
                elif entry.is_symlink() and not _is_file(entry):
                    is_folder = Path(entry.path).is_dir()
                    skipped["links to folders" if is_folder else "broken links"] += 1
                elif name.endswith(IMAGE_ENDINGS) and _is_file(entry):
                    names.append(entry.name)
                else:
                    skipped[OTHER_FILES] += 1
                    other_endings[Path(entry.name).suffix] += 1
        return iter(sorted(names))

    pending = [("", names_in(""))]
    while pending:
        inside, names = pending[-1]
        if (name := next(names, None)) is None:
            pending.pop()
        elif not name.endswith("/"):
            yield f"{inside}{name}"
        else:
            try:
                pending.append((f"{inside}{name}", names_in(f"{inside}{name}")))
            except OSError:
                skipped["folders that cannot be read"] += 1


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a loop of links
        return False


def _note(skipped: Counter[str], other_endings: Counter[str]) -> str:
    """Return one sentence on what was skipped; empty if nothing was."""
    counts = []
    for kind, n in sorted(skipped.items()):
        endings = ""
        if kind == OTHER_FILES:
            common = [ending or "no ending" for ending, _ in other_endings.most_common()]
            more = ", ..." if len(common) > SHOWN_ENDINGS else ""
            endings = f": {', '.join(common[:SHOWN_ENDINGS])}{more}"
        counts.append(f"{kind} ({n:,}{endings})")
    return f"left out: {', '.join(counts)}" if counts else ""


def _split_folders(
    folder: Path, ids: Iterable[str], notes: list[str]
) -> tuple[dict[str, str], bool]:
    """Return the split of each folder that is one, and whether there are class folders.

    The former is empty if the folder is not divided into splits.
    """
    children: dict[str, set[str]] = {}  # of each folder with pictures below it, those folders in it
    for name in ids:
        place = name.rpartition("/")[0]
        while place:
            above, _, last = place.rpartition("/")
            if last in children.setdefault(above, set()):
                break
            children[above].add(last)
            place = above
    for place, names in children.items():
        inner = [name for name in names if name.lower() in SPLIT_BY_NAME]
        if place and len({SPLIT_BY_NAME[name.lower()] for name in inner}) > 1:
            raise InvalidData(
                f"{folder / place} is divided into {_list_names(inner)}: name that folder, or "
                "put the class folders below the folders of the splits (train/apple/1.jpg)"
            )
    tops = children.get("", set())
    named = {
        name: SPLIT_BY_NAME[name.lower()] for name in sorted(tops) if name.lower() in SPLIT_BY_NAME
    }
    others = sorted(tops - named.keys())
    if not named:
        return {}, bool(tops)
    if not others:
        if len(set(named.values())) < len(named):
            raise InvalidData(
                f"{folder} has the folders {', '.join(named)}, and several of them are the "
                "same split: put their pictures together"
            )
        return named, any(name in children for name in named)
    with_classes = [name for name in named if name in children]
    if with_classes:
        raise InvalidData(
            f"{folder} has the folder {with_classes[0]}, which has the name of a split and "
            f"contains class folders, and beside it {_list_names(others)}: keep nothing but the "
            f"folders of splits ({', '.join(SPLIT_BY_NAME)}) side by side, or rename "
            f"{with_classes[0]} if it is a class"
        )
    notes.append(
        f"{', '.join(named)} is taken for a class, not for a split: it contains pictures and no "
        f"class folders, and lies beside {_list_names(others)}"
    )
    return {}, True


def _list_names(names: Iterable[str]) -> str:
    """Return the first three names in order."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (", ..." if len(ordered) > 3 else "")
