"""A stored retriever: a folder of immutable versions and one file that names the current version.

    current.json                  format of this layout, and names of the current and the previous
                                  version
    lock                          held by a process while it saves
    versions/NAME/
        manifest.json             format of the version, and the SHA-256 of every other file
        retriever.json            encoder, preprocessing, index, depth, controllers, what it was
                                  calibrated on, and how many retrievers it was chosen among
        encoder.safetensors       weights, if it has an encoder
        controller.safetensors    score functions, and scored results of both query splits
        index/                    the files of the index
        gallery.json              ids
        relevance.safetensors     labels of the gallery items, or what else defines matches
        uncertainty.npy           uncertainties of the gallery items, if the encoder provides any
        norms.npy                 lengths of their vectors, unless all are 1
        clusters.npy              their clusters, with which they are left out of their own search
        items.safetensors         embeddings of the gallery items, if the encoder re-ranks by them
        digests.npy               digests of the gallery items; for templates, of all pictures
        queries.safetensors       vectors, uncertainties and relevance of the queries of both splits
        queries.json              their groups and clusters
        queries.npy               their digests
        earlier.npy               digests of queries that calibrated before, if there are any

A reader opens one version and never sees a mixture of two. A writer holds the lock, writes a new
version, replaces `current.json`, and keeps the previous version for readers that have opened it.

A version is complete by itself: its folder can be copied and loaded, which is what MLflow stores.

Nothing in the folder is, or is read as, a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from filelock import BaseFileLock, FileLock
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays

from rcir.errors import (
    CorruptRetriever,
    DataUnavailable,
    InvalidData,
    MissingPackage,
    NoRetriever,
    RcirError,
    SaveConflict,
    StaleCalibration,
    UntrustedFolder,
)
from rcir.files import sync, write_folder, written_aside
from rcir.imports import naming_extras
from rcir.index import IndexConfig, find_index
from rcir.retrieval.calibration import Calibration
from rcir.retrieval.queries import VectorOptions
from rcir.retrieval.search import Searcher
from rcir.retrieval.stored_parts import (
    describe_digests,
    describe_past,
    describe_rules,
    load_calibration,
    load_encoder,
    load_gallery,
    load_index,
    require_loadable,
    restore_digests,
    save_encoder,
    save_gallery,
    save_index,
    save_queries,
)
from rcir.retrieval.tuning import CalibrationOptions
from rcir.trust import reading

LAYOUT, FORMAT = 1, 8  # formats of the folder and of a version
POINTER, LOCK, VERSIONS = "current.json", "lock", "versions"
MANIFEST, DESCRIPTION_FILE = "manifest.json", "retriever.json"
WEIGHTS, CONTROLLER_FILE = "encoder.safetensors", "controller.safetensors"
REQUIRED_FILES = {DESCRIPTION_FILE, "gallery.json"}
VERSION_NAME = r"\d{8}T\d{6}Z-[0-9a-f]{8}"
LAYOUT_FILES = re.compile(
    rf"{LOCK}|current\.json|\.current\.json-[^/]*|{VERSIONS}/\.?{VERSION_NAME}[^/]*/.*"
)
Result = TypeVar("Result")


@dataclass(frozen=True)
class StoredRetriever:
    """The parts of a retriever that are stored.

    Attributes:
        searcher, calibration, origin: see `rcir.Retriever`.
        version_folder: the version that it was loaded from or saved as; None if it is new.
    """

    searcher: Searcher
    calibration: Calibration | None
    origin: dict[str, Any]
    version_folder: Path | None


def save(retriever: StoredRetriever, folder: str | os.PathLike[str]) -> Path:
    """Write a retriever to a folder as its current version; return the folder of the version.

    Waits while another process saves to the folder. If this process is killed, the current version
    is the previous one or the new one.

    Raises:
        CorruptRetriever: the folder contains something other than a retriever, which is kept.
        InvalidConfig: encoder or index could not be built again from their configuration.
        SaveConflict: the retriever was loaded from or saved to this folder, and another version
            has been saved to it since.
    """
    target = Path(folder)
    if retriever.searcher.encoder is not None:
        require_loadable(retriever.searcher.encoder)
    IndexConfig.of(retriever.searcher.index)
    check_place(target)
    target.mkdir(parents=True, exist_ok=True)
    with _lock(target):
        place = target.resolve()
        previous = _find_version(place)
        _check_conflict(retriever.version_folder, place, previous)
        _clean(place)
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        version = place / VERSIONS / name
        try:
            write_folder(version, lambda aside: _write_version(retriever, aside))
            _point_to(version, previous)
        finally:
            _clean(place)
    return version


def load(folder: str | os.PathLike[str]) -> StoredRetriever:
    """Read the current version of a retriever, checking every file against its checksum first.

    Args:
        folder: of the retriever, or one of its versions.

    Raises:
        NoRetriever: there is no such folder, or no retriever in it.
        CorruptRetriever: a file is missing or was changed, or this version of rcir does not read
            the format.
        DataUnavailable, MissingPackage, StaleCalibration: the index is stored elsewhere, and is
            unavailable or was changed.
        UntrustedFolder: inside `rcir.trust.reading`, see there.
    """
    return read_current(Path(folder), _load_version)


def earlier_calibration(folder: str | os.PathLike[str]) -> Calibration | None:
    """Return the calibration of the retriever that a new one replaces; None if there is none.

    Queries keep their past, see `Calibration.after`. A folder that cannot be read has none.

    Raises:
        InvalidData: queries were added to it one by one, and it is not to be replaced.
        UntrustedFolder: it names a class or a server that is not allowed.
    """
    try:
        with reading():
            calibration = load(folder).calibration
    except UntrustedFolder:
        raise
    except RcirError:
        return None
    if calibration is not None and calibration.sequential:
        raise InvalidData(
            f"calibration queries were added to the retriever in {folder} one by one, so that they "
            "certify nothing at once: keep it, and calibrate another one on other queries"
        )
    return calibration


def read_current(folder: Path, read: Callable[[Path], Result]) -> Result:
    """Call `read` with the folder of the current version, and return the result.

    If the call fails and another version has become current meanwhile, it is repeated with that
    version, since writers delete old versions.

    Raises:
        NoRetriever, CorruptRetriever: as `current_version` does; and whatever `read` raises.
    """
    while True:
        version = current_version(folder)
        try:
            return read(version)
        except (RcirError, OSError):
            if _find_version(folder) == version:
                raise


def current_version(folder: Path) -> Path:
    """Return the folder of the current version of a retriever.

    Raises:
        NoRetriever: there is no retriever in the folder.
        CorruptRetriever: the file that names the current version is damaged.
    """
    version = _find_version(folder)
    if version is None:
        within = folder / "retriever"  # of the output of a calibration
        remedy = "make one with `rcir demo` or `rcir calibrate`"
        if _find_version(within) is not None:
            remedy = f"pass {within}"
        raise NoRetriever(
            f"there is no retriever in {folder} (neither {POINTER} nor {MANIFEST}): {remedy}"
        )
    return version


def read_manifest(folder: Path) -> bytes:
    """Return the manifest of the current version, whose digest identifies what is stored.

    Raises:
        NoRetriever, CorruptRetriever: as `current_version` does.
        OSError: the manifest cannot be read.
    """
    return read_current(folder, lambda version: (version / MANIFEST).read_bytes())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes and threads from saving to a retriever folder.

    Inside the block a retriever can be loaded, changed and saved without a `SaveConflict`. Other
    writers wait until the block ends. A folder without a retriever is not locked.

    Raises:
        CorruptRetriever: as `current_version` and `check_place` do.
    """
    if _find_version(folder) is None:
        yield
        return
    check_place(folder)
    with _lock(folder):
        yield


def check_place(folder: Path) -> None:
    """Check that a retriever can be saved to a folder without losing anything else.

    Raises:
        CorruptRetriever: the path is not a folder, or the folder contains something other than a
            retriever, or it is a version in the folder of a retriever.
    """
    place = folder.resolve()
    if place.parent.name == VERSIONS and (place.parent.parent / POINTER).is_file():
        raise CorruptRetriever(
            f"{folder} is a version of a retriever and never changes: save to "
            f"{place.parent.parent} or to another folder"
        )
    if os.path.lexists(folder) and not _is_replaceable(folder):
        raise CorruptRetriever(
            f"{folder} contains a single version, or something other than a retriever, which is "
            "left alone: choose another folder"
        )


# Versions


def _find_version(folder: Path) -> Path | None:
    """Return the folder of the current version, or None if there is no retriever.

    A version by itself, without a pointer beside it, is its own current version.
    """
    pointer = folder / POINTER
    try:
        values = json.loads(pointer.read_text())
        layout, name = values["format"], str(values["version"])
        if not re.fullmatch(VERSION_NAME, name):
            raise ValueError(f"version {name!r}")
    except (FileNotFoundError, NotADirectoryError):
        return folder if (folder / MANIFEST).is_file() else None
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise CorruptRetriever(
            f"{pointer} is damaged ({error}): copy the folder again, or calibrate again"
        ) from error
    if layout != LAYOUT:
        raise CorruptRetriever(
            f"{pointer} has format {layout}, this version of rcir reads format {LAYOUT}: calibrate "
            "again"
        )
    return folder / VERSIONS / name


def _check_conflict(version: Path | None, folder: Path, current: Path | None) -> None:
    """Raise `SaveConflict` if a retriever comes from another version in this folder."""
    if version is None or current in (None, version):
        return
    if folder == version.parent.parent:
        raise SaveConflict(
            f"another version of the retriever was saved to {folder} after this one was loaded or "
            "saved, and would be lost: load the retriever again and repeat the change, or save to "
            "another folder"
        )


def _lock(folder: Path) -> BaseFileLock:
    """Return the lock of a folder; a thread that holds it can acquire it again."""
    return FileLock(folder.resolve() / LOCK, is_singleton=True)


def _point_to(version: Path, previous: Path | None) -> None:
    """Make a version the current one."""
    folder = version.parent.parent
    pointer = {"format": LAYOUT, "version": version.name}
    if previous is not None:
        pointer["previous"] = previous.name
    with written_aside(folder / POINTER) as aside:
        aside.write_text(json.dumps(pointer))
        for path in (aside, folder.parent):
            sync(path)
    sync(folder)


def _clean(folder: Path) -> None:
    """Delete what the pointer does not name: old versions, and those of killed processes.

    What cannot be deleted is left to the next writer.
    """
    retained: set[str | None] = set()
    with suppress(FileNotFoundError):
        pointer = json.loads((folder / POINTER).read_text())
        retained = {pointer["version"], pointer.get("previous")}
    with suppress(OSError):
        for path in (folder / VERSIONS).iterdir():
            if path.name not in retained:
                shutil.rmtree(path, ignore_errors=True)


def _is_replaceable(folder: Path) -> bool:
    """Return whether a path is a folder that contains no files but those of a retriever."""
    try:
        _find_version(folder)
    except CorruptRetriever:
        return False
    return folder.is_dir() and all(map(LAYOUT_FILES.fullmatch, _files(folder)))


# Files of a version, and their checksums


def _checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of all files of a version by name."""
    return {name: _checksum(folder / name) for name in sorted(_files(folder))}


def _verified_files(folder: Path) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Compare all files of a version with their checksums; return these and `_state` by name.

    Names of files in inner folders contain slashes.

    Raises:
        CorruptRetriever: a file is missing or was changed, or has another format.
    """
    manifest = folder / MANIFEST
    try:
        text = manifest.read_text()
        values = json.loads(text)
        version, files = values["format"], dict(values["files"])
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise CorruptRetriever(
            f"{manifest} is damaged ({error}): copy the folder again, or calibrate again"
        ) from error
    if version != FORMAT:
        raise CorruptRetriever(
            f"{folder} has format {version}, this version of rcir reads format {FORMAT}: calibrate "
            "again (rcir calibrate --run RUN)"
        )
    if missing := REQUIRED_FILES - files.keys():
        raise CorruptRetriever(
            f"{manifest} does not list {', '.join(sorted(missing))}: copy the folder again, or "
            "calibrate again"
        )
    states = {}
    for name, checksum in files.items():
        path = folder / name
        if not _is_relative(name) or not path.is_file():
            raise CorruptRetriever(f"{path} is missing: copy the folder again, or calibrate again")
        states[name] = _state(path)
        if _checksum(path) != checksum:
            raise CorruptRetriever(
                f"{path} was changed since it was written (its checksum differs): copy the folder "
                "again, or calibrate again"
            )
    if text != _manifest_text(files):
        raise CorruptRetriever(
            f"{manifest} was changed since it was written: copy the folder again, or calibrate "
            "again"
        )
    return files, states


def _manifest_text(files: Mapping[str, str]) -> str:
    return json.dumps({"format": FORMAT, "files": files}, indent=1)


def _files(folder: Path) -> set[str]:
    """Return the names of all files in a folder and its inner folders."""
    return {
        (Path(parent) / name).relative_to(folder).as_posix()
        for parent, _, names in os.walk(folder)
        for name in names
    }


def _is_relative(name: str) -> bool:
    """Return whether a name is the plain relative path of a file inside a folder."""
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state(path: Path) -> tuple[int, ...]:
    """What changes when a file is written to or replaced; nothing if there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return ()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


# Retrievers


def _write_version(retriever: StoredRetriever, folder: Path) -> None:
    """Write all files of a version to an empty folder."""
    searcher, calibration = retriever.searcher, retriever.calibration
    rules, arrays = ([], {}) if calibration is None else describe_rules(calibration)
    options = CalibrationOptions() if calibration is None else calibration.options
    description: dict[str, Any] = {
        "encoder": None,
        "preprocessing": None,
        "index": save_index(searcher.index, folder),
        "max_depth": searcher.max_depth,
        "calibrated_on": {} if calibration is None else dict(calibration.fingerprints),
        "origin": retriever.origin,
        "chosen_among": 1 if calibration is None else calibration.chosen_among,
        "attempts": 1 if calibration is None else calibration.attempts,
        "past": describe_past(calibration),
        "coverage": None
        if calibration is None or calibration.coverage is None
        else [calibration.coverage.uncalibrated, calibration.coverage.labels],
        "left_out": None if calibration is None else calibration.left_out,
        "options": asdict(searcher.options),
        "sequential": calibration is not None and calibration.sequential,
        "calibrated_with": asdict(options),
        "label_names": {str(label): name for label, name in searcher.label_names.items()},
        "controllers": rules,
    }
    if searcher.encoder is not None and searcher.preprocessing is not None:
        description["encoder"] = asdict(searcher.encoder.config)
        description["preprocessing"] = searcher.preprocessing.to_dict()
        save_encoder(searcher.encoder, folder / WEIGHTS)
    if calibration is not None:
        (folder / CONTROLLER_FILE).write_bytes(save_arrays(arrays))
        save_queries(calibration, folder)
    save_gallery(searcher, folder)
    checksums = _checksums(folder)
    description["digests"] = describe_digests(searcher, checksums)
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1))
    checksums[DESCRIPTION_FILE] = _checksum(folder / DESCRIPTION_FILE)
    (folder / MANIFEST).write_text(_manifest_text(dict(sorted(checksums.items()))))


def _load_version(folder: Path) -> StoredRetriever:
    """Read a version after all of its files were compared with their checksums."""
    checksums, states = _verified_files(folder)
    with _as_corrupt(folder):
        description = json.loads((folder / DESCRIPTION_FILE).read_text())
        encoder, index = description["encoder"] or {}, description["index"]
    # A missing package, or a missing class of the user's own, does not make the folder invalid.
    if encoder:
        with naming_extras():
            from rcir.encoders import find_method

        if ":" in str(encoder.get("method")):
            find_method(encoder["method"])
    if ":" in str(index.get("kind")):
        find_index(index["kind"])
    with _as_corrupt(folder):
        retriever = _read_version(folder, checksums, description)
    for name, state in states.items():
        if _state(folder / name) != state:
            raise CorruptRetriever(f"{folder / name} was changed while it was read: load it again")
    return retriever


@contextmanager
def _as_corrupt(folder: Path) -> Iterator[None]:
    """Raise `CorruptRetriever` for any error of files that anybody could have written.

    An index outside the folder can be unavailable, or another one, without any damage to it.
    """
    try:
        yield
    except (DataUnavailable, MissingPackage, StaleCalibration, UntrustedFolder):
        raise
    except Exception as error:
        raise CorruptRetriever(
            f"{folder} cannot be read although its checksums are right ({error!r}): calibrate again"
        ) from error


def _read_version(
    folder: Path, checksums: Mapping[str, str], description: Mapping[str, Any]
) -> StoredRetriever:
    encoder = preprocessing = None
    if description["encoder"] is not None:
        from rcir.data.preprocessing import Preprocessing
        from rcir.encoders import EncoderConfig

        preprocessing = Preprocessing.from_dict(description["preprocessing"])
        config = EncoderConfig(**description["encoder"])
        encoder = load_encoder(config, preprocessing, folder / WEIGHTS)
    searcher = Searcher(
        encoder,
        preprocessing,
        load_index(description["index"], folder),
        depth=description["max_depth"],
        options=VectorOptions(**description["options"]),
        **load_gallery(folder, checksums.keys()),
    )
    contents = {name: each for name, each in checksums.items() if name != DESCRIPTION_FILE}
    restore_digests(description["digests"], searcher, contents)
    names = description["label_names"].items()
    searcher.label_names = {int(label): str(name) for label, name in names}
    calibration = None
    if description["controllers"]:
        arrays = load_arrays(folder / CONTROLLER_FILE)
        calibration = load_calibration(description, arrays, folder)
    return StoredRetriever(searcher, calibration, description["origin"], folder.resolve())
