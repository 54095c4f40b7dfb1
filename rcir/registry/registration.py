"""Versions of registered models."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rcir import tracking
from rcir.errors import InvalidData, StaleCalibration
from rcir.registry.logged_model import (
    log_calibration,
    make_example,
    read_results,
    require_measured,
    write_card,
)
from rcir.retrieval.retriever import Retriever
from rcir.runs.folder import FOLDER_TAG
from rcir.runs.results import RESULTS, RETRIEVER, TEST, RunResults
from rcir.store.folder import MANIFEST, read_manifest


def register(reference: str, name: str, alias: str | None = None) -> tracking.RegisteredVersion:
    """Register a calibration as the next version of a registered model, and give it an alias.

    If the version that has the alias is of the same model, nothing changes.

    Args:
        reference: folder of a calibration, or the id of its MLflow run.
        name: of the registered model, which is created if it does not exist.
        alias: such as "champion"; it then names this version and no other.

    Raises:
        InvalidData: there is no such calibration, or its results are those of another retriever.
        NoRetriever, CorruptRetriever: the folder contains no retriever, or a damaged one.
        StaleCalibration: the retriever has changed since calibration.
        InvalidConfig: MLflow accepts no such name or alias.
        TrackingUnavailable: MLflow cannot be reached.
    """
    present = tracking.find_version(name, alias) if alias else None
    with _open(reference) as calibration:
        if present is not None and present.model == calibration.model:
            return present
        run, model = _log(calibration)
        text = write_card(calibration.retriever, calibration.results)
        return tracking.create_version(
            name, run, model, description=text, tags=_tags(calibration), alias=alias
        )


@dataclass(frozen=True)
class _Calibration:
    """The folder and content of a calibration, its MLflow run, and the id of its model.

    `model` is None unless that model contains this retriever.
    """

    folder: Path
    retriever: Retriever
    results: Mapping[str, Any]
    run: tracking.TrackedRun | None
    model: str | None


@contextmanager
def _open(reference: str) -> Iterator[_Calibration]:
    """Open the calibration of a folder or, if there is no such folder, of an MLflow run."""
    if Path(reference).is_dir():
        folder = Path(reference)
        retriever, results = _read(folder, reference)
        run = tracking.find_tracked_run(retriever.origin.get("calibration", ""))
        model = tracking.find_model(run) if run else None
        if run is not None and model is not None:
            manifest = f"runs:/{run.id}/{tracking.INSIDE_RUN}/{MANIFEST}"
            logged = tracking.load_from(manifest, Path.read_bytes)
            if logged != read_manifest(folder / RETRIEVER):
                model = None  # the folder has changed
        yield _Calibration(folder, retriever, results, run, model)
        return
    run = tracking.find_tracked_run(reference)
    model = tracking.find_model(run) if run else None
    if run is None or model is None:
        reason = "MLflow has no such id" if run is None else "that run has no model"
        raise InvalidData(
            f"{reference} is not a folder, and {reason}: pass the output folder of `rcir calibrate`"
            " or `rcir certify`, or the id of its run"
        )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)

        def move(local: Path) -> None:
            shutil.move(local, folder / RETRIEVER)
            for file in (RESULTS, TEST):
                shutil.move(local.parents[1] / file, folder / file)

        tracking.load_from(f"models:/{model}", move)
        yield _Calibration(folder, *_read(folder, reference), run, model)


def _read(folder: Path, reference: str) -> tuple[Retriever, dict[str, Any]]:
    """Read a retriever and its results, and check that they belong together."""
    retriever = Retriever.load(folder / RETRIEVER)
    if retriever.calibration is None or retriever.calibration.sequential:
        raise InvalidData(f"{reference} has no results of a calibration: calibrate it")
    if retriever.changes():
        raise StaleCalibration(f"{reference} has changed since calibration: calibrate again")
    if not (folder / TEST).is_file():
        raise InvalidData(f"{folder} contains no {TEST}: calibrate again")
    results = read_results(folder)
    require_measured(retriever, RunResults.read(folder / TEST), results)
    return retriever, results


def _log(calibration: _Calibration) -> tuple[tracking.TrackedRun, str]:
    """Return the run and the model of a calibration in MLflow; log what is missing."""
    run, model = calibration.run, calibration.model
    if run is not None and model is not None:
        return run, model
    folder, retriever = calibration.folder, calibration.retriever
    example = make_example(retriever)
    if run is not None:
        return run, log_calibration(run, folder, retriever, example)
    tags = {FOLDER_TAG: str(folder.absolute()), tracking.KIND_TAG: "registration"}
    run = tracking.start_run(f"{folder.resolve().name} (registration)", tags)
    with run.active():
        return run, log_calibration(run, folder, retriever, example)


def _tags(calibration: _Calibration) -> dict[str, str]:
    """Return the tags of a version, which MLflow shows in the list of versions."""
    tags = {
        "rcir.dataset": calibration.results["dataset"],
        "rcir.n_calibration": calibration.results["n_calibration"],
        "rcir.chosen_among": calibration.retriever.require_calibration().chosen_among,
    }
    for row in calibration.results["rows"]:
        if row["mean_size"] is not None:
            for figure in ("mean_size", "test_risk"):
                tags[f"rcir.alpha-{row['alpha']:g}.{figure}"] = f"{row[figure]:.6g}"
    return {name: str(value) for name, value in tags.items()}
