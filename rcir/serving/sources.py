"""Where a served retriever comes from: a folder or MLflow's registry, and its present version."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from pathlib import Path

from rcir import api, tracking
from rcir.errors import InvalidConfig, NoRetriever, StaleCalibration
from rcir.serving.served import Served
from rcir.storage import is_uri
from rcir.store.folder import MANIFEST, read_manifest


class RetrieverSource(ABC):
    """A place whose retriever may be replaced; `on_gpu` embeds pictures on a GPU."""

    def __init__(self, place: str | os.PathLike[str], on_gpu: bool = False) -> None:
        self.name, self.on_gpu = str(place), on_gpu

    @abstractmethod
    def version(self) -> str:
        """Return the version of the present retriever, without loading it.

        It is the digest of its manifest, after a name and a hyphen if the source has one.
        """

    @abstractmethod
    def place(self, version: str) -> str:
        """Return the place that `rcir.load` reads a version from."""

    def load(self, version: str) -> Served:
        """Load the retriever of a version, or of a newer one, and verify every file."""
        while True:
            retriever = api.load(self.place(version))
            present = self.version()
            if present == version:
                if self.on_gpu and retriever.encoder is not None:
                    retriever.encoder.cuda()
                return Served(retriever, version, version.rpartition("-")[2])
            version = present  # it changed meanwhile


class Folder(RetrieverSource):
    """A retriever folder, whose current version is served."""

    def version(self) -> str:
        try:
            return _digest(read_manifest(Path(self.name)))
        except OSError as error:
            raise NoRetriever(f"the retriever in {self.name} cannot be read ({error})") from error

    def place(self, version: str) -> str:
        return self.name


class RegistryName(RetrieverSource):
    """A registered version, `models:/NAME/VERSION`, or that of an alias, `models:/NAME@ALIAS`.

    Versions are named `NAME/NUMBER-MANIFEST`: `rcir compare --choose` marks a retriever in place.
    """

    def version(self) -> str:
        name, at, alias = self.name.removeprefix("models:/").partition("@")
        if at:
            registered = tracking.find_version(name, alias)
            if registered is None:
                raise NoRetriever(
                    f"MLflow's registry has no {self.name}: make it with `rcir register`"
                )
            name = f"{name}/{registered.version}"
        manifest = f"models:/{name}/{tracking.INSIDE}/{MANIFEST}"
        return f"{name}-{_digest(tracking.read_file(manifest))}"

    def place(self, version: str) -> str:
        return f"models:/{version.rpartition('-')[0]}"


def _digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()[:12]


def source_of(place: str | os.PathLike[str], on_gpu: bool = False) -> RetrieverSource:
    """Return the source that a folder or an MLflow URI names."""
    text = str(place)
    if text.startswith("models:/"):
        return RegistryName(text, on_gpu)
    if ("://" in text and not is_uri(text)) or text.startswith("runs:/"):
        raise InvalidConfig(
            f"{text} cannot be served: name a folder, or models:/NAME@ALIAS (`rcir register` makes "
            "one)"
        )
    return Folder(text, on_gpu)


def ready_to_serve(source: RetrieverSource, version: str | None = None) -> Served:
    """Load, verify and warm up the retriever of a source."""
    served = source.load(version or source.version())
    if served.retriever.calibration is None:
        raise StaleCalibration(f"{source.name} is not calibrated: calibrate it first")
    if served.retriever.calibration.probability_labels is not None:
        raise InvalidConfig(
            f"{source.name} was calibrated with probabilities of labels, which HTTP requests "
            "cannot contain: query it from Python"
        )
    if changed := served.retriever.changes():
        raise StaleCalibration(f"{source.name} changed since calibration: {', '.join(changed)}")
    served.warm_up()
    return served
