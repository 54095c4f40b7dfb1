"""The list of a folder's files with their checksums, by which damage is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rcir.errors import CorruptRetriever

FORMAT = 7
MANIFEST = "manifest.json"
REQUIRED = {"retriever.json", "gallery.json"}


def write_manifest(folder: Path) -> None:
    """List all files of a folder."""
    checksums = {name: _checksum(folder / name) for name in sorted(_files(folder))}
    (folder / MANIFEST).write_text(_text(checksums))


def verified_files(folder: Path) -> set[str]:
    """The names of the files that a folder's manifest lists, each checked against its checksum.

    Names of files in folders within have slashes.

    Raises:
        CorruptRetriever: a file is missing or changed, or the format is not this version's.
    """
    try:
        text = (folder / MANIFEST).read_text()
        version, files = _parsed(text)
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise CorruptRetriever(
            f"{folder / MANIFEST} is damaged ({error}): copy the folder again, or calibrate again"
        ) from error
    if version != FORMAT or isinstance(version, bool):
        raise CorruptRetriever(
            f"{folder} has format {version}, this version of rcir reads format {FORMAT}: use the "
            "version that wrote it, or calibrate again with this one (python -m calibration --run "
            "RUN)"
        )
    if not files.keys() >= REQUIRED:
        raise CorruptRetriever(
            f"{folder / MANIFEST} does not list {', '.join(sorted(REQUIRED - files.keys()))}: copy "
            "the folder again, or calibrate again"
        )
    for name, checksum in files.items():
        path = folder / name
        if not _lies_within(name) or not path.is_file():
            raise CorruptRetriever(f"{path} is missing: copy the folder again, or calibrate again")
        if _checksum(path) != checksum:
            raise CorruptRetriever(
                f"{path} was changed since it was written (its checksum differs): copy the folder "
                "again, or calibrate again"
            )
    if text != _text(files):
        raise CorruptRetriever(
            f"{folder / MANIFEST} was changed since it was written: copy the folder again, or "
            "calibrate again"
        )
    return set(files)


def is_retriever(folder: Path) -> bool:
    """Whether a path is an empty folder, or holds a retriever and nothing beside it."""
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    try:
        known = {MANIFEST, *_parsed((folder / MANIFEST).read_text())[1]}
        inner = {str(parent) for name in known for parent in Path(name).parents}
        folders = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir()}
        return _files(folder) <= known and folders <= inner
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def _parsed(text: str) -> tuple[Any, dict[str, str]]:
    """Format version and checksums of files by name."""
    manifest = json.loads(text)
    return manifest["format"], dict(manifest["files"])


def _text(files: Mapping[str, str]) -> str:
    return json.dumps({"format": FORMAT, "files": files}, indent=1)


def _files(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in found}


def _lies_within(name: str) -> bool:
    """Whether a name is that of a file within the folder, written in the one way there is."""
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
