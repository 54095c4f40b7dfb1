"""A retriever as a model of MLflow: its signature, answers to tables, files and versions."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rcir import tracking
from rcir.errors import InvalidData, RiskUnattainable, StaleCalibration, printable
from rcir.imports import EXTRAS
from rcir.index import IndexConfig
from rcir.retrieval.pictures import PICTURES, ItemPictures, encode
from rcir.retrieval.retriever import Retriever
from rcir.risk import make_request, request_options
from rcir.runs.bucket import place_of
from rcir.runs.results import DIGEST_LENGTH, RESULTS, RETRIEVER, TEST, RunResults, headline_metrics
from rcir.store.folder import MANIFEST, current_version, read_manifest
from rcir.terminal import working

if TYPE_CHECKING:
    from pandas import DataFrame

    from rcir.data.images import ImageLike


IMAGE, VECTOR, UNCERTAINTY = "image", "vector", "uncertainty"
CARD_FILE = "README.md"
MODEL_CODE = Path(__file__).with_name("model_code.py")
FINGERPRINT_LENGTH = 12
CARD_HEAD = """
| alpha | delta | mean set size | one size for all | measured risk | 95% interval | score function |
|---|---|---|---|---|---|---|"""
LIMITS = """
What voids the guarantee:

- queries of labels that none of the calibration queries had
- queries unlike the calibration queries: another camera, season or users
- queries that depend on each other, or that are images of the gallery
- a level that was chosen after looking, unless it is requested with `simultaneous`
- keeping this retriever for its results on its calibration queries, unless it was marked by \
`rcir compare --choose`
- another encoder, preprocessing, gallery or index, which the retriever refuses by itself
"""
MLFLOW_TYPES = {bool: "boolean", int: "long", float: "double", str: "string"}  # MLflow's names
# Type and default of each option of a request.
PARAMETERS: Mapping[str, tuple[str, Any]] = {
    option.name: (MLFLOW_TYPES[option.kind], option.default) for option in request_options()
}


def build_signature(retriever: Retriever) -> dict[str, list[dict[str, Any]]]:
    """Return the columns of queries ("inputs") and answers ("outputs"), and the "params"."""
    inputs: dict[str, str | list[str]] = {IMAGE: "binary"}
    if retriever.encoder is None:
        inputs = {VECTOR: ["double"]}
        if has_uncertainty(retriever):
            inputs[UNCERTAINTY] = "double"
    outputs: dict[str, str | list[str]] = {
        "ids": ["string"],
        "labels": ["string" if retriever.label_names else "long"],
        "distances": ["double"],
        "probabilities": ["double"],
        "match_probability": "double",
        "size": "long",
        "abstained": "boolean",
        "label_calibrated": "boolean",
        UNCERTAINTY: "double",
        "unlike": "double",
        "guarantee": "string",
    }
    if retriever.labels is None:
        del outputs["labels"], outputs["label_calibrated"]
    params = [
        {"name": name, "type": kind, "default": value, "shape": None}
        for name, (kind, value) in PARAMETERS.items()
    ]
    return {"inputs": _columns(inputs), "outputs": _columns(outputs), "params": params}


def _columns(kinds: Mapping[str, str | list[str]]) -> list[dict[str, Any]]:
    """Return columns as MLflow describes them; a kind in a list is that of a list's items."""

    def describe(kind: str | list[str]) -> dict[str, Any]:
        if isinstance(kind, str):
            return {"type": kind}
        return {"type": "array", "items": {"type": kind[0]}}

    return [{"name": name, "required": True} | describe(kind) for name, kind in kinds.items()]


def has_uncertainty(retriever: Retriever) -> bool:
    """Return True if query vectors come with an uncertainty."""
    if retriever.calibration is None or retriever.encoder is not None:
        return False
    return retriever.calibration.calibration_queries.uncertainty is not None


def answer_table(retriever: Retriever, table: DataFrame, params: Mapping[str, Any]) -> DataFrame:
    """Return the answer of `Retriever.retrieve` to each row of a table, by some `PARAMETERS`.

    Both tables have the columns of `build_signature`; an `image` is the bytes of a file.
    """
    from pandas import DataFrame

    options = {name: value for name, (_, value) in PARAMETERS.items()} | dict(params)
    if retriever.encoder is not None:
        queries: Any = table[IMAGE].tolist()
    else:
        lengths = sorted({len(vector) for vector in table[VECTOR]})
        if len(lengths) > 1:
            raise InvalidData(f"vectors of {lengths} numbers: pass vectors of the same length")
        queries = np.array(table[VECTOR].tolist(), np.float64)
        if has_uncertainty(retriever):
            options["uncertainty"] = table[UNCERTAINTY].to_numpy(np.float64)
    answers = retriever.retrieve(queries, **options)
    rows = [
        answer.own_values() | {"guarantee": str(answer.guarantee)}
        for answer in (answers if isinstance(answers, list) else [answers])
    ]
    return DataFrame(
        rows, columns=[column["name"] for column in build_signature(retriever)["outputs"]]
    )


def list_requirements(retriever: Retriever) -> list[str]:
    """Return the requirements of a retriever and its classes, in the versions installed here."""
    kinds = [IndexConfig.of(retriever.index).kind]
    # The model is loaded elsewhere, perhaps without a GPU; "train" brings MLflow.
    extras = {"gpu" if kinds == ["gpu"] else "cpu", "train"}
    if retriever.encoder is not None:
        config = retriever.encoder.config
        kinds.append(config.method)
        library = config.backbone.partition(":")[0]
        if ":" in config.backbone and library in EXTRAS:
            extras.add(EXTRAS[library])
    lines = [f"rcir[{','.join(sorted(extras))}]=={version('rcir')}"]
    modules = {re.split("[.:]", name)[0] for name in kinds if ":" in name}
    if modules:
        packages = packages_distributions()  # reads the metadata of every package
        foreign = {package for module in modules for package in packages.get(module, [])} - {"rcir"}
        lines += [f"{package}=={version(package)}" for package in sorted(foreign)]
    return lines


def write_card(retriever: Retriever, results: Mapping[str, Any]) -> str:
    """Return the card of a calibrated retriever with the results of its evaluation."""
    calibration = retriever.require_calibration()
    rule, source = calibration.miss_rule, retriever.searcher.options.model or "unknown origin"
    embedded = f"vectors of {printable(source)}"
    if retriever.encoder is not None:
        config = retriever.encoder.config
        embedded = f"an encoder of method {config.method} on {config.backbone}"
    try:
        rows: list[Mapping[str, Any]] = results["rows"]
        n_calibration = results["n_calibration"]
        lines = [
            "# Retriever with a guarantee",
            "",
            f"Searches {len(retriever.ids)} gallery items by {embedded}, {retriever.depth} deep. "
            f"Measured on {printable(str(results['dataset']))}.",
            "",
            *_guarantee(retriever, rows, results["chosen_among"]),
            "",
            f"Measured on {results['n_test']} test queries that neither fitted nor calibrated it:",
            CARD_HEAD,
            *map(_row, rows),
            "",
        ]
        cluster, queries = results["cluster"], str(n_calibration)
        if cluster is not None:
            queries += f", of {results['n_clusters']} clusters ({printable(str(cluster))})"
        facts = {
            "calibration queries": queries,
            "uncertainty of queries": results["uncertainty"],
            "bound": rule.bound,
            "recall at 1": _number(results["quality"].get("recall_at_1")),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidData(
            f"the results come from another version of rcir ({error!r}): calibrate again"
        ) from error
    if n_calibration != len(rule.evidence):
        raise InvalidData(
            f"the results have {n_calibration} calibration queries, the retriever "
            f"{len(rule.evidence)}: calibrate again"
        )
    facts |= {
        f"fingerprint of {part}": f"`{digest[:FINGERPRINT_LENGTH]}`"
        for part, digest in calibration.fingerprints.items()
    }
    facts["version of rcir"] = version("rcir")
    if run := retriever.origin.get("run"):
        facts["training"] = f"MLflow run `{run}`"
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    return "\n".join([*lines, LIMITS])


def require_measured(
    retriever: Retriever, measured: RunResults, results: Mapping[str, Any]
) -> None:
    """Raise `InvalidData` unless the results are those of this retriever."""
    scores = retriever.require_calibration().miss_rule.evidence.match_score
    same = all(np.array_equal(part.scores, scores) for part in measured.parts)
    if not measured.parts:  # queries in clusters have levels only
        rows = results.get("rows", [])
        same = [_threshold(retriever, row) for row in rows] == [row["threshold"] for row in rows]
    if not same:
        raise InvalidData("the retriever has changed since it was measured: calibrate again")


def _threshold(retriever: Retriever, row: Mapping[str, Any]) -> float | None:
    """Return the threshold at the level of a row before any choice; None if not certified."""
    try:
        calibration = retriever.require_calibration()
        request = make_request(row["alpha"], row["delta"], **calibration.required_options)
        return calibration.miss_rule.guarantee(request).threshold
    except RiskUnattainable:
        return None


def _guarantee(
    retriever: Retriever, rows: list[Mapping[str, Any]], measured_among: int
) -> list[str]:
    """Return the sentence of the first certified level, and the effect of a choice on it.

    The rows are of levels whose delta was divided by `measured_among`.
    """
    calibration = retriever.require_calibration()
    required, lines = calibration.required_options, []
    for row in rows:
        with suppress(RiskUnattainable):
            request = make_request(row["alpha"], measured_among * row["delta"], **required)
            lines = [f"> {calibration.guarantee(request)}"]
            break
    if calibration.chosen_among > measured_among:
        lines += [
            "",
            f"It answers at delta / {calibration.chosen_among}; it was measured at delta"
            + (f" / {measured_among}." if measured_among > 1 else "."),
        ]
    return lines or ["None of the requested levels is certified."]


def _row(row: Mapping[str, Any]) -> str:
    values = [f"{row['alpha']:g}", f"{row['delta']:g}", _number(row["mean_size"])]
    values += [_number(row["constant_size"]), _number(row["test_risk"])]
    values.append(f"{_number(row['risk_low'])} to {_number(row['risk_high'])}")
    if row["threshold"] is None:
        values[2], values[5] = "not certified", "-"
    return f"| {' | '.join([*values, row['score_function']])} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def log_calibration(
    run: tracking.TrackedRun, output: Path, retriever: Retriever, example: dict[str, Any]
) -> str:
    """Log the calibration in a folder, its metrics and test queries as a model of an MLflow run.

    `example` is a row of queries, see `make_image_example` and `make_vector_example`. Return the
    id of the model, which has the name of the folder.
    """
    from rcir.runs.folder import run_title  # imports torch

    results = read_results(output)
    text = write_card(retriever, results)
    run.log_tags({tracking.NOTE_TAG: text})  # the description on MLflow's page
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / CARD_FILE
        file.write_text(text)
        model = tracking.log_model(
            run,
            run_title(output),
            code=MODEL_CODE,
            folder=current_version(place_of(output) / RETRIEVER),
            files=[file, output / RESULTS, output / TEST],
            signature=build_signature(retriever),
            example=example,
            requirements=list_requirements(retriever),
        )
    # MLflow's page has columns for each name and digest: files of vectors share a name.
    name = retriever.origin.get("data", {}).get("name", "queries")
    digest = RunResults.read(output / TEST).queries[:DIGEST_LENGTH]
    metrics, now = headline_metrics(results["rows"], results["quality"]), time.time()
    points = ((metric, 0, value, now) for metric, value in metrics.items())
    run.log_points(points, of=(model, name, digest))
    return model


def read_results(folder: Path) -> dict[str, Any]:
    """Read the results of an evaluation from its folder; `InvalidData` if there are none."""
    try:
        results: dict[str, Any] = json.loads((folder / RESULTS).read_text())
    except (OSError, ValueError) as error:
        raise InvalidData(
            f"{folder} contains no results of a calibration ({error}): pass the folder that "
            "`rcir calibrate` or `rcir certify` wrote to"
        ) from error
    return results


def make_image_example(image: ImageLike) -> dict[str, Any]:
    """Return an image as a row of queries: the bytes of its file, or of a PNG file of pixels."""
    if isinstance(image, str | os.PathLike):
        return {IMAGE: Path(image).read_bytes()}
    if isinstance(image, bytes):
        return {IMAGE: image}
    return {IMAGE: encode(image)[0]}


def make_vector_example(retriever: Retriever) -> dict[str, Any]:
    """Return the first calibration query of a retriever of vectors as a row of queries."""
    queries = retriever.require_calibration().calibration_queries
    row: dict[str, Any] = {VECTOR: queries.vectors[0].astype(float).tolist()}
    if queries.uncertainty is not None:
        row[UNCERTAINTY] = float(queries.uncertainty[0])
    return row


@working("registering", logged=True)
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
    """The folder and content of a calibration, and what MLflow has of it."""

    folder: Path
    retriever: Retriever
    results: Mapping[str, Any]
    run: tracking.TrackedRun | None
    model: str | None  # the id of the model that contains this retriever


@contextmanager
def _open(reference: str) -> Iterator[_Calibration]:
    """Open the calibration in a folder, or that of an MLflow run if there is no such folder."""
    if Path(reference).is_dir():
        folder = Path(reference)
        retriever, results = _read(folder, reference)
        run = tracking.find_tracked_run(retriever.origin.get("calibration", ""))
        model = tracking.find_model(run) if run else None
        if run is not None and model is not None:
            manifest = f"runs:/{run.id}/retriever/{tracking.INSIDE}/{MANIFEST}"
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
    """Return the MLflow run and model of a calibration, and log whichever is missing."""
    run, model = calibration.run, calibration.model
    if run is not None and model is not None:
        return run, model
    folder, retriever = calibration.folder, calibration.retriever
    pictures = ItemPictures(retriever.origin)
    if retriever.encoder is None:
        example = make_vector_example(retriever)
    elif PICTURES in retriever.origin:
        example = make_image_example(pictures.picture(retriever.ids[0]))
    else:
        example = make_image_example(pictures.data_set().test.images[0])
    if run is not None:
        return run, log_calibration(run, folder, retriever, example)
    from rcir.runs.folder import FOLDER_TAG, run_title  # imports torch

    tags = {FOLDER_TAG: str(folder.absolute()), tracking.KIND_TAG: "registration"}
    run = tracking.start_run(f"{run_title(folder)} (registration)", tags)
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
