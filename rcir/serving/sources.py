"""Where a served retriever comes from, and whether there is a new one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rcir import api, tracking
from rcir.errors import InvalidConfig, NoRetriever, StaleCalibration
from rcir.retrieval import storage
from rcir.retrieval.retriever import Retriever
from rcir.serving.served import Served


class RetrieverSource(Protocol):
    """A place of retrievers, of which one is the present one."""

    name: str

    def version(self) -> str:
        """That of the present one, which is another one for another retriever; cheap to ask for.

        Raises:
            NoRetriever: there is none.
            TrackingUnavailable: the registry cannot be reached.
        """
        ...

    def load(self, version: str) -> Served:
        """The retriever of a version that was the present one, every file checked.

        Raises:
            RcirError: as `rcir.load` does.
        """
        ...


class Folder:
    """A retriever folder, whose current version is served.

    The name of a version here is the digest of its manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)

    def version(self) -> str:
        try:
            return _digest(storage.read_manifest(self.folder))
        except OSError as error:
            raise NoRetriever(f"there is no retriever in {self.folder} ({error})") from error

    def load(self, version: str) -> Served:
        retriever, version = _loaded(lambda _: self.folder, self.version, version)
        return Served(retriever, version, version)


class RegistryName:
    """A version of a registered model, `models:/NAME/VERSION`, or that which an alias names,
    `models:/NAME@ALIAS`.

    Its version is `NAME/NUMBER-MANIFEST`: `rcir compare --choose` marks a retriever where it lies.
    """

    def __init__(self, uri: str) -> None:
        self.name = uri

    def version(self) -> str:
        name, at, alias = self.name.removeprefix("models:/").partition("@")
        if at:
            found = tracking.find_version(name, alias)
            if found is None:
                raise NoRetriever(
                    f"MLflow's registry has no {self.name}: make it with `rcir register`"
                )
            name = f"{name}/{found.version}"
        manifest = f"models:/{name}/{tracking.INSIDE}/{storage.MANIFEST}"
        return f"{name}-{_digest(tracking.read_file(manifest))}"

    def load(self, version: str) -> Served:
        retriever, version = _loaded(
            lambda version: f"models:/{version.rpartition('-')[0]}", self.version, version
        )
        return Served(retriever, version, version.rpartition("-")[2])


def _loaded(
    place: Callable[[str], Path | str], present: Callable[[], str], version: str
) -> tuple[Retriever, str]:
    """A retriever and its version; the next one, if that took its place meanwhile."""
    while True:
        retriever = api.load(place(version))
        now = present()
        if now == version:
            return retriever, version
        version = now


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()[:12]


def source_of(place: str | os.PathLike[str]) -> RetrieverSource:
    """The source that a folder or an MLflow URI names.

    Raises:
        InvalidConfig: it is a URI of another kind.

    Example:
        >>> source_of("runs/demo/retriever").name
        'runs/demo/retriever'
    """
    text = str(place)
    if text.startswith("models:/"):
        return RegistryName(text)
    if "://" in text or text.startswith("runs:/"):
        raise InvalidConfig(
            f"{text} cannot be served: name a folder, or models:/NAME@ALIAS (`rcir register` makes "
            "one)"
        )
    return Folder(Path(place))


def ready_to_serve(source: RetrieverSource, version: str | None = None) -> Served:
    """The retriever of a source, loaded, verified and warmed up.

    Raises:
        StaleCalibration: it is not calibrated, or was changed since.
        RcirError: as `RetrieverSource.version` and `RetrieverSource.load` do.
    """
    served = source.load(version or source.version())
    if served.retriever.calibration is None:
        raise StaleCalibration(f"{source.name} is not calibrated: nothing could be answered")
    if changed := served.retriever.changes():
        raise StaleCalibration(f"{source.name} changed since calibration: {', '.join(changed)}")
    served.warm_up()
    return served
