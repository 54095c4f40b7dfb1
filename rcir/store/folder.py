"""A folder of immutable versions, and one file that names the current version.

    current.json        format, and the names of the current and the previous version
    lock                held by a process while it saves
    versions/NAME/
        manifest.json   format, and the SHA-256 of every other file

A writer keeps the previous version for readers that have opened it. A version is complete by
itself: its folder can be copied and read.

In a bucket (`rcir.storage`), a writer uploads a version, then replaces the pointer if it is still
the one that was read, without a lock: of two writers, one raises `SaveConflict`. Readers download
a version once, into the cache (RCIR_CACHE).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from filelock import BaseFileLock, FileLock

from rcir import storage
from rcir.errors import CorruptRetriever, NoRetriever, RcirError, SaveConflict
from rcir.files import checksum, sync, write_folder, written_aside
from rcir.store.codec import decode

FORMAT = 4
POINTER, LOCK, VERSIONS, MANIFEST = "current.json", "lock", "versions", "manifest.json"
VERSION_NAME = r"\d{8}T\d{6}Z-[0-9a-f]{8}"
LAYOUT_FILES = re.compile(
    rf"{LOCK}|current\.json|\.current\.json-[^/]*|{VERSIONS}/\.?{VERSION_NAME}[^/]*/.*"
)
CACHE_VARIABLE = "RCIR_CACHE"
ABANDONED_AFTER = timedelta(days=1)  # a version in a bucket that no pointer names
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
    if storage.is_uri(folder):
        return _save_to_bucket(folder, fill, loaded)
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        place = folder.resolve()
        previous = _find_version(place)
        _require_latest(place, previous, loaded)
        _clean(place)
        pointer = _new_pointer(previous)
        name = pointer.version
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


def _require_latest(folder: Path, present: Path | None, loaded: Path | None) -> None:
    """Raise `SaveConflict` if a version was loaded from a folder and is not its present one."""
    same = present and loaded and present.parent == loaded.parent
    if same and present != loaded:
        raise _conflict(folder)


def _conflict(folder: Path) -> SaveConflict:
    return SaveConflict(
        f"another version of the retriever was saved to {storage.as_text(folder)} after this one "
        "was loaded or saved, and would be lost: load the retriever again and repeat the change, "
        "or save to another folder"
    )


def _new_pointer(previous: Path | None) -> Pointer:
    name = f"{_first_name(timedelta())}-{secrets.token_hex(4)}"
    return Pointer(FORMAT, name, None if previous is None else previous.name)


def _save_to_bucket(folder: Path, fill: Callable[[Path], None], loaded: Path | None) -> Path:
    """Do what `save_version` does for a URI: the pointer is replaced by a conditional write."""
    place = local_place(folder)
    etag, old = storage.NEW, None
    with suppress(FileNotFoundError):
        text, etag = storage.read_object(folder / POINTER)
        _, old = _parse(Pointer, folder / POINTER, text)
    previous = None if old is None else _version_of(place, folder / POINTER, old)
    _require_latest(folder, previous, loaded)
    new = _new_pointer(previous)
    version, remote = place / VERSIONS / new.version, folder / VERSIONS / new.version
    write_folder(version, fill)
    for name in sorted(_files(version), key=lambda name: name == MANIFEST):  # which comes last
        storage.write_object(remote / name, version / name)
    content = json.dumps(asdict(new)).encode()
    try:
        storage.write_object(folder / POINTER, content, etag)
    except SaveConflict:
        # A write whose answer was lost is repeated, and then meets itself.
        if storage.read_object(folder / POINTER)[0] != content:
            _delete_versions(folder, [new.version], [])
            shutil.rmtree(version, ignore_errors=True)
            raise _conflict(folder) from None
    _delete_versions(folder, [old.previous] if old else [], [new.version, new.previous])
    return version


def _delete_versions(
    folder: Path, names: Sequence[str | None], retained: Sequence[str | None]
) -> None:
    """Delete versions in a bucket; if some are retained, also what killed writers left a day ago.

    A younger version may be one that another writer uploads.
    """
    place, abandoned = folder / VERSIONS, _first_name(ABANDONED_AFTER) if retained else ""
    paths = [place / info.name for info in storage.list_objects(place)]
    version_of = {path: path.relative_to(place).parts[0] for path in paths}
    storage.delete_objects(
        [
            path
            for path, name in version_of.items()
            if name in names or (name < abandoned and name not in retained)
        ]
    )


def _first_name(age: timedelta) -> str:
    """Return what no version of at most this age sorts before."""
    return f"{datetime.now(UTC) - age:%Y%m%dT%H%M%SZ}"


def cache_folder() -> Path:
    """Return the folder that holds copies of objects in buckets (RCIR_CACHE)."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "rcir").resolve()


def local_place(folder: Path) -> Path:
    """Return the folder in the cache (RCIR_CACHE) in which the versions of a URI are kept."""
    name = hashlib.sha256(storage.as_text(folder).rstrip("/").encode()).hexdigest()[:16]
    return cache_folder() / "retrievers" / name


def _download(folder: Path, version: Path) -> None:
    """Download a version into the cache, unless it is there, and verify it."""
    if version.is_dir():
        return

    def fill(aside: Path) -> None:
        remote = folder / VERSIONS / version.name
        try:
            storage.download(remote / MANIFEST, aside / MANIFEST)
            content = (aside / MANIFEST).read_bytes()
            for name in _parse(Manifest, remote / MANIFEST, content)[1].files:
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    place = storage.as_text(remote)
                    raise CorruptRetriever(f"{place} names the file {name!r} elsewhere: {ADVICE}")
                storage.download(remote / name, aside / name)
        except FileNotFoundError as error:
            raise CorruptRetriever(f"{error}: {ADVICE}") from None
        try:
            with verified(aside, set()):
                pass
        except CorruptRetriever as error:
            text = str(error).replace(str(aside), storage.as_text(remote))
            raise CorruptRetriever(text) from None

    write_folder(version, fill)
    for other in version.parent.glob("[0-9]*"):
        if other.name < min(version.name, _first_name(ABANDONED_AFTER)):
            shutil.rmtree(other, ignore_errors=True)


def read_current(folder: Path, read: Callable[[Path], Result]) -> Result:
    """Call `read` with the folder of the current version, and return the result.

    If it fails and another version has become current meanwhile, it is repeated with that version.
    """
    while True:
        version = _find_version(folder)
        try:
            return read(_present(folder, version))
        except (RcirError, OSError) as error:
            if isinstance(error, CorruptRetriever) and version and storage.is_uri(folder):
                shutil.rmtree(version, ignore_errors=True)  # the next call downloads it again
            if version is None or _find_version(folder) == version:
                raise


def current_version(folder: Path) -> Path:
    """Return the folder of the current version.

    Raises `NoRetriever` if there is none, `CorruptRetriever` if the file that names it is damaged.
    """
    return _present(folder, _find_version(folder))


def _present(folder: Path, version: Path | None) -> Path:
    """Return a version, downloaded if it is in a bucket; `NoRetriever` if it is None."""
    if version is None:
        within = folder / "retriever"  # of the output of a calibration
        remedy = "make one with `rcir demo`, `rcir certify` or `rcir calibrate`"
        if storage.is_uri(folder):
            remedy = "check the name of the bucket and of the folder in it"
        elif (folder / VERSIONS).is_dir():
            remedy = "copy the folder again"
        if _find_version(within) is not None:
            remedy = f"pass {storage.as_text(within)}"
        raise NoRetriever(
            f"there is no retriever in {storage.as_text(folder)} (neither {POINTER} nor "
            f"{MANIFEST}): {remedy}"
        )
    if storage.is_uri(folder):
        _download(folder, version)
    return version


def read_manifest(folder: Path) -> bytes:
    """Return the manifest of the current version, whose digest identifies what is stored."""
    return read_current(folder, lambda version: (version / MANIFEST).read_bytes())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let no other process or thread save to a folder of versions inside the block.

    There, a version can be loaded, changed and saved without a `SaveConflict`. A folder
    without versions is not locked, and neither is a URI.
    """
    if storage.is_uri(folder) or _find_version(folder) is None:
        yield
        return
    check_place(folder)
    with _lock(folder):
        yield


def check_place(folder: Path) -> None:
    """Raise `CorruptRetriever` unless a version can be saved to a folder without losing anything.

    The path may not be a file, a folder that contains something other than versions, or a version.
    """
    in_bucket = storage.is_uri(folder)
    place = folder if in_bucket else folder.resolve()
    if place.parent.name == VERSIONS and _find_version(place.parent.parent) is not None:
        raise CorruptRetriever(
            f"{storage.as_text(folder)} is a version of a retriever and never changes: save to "
            f"{storage.as_text(place.parent.parent)} or to another folder"
        )
    if not (in_bucket or os.path.lexists(folder)):
        return
    with suppress(CorruptRetriever):
        _find_version(folder)
        names = [i.name for i in storage.list_objects(folder)] if in_bucket else _files(folder)
        if (in_bucket or folder.is_dir()) and all(map(LAYOUT_FILES.fullmatch, names)):
            return
    raise CorruptRetriever(
        f"{storage.as_text(folder)} contains a single version, or something other than a "
        "retriever, which is left alone: choose another folder"
    )


def checksums(version: Path, earlier: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of all files of a version but its manifest, by name.

    Names of files in inner folders have slashes. Files with an `earlier` checksum are not read.
    """
    names, earlier = sorted(_files(version) - {MANIFEST}), earlier or {}
    return {name: earlier.get(name) or checksum(version / name) for name in names}


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
        text, manifest = _parse(Manifest, path, path.read_bytes())
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
    path, in_bucket = folder / POINTER, storage.is_uri(folder)
    try:
        content = storage.read_object(path)[0] if in_bucket else path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return folder if not in_bucket and (folder / MANIFEST).is_file() else None
    except OSError as error:
        raise CorruptRetriever(f"{path} is damaged ({error}): {ADVICE}") from error
    _, pointer = _parse(Pointer, path, content)
    return _version_of(local_place(folder) if in_bucket else folder, path, pointer)


def _version_of(place: Path, path: Path, pointer: Pointer) -> Path:
    """Return the folder of the version that a pointer names."""
    if not re.fullmatch(VERSION_NAME, pointer.version):
        raise CorruptRetriever(f"{path} is damaged (version {pointer.version!r}): {ADVICE}")
    return place / VERSIONS / pointer.version


def _parse(kind: type[Result], path: Path, content: bytes) -> tuple[str, Result]:
    """Return the text and the contents of a pointer or a manifest, or raise `CorruptRetriever`."""
    try:
        text = content.decode()
        values = json.loads(text)
        stored_format = values["format"]
        if stored_format == FORMAT:
            return text, decode(kind, values, {})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
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
        _, pointer = _parse(Pointer, folder / POINTER, (folder / POINTER).read_bytes())
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
