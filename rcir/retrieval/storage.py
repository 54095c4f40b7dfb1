"""A retriever as a folder of plain files, and back.

    manifest.json           format version, and the SHA-256 of every other file
    retriever.json          encoder, preprocessing, depth, controller, what it was calibrated on,
                            how many retrievers it was chosen among, and names of labels
    encoder.safetensors     weights
    controller.safetensors  score functions, outcomes of tuning split and calibration queries
    index.faiss             the index
    gallery.json            ids
    relevance.safetensors   labels of the gallery images or what else says which queries match them
    uncertainty.npy         uncertainties of the gallery images, if the encoder states any
    items.safetensors       embeddings of the gallery images, if the encoder re-ranks by them
    digests.npy             digests of the gallery images, if they are known
    queries.npy             digests of the queries that it was tuned or calibrated with

Nothing in it is, or is read as, a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from rcir.data.preprocessing import Preprocessing
from rcir.data.relevance import relevance_of
from rcir.encoders import EncoderConfig, build_encoder, find_method, method_name
from rcir.encoders.base import Encoder
from rcir.encoders.batches import from_arrays, to_arrays
from rcir.errors import CorruptRetriever, InvalidConfig, NoRetriever, RcirError
from rcir.files import write_folder
from rcir.index import FlatIndex
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults, RiskController, score_function_class
from rcir.risk.bonferroni import check_among

FORMAT = 5
MANIFEST = "manifest.json"
REQUIRED = {"retriever.json", "encoder.safetensors", "index.faiss", "gallery.json"}


def save(retriever: Retriever, folder: str | os.PathLike[str]) -> Path:
    """Write a retriever to a folder, replacing a retriever that is there.

    Raises:
        CorruptRetriever: what is there is not a retriever and nothing else; it is kept.
        InvalidConfig: the encoder could not be built again from its configuration.
    """
    target = Path(folder)
    require_loadable(retriever.encoder)
    check_place(target)
    write_folder(target, lambda aside: _fill(retriever, aside))
    return target


def require_loadable(encoder: Encoder) -> None:
    """Raise `InvalidConfig` unless the configuration of an encoder names its class."""
    kind = type(encoder)
    name = method_name(kind)
    if kind.__module__ == "__main__":
        raise InvalidConfig(
            f"{kind.__name__} is defined in the program itself, where whoever loads it cannot "
            "import it: move it to a module, and set encoder.method to its import path"
        )
    if find_method(encoder.config.method) is not kind:
        raise InvalidConfig(
            f"the encoder is a {name}, and its configuration says {encoder.config.method}, which "
            f'would be loaded in its place: build it with EncoderConfig("{name}", ...)'
        )


def check_place(target: Path) -> None:
    """Raise the `CorruptRetriever` that `save` would raise."""
    if target.exists() and not _is_ours(target):
        raise CorruptRetriever(
            f"{target} holds something other than a retriever: it is left alone; choose another "
            "folder"
        )


def load(folder: str | os.PathLike[str]) -> Retriever:
    """Read a retriever, checking every file against its checksum first.

    Raises:
        NoRetriever: there is no such folder, or it holds no manifest.
        CorruptRetriever: a file is missing or changed, or the format is not this version's.
    """
    source = Path(folder)
    if not (source / MANIFEST).is_file():
        raise NoRetriever(
            f"{source} holds no retriever (no {MANIFEST}): make one with `rcir demo` or "
            "`python -m calibration`"
        )
    files = _verify(source)
    try:
        return _read(source, files.keys())
    except (
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
        OSError,
        AttributeError,
        SafetensorError,
    ) as error:
        if isinstance(error, RcirError):
            raise
        raise CorruptRetriever(
            f"{source} cannot be read although its checksums are right ({error!r}): it was "
            "written by something else; calibrate again"
        ) from error


def _is_ours(target: Path) -> bool:
    """Whether a path is an empty folder, or holds a retriever and nothing beside it."""
    if not target.is_dir():
        return False
    names = {path.name for path in target.iterdir()}
    if not names:
        return True
    try:
        return names <= {MANIFEST, *json.loads((target / MANIFEST).read_text())["files"]}
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _fill(retriever: Retriever, folder: Path) -> None:
    description: dict[str, Any] = {
        "encoder": asdict(retriever.encoder.config),
        "preprocessing": asdict(retriever.preprocessing),
        "max_depth": retriever.max_depth,
        "calibrated_on": retriever.calibrated_on,
        "origin": retriever.origin,
        "chosen_among": retriever.chosen_among,
        "label_names": {str(label): name for label, name in retriever.label_names.items()},
        "controllers": [],
    }
    save_encoder(retriever.encoder, folder / "encoder.safetensors")
    arrays: dict[str, NDArray[Any]] = {}
    for distinct, controller in retriever.controllers.items():
        groups = None if controller.groups is None else controller.groups.tolist()
        stored = {"main": controller} | {str(risk): own for risk, own in controller.own.items()}
        description["controllers"].append(
            {
                "distinct": distinct,
                "score_functions": {risk: one.score_function.name for risk, one in stored.items()},
                "bound": controller.bound,
                "groups": groups,
                "cluster": controller.cluster,
                "growing": controller.growing,
            }
        )
        for risk, one in stored.items():
            for part, values in (
                ("score_function", one.score_function.state()),
                ("tuning", one.tuning.arrays()),
                ("calibration", one.calibration.arrays()),
            ):
                place = f"{distinct}.{risk}.{part}"
                arrays |= {f"{place}.{name}": array for name, array in values.items()}
    if arrays:
        (folder / "controller.safetensors").write_bytes(save_arrays(arrays))
        np.save(folder / "queries.npy", retriever.query_digests, allow_pickle=False)
    retriever.index.save(folder / "index.faiss")
    (folder / "gallery.json").write_text(json.dumps(retriever.ids.tolist()))
    if retriever.relevance is not None:
        facts = retriever.relevance.arrays()
        (folder / "relevance.safetensors").write_bytes(save_arrays(facts))
    if retriever.item_uncertainty is not None:
        np.save(folder / "uncertainty.npy", retriever.item_uncertainty, allow_pickle=False)
    if retriever.items is not None:
        held = to_arrays(retriever.items)
        (folder / "items.safetensors").write_bytes(save_arrays(held))
    if retriever.digests is not None:
        np.save(folder / "digests.npy", retriever.digests, allow_pickle=False)
    (folder / "retriever.json").write_text(json.dumps(description, indent=1))
    checksums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(_manifest(checksums))


def _verify(folder: Path) -> dict[str, str]:
    """The files of a folder with their checksums, all of them checked."""
    try:
        text = (folder / MANIFEST).read_text()
        manifest = json.loads(text)
        version, files = manifest["format"], dict(manifest["files"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CorruptRetriever(
            f"{folder / MANIFEST} is damaged ({error}): copy the folder again, or calibrate again"
        ) from error
    if not files.keys() >= REQUIRED:
        raise CorruptRetriever(
            f"{folder / MANIFEST} does not list {', '.join(sorted(REQUIRED - files.keys()))}: copy "
            "the folder again, or calibrate again"
        )
    if version != FORMAT:
        raise CorruptRetriever(
            f"{folder} has format {version}, this version of rcir reads format {FORMAT}: use the "
            "version that wrote it, or calibrate again"
        )
    for name, checksum in files.items():
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise CorruptRetriever(f"{path} is missing: copy the folder again, or calibrate again")
        if _checksum(path) != checksum:
            raise CorruptRetriever(
                f"{path} was changed since it was written (its checksum differs): copy the folder "
                "again, or calibrate again"
            )
    if text != _manifest(files):
        raise CorruptRetriever(
            f"{folder / MANIFEST} was changed since it was written: copy the folder again, or "
            "calibrate again"
        )
    return files


def _manifest(files: dict[str, str]) -> str:
    return json.dumps({"format": FORMAT, "files": files}, indent=1)


def _read(folder: Path, files: Set[str]) -> Retriever:
    description = json.loads((folder / "retriever.json").read_text())
    preprocessing = Preprocessing.from_dict(description["preprocessing"])
    config = EncoderConfig(**description["encoder"])
    relevance = uncertainty = digests = items = None
    if "relevance.safetensors" in files:
        relevance = relevance_of(load_arrays(folder / "relevance.safetensors"))
    if "uncertainty.npy" in files:
        uncertainty = np.load(folder / "uncertainty.npy", allow_pickle=False)
    if "items.safetensors" in files:
        items = from_arrays(load_arrays(folder / "items.safetensors"))
    if "digests.npy" in files:
        digests = np.load(folder / "digests.npy", allow_pickle=False)
    retriever = Retriever(
        load_encoder(config, preprocessing, folder / "encoder.safetensors"),
        preprocessing,
        FlatIndex.load(folder / "index.faiss"),
        json.loads((folder / "gallery.json").read_text()),
        relevance,
        description["max_depth"],
        uncertainty,
        digests,
        items,
    )
    retriever.origin = description["origin"]
    retriever.chosen_among = check_among(description["chosen_among"])
    names = description["label_names"].items()
    retriever.label_names = {int(label): str(name) for label, name in names}
    if description["controllers"]:
        arrays = load_arrays(folder / "controller.safetensors")
        retriever.controllers = {
            kind["distinct"]: _controller(kind, arrays) for kind in description["controllers"]
        }
        retriever.calibrated_on = description["calibrated_on"]
        retriever.query_digests = np.load(folder / "queries.npy", allow_pickle=False)
    return retriever


def _controller(kind: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> RiskController:
    """One stored controller of the description `kind`, with those of risks of their own."""

    def part(risk: str, name: str) -> dict[str, NDArray[Any]]:
        prefix = f"{kind['distinct']}.{risk}.{name}."
        return {
            key.removeprefix(prefix): values
            for key, values in arrays.items()
            if key.startswith(prefix)
        }

    groups = None if kind["groups"] is None else np.array(kind["groups"], str)

    def stored(risk: str, own: dict[str, RiskController]) -> RiskController:
        return RiskController(
            score_function_class(kind["score_functions"][risk]).from_state(
                part(risk, "score_function")
            ),
            LabelledResults.from_arrays(part(risk, "tuning"), None, kind["cluster"]),
            LabelledResults.from_arrays(part(risk, "calibration"), groups, kind["cluster"]),
            kind["bound"],
            own,
            kind["growing"],
        )

    return stored(
        "main", {risk: stored(risk, {}) for risk in kind["score_functions"] if risk != "main"}
    )


def save_encoder(encoder: Encoder, path: Path) -> None:
    """Write the weights of an encoder as safetensors."""
    save_tensors(encoder.state_dict(), path)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, readable by whom the umask allows, as any other file."""
    path.write_bytes(to_bytes({name: values.contiguous() for name, values in tensors.items()}))


def load_encoder(config: EncoderConfig, preprocessing: Preprocessing, path: Path) -> Encoder:
    """An encoder with the weights of a file, in evaluation mode."""
    # Its weights are in the file: nothing is downloaded.
    untrained = build_encoder(
        replace(config, pretrained=False),
        preprocessing.channels,
        preprocessing.size,
    )
    untrained.load_state_dict(load_file(path))
    untrained.config = config
    return untrained.eval()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
