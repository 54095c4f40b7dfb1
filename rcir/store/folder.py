"""A folder of immutable versions, and one file that names the current version.

    current.json        format, and the names of the current and the previous version
    lock                held by a process while it saves
    versions/NAME/
        manifest.json   format, and the SHA-256 of every other file

A writer keeps the previous version for readers that have opened it. A version is complete by
itself: its folder can be copied and read.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from filelock import BaseFileLock, FileLock

from rcir.errors import CorruptRetriever, NoRetriever, RcirError, SaveConflict
from rcir.files import checksum, sync, write_folder, written_aside
from rcir.store.codec import decode

FORMAT = 4
POINTER, LOCK, VERSIONS, MANIFEST = "current.json", "lock", "versions", "manifest.json"
VERSION_NAME = r"\d{8}T\d{6}Z-[0-9a-f]{8}"
LAYOUT_FILES = re.compile(
    rf"{LOCK}|current\.json|\.current\.json-[^/]*|{VERSIONS}/\.?{VERSION_NAME}[^/]*/.*"
)
ADVICE = "copy the folder again, or calibrate again"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Pointer:
    """Contents of the file that names the current version."""

    format: int
    version: str
    previous: str | None


@dataclass(frozen=True)
class Manifest:
    """Contents of the manifest of a version: the checksums of its other files, by name."""

    format: int
    files: Mapping[str, str]


def save_version(folder: Path, fill: Callable[[Path], None], loaded: Path | None = None) -> Path:
    """Write a version and make it the current one; return its folder.

    If this process is killed, the current version is the previous one or the new one. `fill` writes
    the files of the version to an empty folder, then `write_manifest`. Raises what `check_place`
    does, and `SaveConflict` if `loaded`, from which the new version was made, was the current
    version of this folder, and no longer is.
    """
    check_place(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        place = folder.resolve()
        previous = _find_version(place)
        if loaded is not None and previous not in (None, loaded) and place == loaded.parent.parent:
            raise SaveConflict(
                f"another version of the retriever was saved to {place} after this one was loaded "
                "or saved, and would be lost: load the retriever again and repeat the change, or "
                "save to another folder"
            )
        _clean(place)
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        pointer = Pointer(FORMAT, name, None if previous is None else previous.name)
        try:
            write_folder(place / VERSIONS / name, fill)
            with written_aside(place / POINTER) as aside:
                aside.write_text(json.dumps(asdict(pointer)))
                sync(aside)
                sync(place.parent)
            sync(place)
        finally:
            _clean(place)
    return place / VERSIONS / name


def read_current(folder: Path, read: Callable[[Path], Result]) -> Result:
    """Call `read` with the folder of the current version, and return the result.

    If it fails and another version has become current meanwhile, it is repeated with that version.
    """
    while True:
        version = current_version(folder)
        try:
            return read(version)
        except (RcirError, OSError):
            if _find_version(folder) == version:
                raise


def current_version(folder: Path) -> Path:
    """Return the folder of the current version.

    Raises `NoRetriever` if there is none, `CorruptRetriever` if the file that names it is damaged.
    """
    version = _find_version(folder)
    if version is None:
        within = folder / "retriever"  # of the output of a calibration
        remedy = "make one with `rcir demo`, `rcir certify` or `rcir calibrate`"
        if (folder / VERSIONS).is_dir():
            remedy = "copy the folder again"
        if _find_version(within) is not None:
            remedy = f"pass {within}"
        raise NoRetriever(
            f"there is no retriever in {folder} (neither {POINTER} nor {MANIFEST}): {remedy}"
        )
    return version


def read_manifest(folder: Path) -> bytes:
    """Return the manifest of the current version, whose digest identifies what is stored."""
    return read_current(folder, lambda version: (version / MANIFEST).read_bytes())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let no other process or thread save to a folder of versions inside the block.

    There, a version can be loaded, changed and saved without a `SaveConflict`. A folder
    without versions is not locked.
    """
    if _find_version(folder) is None:
        yield
        return
    check_place(folder)
    with _lock(folder):
        yield


def check_place(folder: Path) -> None:
    """Raise `CorruptRetriever` unless a version can be saved to a folder without losing anything.

    The path may not be a file, a folder that contains something other than versions, or a version.
    """
    place = folder.resolve()
    if place.parent.name == VERSIONS and (place.parent.parent / POINTER).is_file():
        raise CorruptRetriever(
            f"{folder} is a version of a retriever and never changes: save to "
            f"{place.parent.parent} or to another folder"
        )
    if not os.path.lexists(folder):
        return
    with suppress(CorruptRetriever):
        _find_version(folder)
        if folder.is_dir() and all(map(LAYOUT_FILES.fullmatch, _files(folder))):
            return
    raise CorruptRetriever(
        f"{folder} contains a single version, or something other than a retriever, which is left "
        "alone: choose another folder"
    )


def checksums(version: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of all files of a version but its manifest, by name.

    Names of files in inner folders have slashes. Files whose checksum is `known` are not read.
    """
    names, known = sorted(_files(version) - {MANIFEST}), known or {}
    return {name: known.get(name) or checksum(version / name) for name in names}


def write_manifest(version: Path, files: Mapping[str, str]) -> None:
    """Write the manifest of a version; `files` are the `checksums` of its other files."""
    (version / MANIFEST).write_text(_manifest_text(files))


@contextmanager
def verified(version: Path, required: Set[str]) -> Iterator[Mapping[str, str]]:
    """Compare all files of a version with their checksums, and yield these by name.

    Raises `CorruptRetriever` if the format is another one, a file is missing or was changed, also
    within the block, or the manifest does not list a required file.
    """
    path = version / MANIFEST
    try:
        text, manifest = _read_json(Manifest, path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptRetriever(f"{path} is missing: {ADVICE}") from error
    listed = manifest.files.keys()
    if missing := (listed - _files(version)) | (required - listed):
        raise CorruptRetriever(f"{version}: {', '.join(sorted(missing))} is missing: {ADVICE}")
    states = {}
    for name, expected in manifest.files.items():
        file = version / name
        states[file] = _state(file)
        if checksum(file) != expected:
            raise CorruptRetriever(
                f"{file} was changed since it was written (its checksum differs): {ADVICE}"
            )
    if text != _manifest_text(manifest.files):
        raise CorruptRetriever(f"{path} was changed since it was written: {ADVICE}")
    yield manifest.files
    for file, state in states.items():
        if _state(file) != state:
            raise CorruptRetriever(f"{file} was changed while it was read: load it again")


def _find_version(folder: Path) -> Path | None:
    """Return the folder of the current version, or None if there is none.

    A version by itself, without a pointer beside it, is its own current version.
    """
    path = folder / POINTER
    try:
        _, pointer = _read_json(Pointer, path)
    except (FileNotFoundError, NotADirectoryError):
        return folder if (folder / MANIFEST).is_file() else None
    if not re.fullmatch(VERSION_NAME, pointer.version):
        raise CorruptRetriever(f"{path} is damaged (version {pointer.version!r}): {ADVICE}")
    return folder / VERSIONS / pointer.version


def _read_json(kind: type[Result], path: Path) -> tuple[str, Result]:
    """Return the text and the contents of a pointer or a manifest of this format.

    Raises FileNotFoundError or NotADirectoryError, and `CorruptRetriever` for any other reason.
    """
    try:
        text = path.read_text()
        values = json.loads(text)
        stored_format = values["format"]
        if stored_format == FORMAT:
            return text, decode(kind, values, {})
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise CorruptRetriever(f"{path} is damaged ({error}): {ADVICE}") from error
    raise CorruptRetriever(
        f"{path} has format {stored_format!r}, this version of rcir reads format {FORMAT}: "
        "calibrate again (rcir calibrate --run RUN)"
    )


def _lock(folder: Path) -> BaseFileLock:
    """Return the lock of a folder; a thread that holds it can acquire it again."""
    return FileLock(folder.resolve() / LOCK, is_singleton=True)


def _clean(folder: Path) -> None:
    """Delete what the pointer does not name: old versions, and those of killed processes.

    What cannot be deleted is left to the next writer.
    """
    retained: set[str | None] = set()
    with suppress(FileNotFoundError):
        _, pointer = _read_json(Pointer, folder / POINTER)
        retained = {pointer.version, pointer.previous}
    with suppress(OSError):
        for path in (folder / VERSIONS).iterdir():
            if path.name not in retained:
                shutil.rmtree(path, ignore_errors=True)


def _manifest_text(files: Mapping[str, str]) -> str:
    return json.dumps(asdict(Manifest(FORMAT, dict(sorted(files.items())))), indent=1)


def _files(folder: Path) -> set[str]:
    """Return the names of all files in a folder and its inner folders."""
    return {
        (Path(parent) / name).relative_to(folder).as_posix()
        for parent, _, names in os.walk(folder)
        for name in names
    }


def _state(path: Path) -> tuple[int, ...]:
    """Return numbers that change if a file is written to or replaced; none without a file."""
    with suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    return ()
