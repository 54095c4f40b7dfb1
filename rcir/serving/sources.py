"""Where a served retriever comes from, and whether there is a new one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol

from rcir import api, tracking
from rcir.errors import InvalidConfig, NoRetriever, StaleCalibration
from rcir.files import settle
from rcir.retrieval.storage.manifest import MANIFEST
from rcir.serving.served import Served


class RetrieverSource(Protocol):
    """A place of retrievers, of which one is the present one."""

    name: str

    def version(self) -> str:
        """That of the present one; cheap to ask for.

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
    """A retriever's folder, which `Retriever.save` replaces at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)

    def version(self) -> str:
        settle(self.folder)
        try:
            manifest = (self.folder / MANIFEST).read_bytes()
        except OSError as error:
            raise NoRetriever(f"{self.folder} holds no retriever ({error})") from error
        return hashlib.sha256(manifest).hexdigest()[:12]

    def load(self, version: str) -> Served:
        while True:  # until none took its place meanwhile
            retriever = api.load(self.folder)
            now = self.version()
            if now == version:
                return Served(retriever, version)
            version = now


class RegistryName:
    """What an alias of a registered model stands for, `models:/NAME@ALIAS`, or one version of it,
    `models:/NAME/VERSION`.
    """

    def __init__(self, uri: str) -> None:
        self.name = uri

    def version(self) -> str:
        name, at, alias = self.name.removeprefix("models:/").partition("@")
        if not at:
            return name
        found = tracking.find_version(name, alias)
        if found is None:
            raise NoRetriever(f"MLflow's registry has no {self.name}: make it with `rcir register`")
        return f"{name}/{found.version}"

    def load(self, version: str) -> Served:
        return Served(api.load(f"models:/{version}"), version)


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
    """What is to be served: loaded, verified and warmed up.

    Raises:
        StaleCalibration: it is not calibrated, or was changed since.
        RcirError: as `RetrieverSource.version` and `RetrieverSource.load` do.
    """
    served = source.load(version or source.version())
    if not served.retriever.controllers:
        raise StaleCalibration(f"{source.name} is not calibrated: nothing could be answered")
    if changed := served.retriever.changes():
        raise StaleCalibration(f"{source.name} changed since calibration: {', '.join(changed)}")
    served.warm_up()
    return served
