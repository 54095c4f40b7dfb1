"""Stored retrievers: the files of a version, in a folder of versions (`rcir.store.folder`).

    retriever.json          everything but encoder and index, see `Contents`;
    retriever.safetensors   its arrays
    encoder.safetensors     weights, if there is an encoder
    index/                  the files of the index
    digests.json            digests of gallery and index

Nothing in the folder is, or is read as, a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rcir.errors import (
    CorruptRetriever,
    DataUnavailable,
    InvalidData,
    MissingClass,
    MissingPackage,
    RcirError,
    StaleCalibration,
    UntrustedFolder,
)
from rcir.imports import naming_extras
from rcir.index import IndexConfig, KeepsDigests, find_index
from rcir.retrieval.calibration import Calibration
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.queries import VectorOptions
from rcir.retrieval.search import Searcher
from rcir.store.codec import read, write
from rcir.store.folder import checksums, read_current, save_version, verified, write_manifest
from rcir.trust import reading, require_servers

CONTENTS, DIGESTS = "retriever", "digests"
DESCRIPTION_FILE, WEIGHTS, INDEX = f"{CONTENTS}.json", "encoder.safetensors", "index"
REQUIRED_FILES = {DESCRIPTION_FILE, f"{CONTENTS}.safetensors", f"{DIGESTS}.json"}


@dataclass(frozen=True)
class StoredRetriever:
    """The parts of a retriever that are stored, and the folder of its version, if it has one."""

    searcher: Searcher
    calibration: Calibration | None
    origin: Mapping[str, Any]
    version_folder: Path | None


@dataclass(frozen=True, eq=False)
class Contents:
    """Everything of a retriever but its encoder and its index, of which it has the options."""

    encoder: Mapping[str, Any] | None
    preprocessing: Mapping[str, Any] | None
    index: Mapping[str, Any]
    max_depth: int
    options: VectorOptions
    origin: Mapping[str, Any]
    label_names: Mapping[int, str]
    gallery: Gallery
    calibration: Calibration | None

    def __post_init__(self) -> None:
        if (self.encoder is None) != (self.preprocessing is None):
            raise InvalidData("there must be both an encoder and its preprocessing, or neither")


@dataclass(frozen=True)
class Digests:
    """Digests of gallery and index, which need not be computed after loading.

    Attributes:
        files: joint checksum of the files that they were computed of. If a file is another one,
            they are computed when they are needed.
        gallery, index: see `Gallery.fingerprint` and `KeepsDigests.digests`.
    """

    files: str
    gallery: str
    index: Sequence[str]


def save(retriever: StoredRetriever, folder: str | os.PathLike[str]) -> Path:
    """Write a retriever to a folder as its current version; return the folder of the version.

    Raises:
        InvalidConfig: encoder or index could not be built again from their configuration.
        CorruptRetriever, SaveConflict: see `save_version`.
    """
    if retriever.searcher.encoder is not None:
        from rcir.encoders.weights import require_loadable

        require_loadable(retriever.searcher.encoder)
    IndexConfig.of(retriever.searcher.index)
    return save_version(
        Path(folder), lambda version: _write(retriever, version), retriever.version_folder
    )


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
        MissingClass: a class of another package cannot be imported.
        UntrustedFolder: inside `rcir.trust.reading`, see there.
    """
    return read_current(Path(folder), _read)


def earlier_calibration(folder: str | os.PathLike[str]) -> Calibration | None:
    """Return the calibration of the retriever that a new one replaces; None if there is none.

    A folder that cannot be read has none. Raises `InvalidData` if queries were added to it one by
    one, and `UntrustedFolder` if it names a class or a server that is not allowed.
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


def _write(retriever: StoredRetriever, folder: Path) -> None:
    """Write all files of a version to an empty folder."""
    searcher, calibration = retriever.searcher, retriever.calibration
    encoder, preprocessing, index = searcher.encoder, searcher.preprocessing, searcher.index
    if encoder is not None:
        from rcir.encoders.weights import save_tensors

        save_tensors(encoder.state_dict(), folder / WEIGHTS)
    (folder / INDEX).mkdir()
    index.save(folder / INDEX)
    contents = Contents(
        encoder=None if encoder is None else asdict(encoder.config),
        preprocessing=None if preprocessing is None else preprocessing.to_dict(),
        index=asdict(IndexConfig.of(index)),
        max_depth=searcher.max_depth,
        options=searcher.options,
        origin=retriever.origin,
        label_names=searcher.label_names,
        gallery=searcher.gallery,
        calibration=None if calibration is None else calibration.complete(),
    )
    write(contents, folder, CONTENTS)
    files, gallery = checksums(folder), searcher.gallery
    if gallery.items is not None:
        gallery = replace(gallery)  # tensors may have been written to since they were digested
    index_digests = index.digests() if isinstance(index, KeepsDigests) else []
    write(Digests(_joint(files), gallery.fingerprint, index_digests), folder, DIGESTS)
    write_manifest(folder, checksums(folder, files))


def _read(folder: Path) -> StoredRetriever:
    """Read a version after all of its files were compared with their checksums."""
    with verified(folder, REQUIRED_FILES) as files, _as_corrupt(folder):
        contents, digests = read(Contents, folder, CONTENTS), read(Digests, folder, DIGESTS)
        searcher = _searcher(contents, folder)
        others = {name: files[name] for name in files if name != f"{DIGESTS}.json"}
        if digests.files == _joint(others):
            searcher.gallery.restore_fingerprint(digests.gallery)
            if isinstance(searcher.index, KeepsDigests):
                searcher.index.restore_digests(list(digests.index))
    return StoredRetriever(searcher, contents.calibration, contents.origin, folder.resolve())


def _searcher(contents: Contents, folder: Path) -> Searcher:
    encoder = preprocessing = None
    if contents.encoder is not None:
        with naming_extras():
            from rcir.data.preprocessing import Preprocessing
            from rcir.encoders import EncoderConfig
            from rcir.encoders.base import stored_encoder
            from rcir.encoders.weights import load_encoder

        assert contents.preprocessing is not None
        preprocessing = Preprocessing.from_dict(contents.preprocessing)
        config = EncoderConfig(**stored_encoder(contents.encoder))
        encoder = load_encoder(config, preprocessing, folder / WEIGHTS)
    index_config = IndexConfig(**contents.index)
    require_servers(getattr(index_config.index_options(), "hosts", ()))
    return Searcher(
        gallery=contents.gallery,
        index=find_index(index_config.kind).load(folder / INDEX, index_config.index_options()),
        encoder=encoder,
        preprocessing=preprocessing,
        max_depth=contents.max_depth,
        options=contents.options,
        label_names=dict(contents.label_names),
    )


def _joint(files: Mapping[str, str]) -> str:
    """Return one checksum for those of several files."""
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()


@contextmanager
def _as_corrupt(folder: Path) -> Iterator[None]:
    """Raise `CorruptRetriever` for any error of files that anybody could have written.

    An index outside the folder, a package or a class of the user's own can be unavailable, and the
    index another one, without any damage to the folder.
    """
    try:
        yield
    except (DataUnavailable, MissingClass, MissingPackage, StaleCalibration, UntrustedFolder):
        raise
    except Exception as error:
        raise CorruptRetriever(
            f"{folder} cannot be read although its checksums are right ({error!r}): calibrate again"
        ) from error
