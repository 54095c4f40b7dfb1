"""Saving a retriever to a folder, and loading it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays

from rcir.errors import (
    CorruptRetriever,
    DataUnavailable,
    MissingPackage,
    NoRetriever,
    StaleCalibration,
)
from rcir.extras import naming_extras
from rcir.files import settle, write_folder
from rcir.index import IndexConfig, find_index
from rcir.retrieval.calibration import Calibration, CalibrationOptions, needs_embeddings
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.search import Searcher
from rcir.retrieval.storage.checks import (
    DESCRIPTION,
    require,
    require_fields,
    require_finite,
    require_texts,
)
from rcir.retrieval.storage.controllers import describe_rules, rules_of
from rcir.retrieval.storage.gallery import (
    load_gallery,
    load_index,
    save_gallery,
    save_index,
)
from rcir.retrieval.storage.manifest import MANIFEST, is_retriever, verified_files, write_manifest
from rcir.retrieval.storage.queries import load_queries, save_queries
from rcir.retrieval.vector_options import VectorOptions
from rcir.risk.bounds import check_among

WEIGHTS = "encoder.safetensors"


def save(retriever: Retriever, folder: str | os.PathLike[str]) -> Path:
    """Write a retriever to a folder, replacing a retriever that is there.

    Raises:
        CorruptRetriever: what is there is not a retriever and nothing else; it is kept.
        InvalidConfig: encoder or index could not be built again from their configuration.
    """
    target = Path(folder)
    if retriever.encoder is not None:
        from rcir.retrieval.storage.weights import require_loadable

        require_loadable(retriever.encoder)
    IndexConfig.of(retriever.index)
    check_place(target)
    write_folder(target, lambda aside: _fill(retriever, aside))
    return target


def check_place(target: Path) -> None:
    """Raise the `CorruptRetriever` that `save` would raise."""
    settle(target)
    if target.exists() and not is_retriever(target):
        raise CorruptRetriever(
            f"{target} holds something other than a retriever: it is left alone; choose another "
            "folder"
        )


def load(folder: str | os.PathLike[str]) -> Retriever:
    """Read a retriever, checking every file against its checksum first.

    Raises:
        NoRetriever: there is no such folder, or it holds no manifest.
        CorruptRetriever: a file is missing or changed, or the format is not this version's.
        DataUnavailable, MissingPackage, StaleCalibration: of an index that lies elsewhere.
    """
    source = Path(folder)
    settle(source)
    if not (source / MANIFEST).is_file():
        raise NoRetriever(
            f"{source} holds no retriever (no {MANIFEST}): make one with `rcir demo` or "
            "`python -m calibration`"
        )
    files = verified_files(source)
    with _refusing(source):
        description = _description(source)
    # A class of the user's own, or a package, may be absent: that is no damage.
    encoder, index = description["encoder"] or {}, description["index"]
    if encoder:
        with naming_extras():
            from rcir.encoders import find_method

        if ":" in str(encoder.get("method")):
            find_method(encoder["method"])
    if ":" in str(index.get("kind")):
        find_index(index["kind"])
    with _refusing(source):
        return _read(source, files, description)


@contextmanager
def _refusing(source: Path) -> Iterator[None]:
    """Refuse a folder for whatever goes wrong: anybody may have written it.

    What lies elsewhere, as a remote index does, may be away, or another one, without any damage.
    """
    try:
        yield
    except (DataUnavailable, MissingPackage, StaleCalibration):
        raise
    except Exception as error:
        raise CorruptRetriever(
            f"{source} cannot be read although its checksums are right ({error!r}): it was "
            "written by something else; calibrate again"
        ) from error


def _description(folder: Path) -> dict[str, Any]:
    description: dict[str, Any] = json.loads((folder / "retriever.json").read_text())
    require_fields(description, DESCRIPTION, "retriever.json")
    for name in ("encoder", "preprocessing", "index"):
        require_finite(description[name], name)
    for name in ("calibrated_on", "label_names"):
        require_texts(description[name], name)
    return description


def _fill(retriever: Retriever, folder: Path) -> None:
    calibration = retriever.calibration
    described, arrays = ([], {}) if calibration is None else describe_rules(calibration)
    options = CalibrationOptions() if calibration is None else calibration.options
    description: dict[str, Any] = {
        "encoder": None,
        "preprocessing": None,
        "index": save_index(retriever.index, folder),
        "max_depth": retriever.max_depth,
        "calibrated_on": {} if calibration is None else dict(calibration.fingerprints),
        "origin": retriever.origin,
        "chosen_among": retriever.chosen_among,
        "options": asdict(retriever.options),
        "uncertainty": retriever.uncertainty,
        "calibrated_with": asdict(options),
        "label_names": {str(label): name for label, name in retriever.label_names.items()},
        "controllers": described,
    }
    if retriever.encoder is not None and retriever.preprocessing is not None:
        from rcir.retrieval.storage.weights import save_encoder

        description["encoder"] = asdict(retriever.encoder.config)
        description["preprocessing"] = retriever.preprocessing.to_dict()
        save_encoder(retriever.encoder, folder / WEIGHTS)
    if calibration is not None:
        (folder / "controller.safetensors").write_bytes(save_arrays(arrays))
        save_queries(calibration, folder)
    save_gallery(retriever.searcher, folder)
    (folder / "retriever.json").write_text(json.dumps(description, indent=1))
    write_manifest(folder)


def _read(folder: Path, files: Set[str], description: dict[str, Any]) -> Retriever:
    encoder = preprocessing = None
    if description["encoder"] is not None:
        from rcir.data.preprocessing import Preprocessing
        from rcir.encoders import EncoderConfig
        from rcir.retrieval.storage.weights import load_encoder

        preprocessing = Preprocessing.from_dict(description["preprocessing"])
        config = EncoderConfig(**description["encoder"])
        encoder = load_encoder(config, preprocessing, folder / WEIGHTS)
    require((encoder is not None) == (WEIGHTS in files), "weights without an encoder")
    searcher = Searcher(
        encoder,
        preprocessing,
        load_index(description["index"], folder),
        depth=description["max_depth"],
        options=VectorOptions(**description["options"]),
        **load_gallery(folder, files),
    )
    retriever = Retriever(searcher)
    retriever.origin = description["origin"]
    names = description["label_names"].items()
    retriever.label_names = {int(label): str(name) for label, name in names}
    uncertainty = description["uncertainty"]
    require(uncertainty in retriever.uncertainties, "uncertainty")
    among = check_among(description["chosen_among"])
    if not description["controllers"]:
        return retriever
    arrays = load_arrays(folder / "controller.safetensors")
    rules, sequential = rules_of(description["controllers"], arrays, retriever.gallery)
    main = rules[None].main
    tuning, calibration = load_queries(folder, (len(main.tuning), len(main.calibration)))
    for queries in (tuning, calibration):
        kept = queries.embedding is not None
        require(kept or not needs_embeddings(searcher, uncertainty), "embeddings of the queries")
    retriever.calibration = Calibration(
        rules=rules,
        fingerprints=description["calibrated_on"],
        options=CalibrationOptions(**description["calibrated_with"]),
        uncertainty=uncertainty,
        tuning_queries=tuning,
        calibration_queries=calibration,
        chosen_among=among,
        sequential=sequential,
    )
    return retriever
