"""A retriever as a model of MLflow: its signature, what it answers to tables, and its files."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rcir import tracking
from rcir.errors import DataUnavailable, InvalidData, RiskUnattainable, printable
from rcir.imports import EXTRAS
from rcir.index import IndexConfig
from rcir.retrieval import storage
from rcir.retrieval.retriever import Retriever
from rcir.risk import GuaranteeRequest
from rcir.risk.request import request_options
from rcir.runs.folder import RETRIEVER
from rcir.runs.results import RESULTS, TEST, RunResults

if TYPE_CHECKING:
    from pandas import DataFrame

    from rcir.data.images import ImageLike


IMAGE, VECTOR, UNCERTAINTY = "image", "vector", "uncertainty"
TYPES = {bool: "boolean", int: "long", float: "double", str: "string"}  # as MLflow names them
# Type and default of each option of a request.
PARAMETERS: Mapping[str, tuple[str, Any]] = {
    one.name: (TYPES[one.kind], one.default) for one in request_options()
}


def signature(retriever: Retriever) -> dict[str, list[dict[str, Any]]]:
    """The columns of queries ("inputs") and answers ("outputs"), and the parameters ("params").

    Queries are an `image` each or, without an encoder, a `vector`, with its `uncertainty` where
    those that calibrated had theirs.

    Example:
        >>> import rcir
        >>> retriever = rcir.Retriever.from_embeddings(np.eye(4))
        >>> [column["name"] for column in signature(retriever)["inputs"]]
        ['vector']
    """
    if retriever.encoder is not None:
        inputs = [_column(IMAGE, "binary")]
    else:
        inputs = [_list_column(VECTOR, "double")]
        if asks_uncertainty(retriever):
            inputs.append(_column(UNCERTAINTY, "double"))
    has_labels = retriever.labels is not None
    outputs = [
        _list_column("ids", "string"),
        _list_column("labels", "string" if retriever.label_names else "long"),
        _list_column("distances", "double"),
        _column("size", "long"),
        _column("abstained", "boolean"),
        _column("label_calibrated", "boolean"),
        _column(UNCERTAINTY, "double"),
        _column("guarantee", "string"),
    ]
    outputs = [
        one for one in outputs if has_labels or one["name"] not in ("labels", "label_calibrated")
    ]
    params = [
        {"name": name, "type": kind, "default": value, "shape": None}
        for name, (kind, value) in PARAMETERS.items()
    ]
    return {"inputs": inputs, "outputs": outputs, "params": params}


def asks_uncertainty(retriever: Retriever) -> bool:
    """Return whether vectors are queried with an uncertainty of their own."""
    if retriever.calibration is None or retriever.encoder is not None:
        return False
    return retriever.calibration.calibration_queries.uncertainty is not None


def answers(retriever: Retriever, table: DataFrame, params: Mapping[str, Any]) -> DataFrame:
    """The answer to each row of a table, as `Retriever.retrieve` gives it.

    Args:
        retriever: calibrated.
        table: with the columns of `signature`; an `image` is the bytes of a file.
        params: some of `PARAMETERS`; the others have their values from there.

    Returns:
        A row for each query: ids, labels (if items have them), distances, size, abstained,
        label_calibrated (if items have labels), uncertainty of the query, and the sentence of the
        guarantee.

    Raises:
        InvalidData: the vectors are not of one length.
        RcirError: as `Retriever.retrieve` does.
    """
    from pandas import DataFrame

    options = {name: value for name, (_, value) in PARAMETERS.items()} | dict(params)
    alpha, delta = options.pop("alpha"), options.pop("delta")
    if retriever.encoder is not None:
        results = retriever.retrieve(table[IMAGE].tolist(), alpha, delta, **options)
    else:
        lengths = sorted({len(vector) for vector in table[VECTOR]})
        if len(lengths) > 1:
            raise InvalidData(f"vectors of {lengths} numbers: give all queries the same length")
        vectors: Any = np.array(table[VECTOR].tolist(), np.float64)
        if asks_uncertainty(retriever):
            options["uncertainty"] = table[UNCERTAINTY].to_numpy(np.float64)
        results = retriever.retrieve(vectors, alpha, delta, **options)
    rows = [
        {
            "ids": list(answer.ids),
            "labels": None if answer.labels is None else list(answer.labels),
            "distances": [float(distance) for distance in answer.distances],
            "size": answer.size,
            "abstained": answer.abstained,
            "label_calibrated": answer.label_calibrated,
            UNCERTAINTY: float(answer.uncertainty),
            "guarantee": str(answer.guarantee),
        }
        for answer in results
    ]
    return DataFrame(rows, columns=[column["name"] for column in signature(retriever)["outputs"]])


def _column(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "required": True}


def _list_column(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "type": "array", "items": {"type": kind}, "required": True}


def requirements(retriever: Retriever) -> list[str]:
    """Requirements of a retriever, each of the version that is installed here.

    Classes of one's own that it names, "package.module:Class", are required as the package that
    they are installed with; of one that is in none, nothing can be required.

    Example:
        >>> import numpy as np
        >>> requirements(Retriever.from_embeddings(np.eye(4)))[0].partition("==")[0]
        'rcir[cpu,train]'
    """
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
        places = packages_distributions()
        own = {package for module in modules for package in places.get(module, [])} - {"rcir"}
        lines += [f"{package}=={version(package)}" for package in sorted(own)]
    return lines


VOIDS = (
    "queries of labels that none of the calibration queries had",
    "queries unlike the calibration queries: another camera, season or users",
    "queries that depend on each other, or that are pictures of the gallery",
    "a level chosen after looking, unless it is asked with `simultaneous`",
    "keeping this retriever for its results on its calibration queries, unless it was marked by "
    "`rcir compare --choose`",
)
DIGITS = 12  # of fingerprints


def card(retriever: Retriever, results: Mapping[str, Any]) -> str:
    """The card of a retriever.

    Args:
        retriever: calibrated.
        results: what its evaluation wrote, `results.json`.

    Raises:
        InvalidData: `results` are not of an evaluation, or of another calibration.
    """
    rule = retriever.require_calibration().main
    try:
        rows: list[Mapping[str, Any]] = results["rows"]
        n_calibration, n_test = results["n_calibration"], results["n_test"]
        lines = [
            *("# Retriever with a guarantee", ""),
            f"{_searched(retriever)} Measured on {printable(str(results['dataset']))}.",
            *("", *_promise(retriever, rows), ""),
            f"Measured on {n_test} test queries, which neither fitted nor calibrated it:",
            "",
            "| alpha | delta | mean set size | one size for all | measured risk | 95% interval "
            "| score function |",
            "|---|---|---|---|---|---|---|",
            *map(_row, rows),
        ]
        counted = str(n_calibration)
        if (cluster := results["cluster"]) is not None:
            counted += f", of {results['n_clusters']} clusters ({printable(str(cluster))})"
        facts = {
            "calibration queries": counted,
            "uncertainty of queries": results["uncertainty"],
            "bound": rule.bound,
            "recall at 1": _number(results["quality"].get("recall_at_1")),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidData(
            f"the results are of another version of rcir ({error!r}): calibrate again"
        ) from error
    if n_calibration != len(rule.calibration):
        raise InvalidData(
            f"the results are of {n_calibration} calibration queries, the retriever has "
            f"{len(rule.calibration)}: calibrate again"
        )
    fingerprints = retriever.require_calibration().fingerprints.items()
    facts |= {
        f"fingerprint of {part}": f"`{digest[:DIGITS]}`"
        for part, digest in fingerprints
        if part != "uncertainty"
    }
    facts["version of rcir"] = version("rcir")
    if run := retriever.origin.get("run"):
        facts["training"] = f"MLflow run `{run}`"
    lines += ["", *(f"- {name}: {value}" for name, value in facts.items())]
    lines += ["", "What voids the guarantee:", "", *(f"- {text}" for text in VOIDS)]
    lines.append("- another encoder, preprocessing, gallery or index, which it refuses by itself")
    return "\n".join(lines) + "\n"


def require_measured(
    retriever: Retriever, measured: RunResults, results: Mapping[str, Any]
) -> None:
    """Raise `InvalidData` where what was measured is not of this retriever."""
    scores = retriever.require_calibration().main.calibration.match_score
    same = all(np.array_equal(part.scores, scores) for part in measured.parts)
    if not measured.parts:  # of queries in clusters there are levels alone
        rows = results.get("rows", [])
        same = [_threshold(retriever, row) for row in rows] == [row["threshold"] for row in rows]
    if not same:
        raise InvalidData(
            "what was measured is not of this retriever, which has changed since: calibrate again"
        )


def _threshold(retriever: Retriever, row: Mapping[str, Any]) -> float | None:
    """The threshold at the level of a row, as it was measured: before any choice; or None."""
    try:
        request = GuaranteeRequest(row["alpha"], row["delta"])
        return retriever.require_calibration().main.guarantee(request).threshold  # type: ignore[no-any-return]
    except RiskUnattainable:
        return None


def _searched(retriever: Retriever) -> str:
    origin = f"vectors of {printable(retriever.searcher.options.model or 'unknown origin')}"
    if retriever.encoder is not None:
        config = retriever.encoder.config
        origin = f"an encoder of method {config.method} on {config.backbone}"
    return f"Searches {len(retriever.ids)} gallery items by {origin}, {retriever.depth} deep."


def _promise(retriever: Retriever, rows: list[Mapping[str, Any]]) -> list[str]:
    """The sentence at the first level that is certified, and what a choice makes of the rows."""
    lines = []
    for row in rows:
        request = GuaranteeRequest(row["alpha"], row["delta"])
        with suppress(RiskUnattainable):
            lines = [f"> {retriever.require_calibration().guarantee(request)}"]
            break
    if (among := retriever.require_calibration().chosen_among) > 1:
        lines += ["", f"It answers at delta / {among}; measured was at delta."]
    return lines or ["Nothing of what was asked is certified."]


def _row(row: Mapping[str, Any]) -> str:
    values = [f"{row['alpha']:g}", f"{row['delta']:g}", _number(row["mean_size"])]
    values += [_number(row["constant_size"]), _number(row["test_risk"])]
    values.append(f"{_number(row['risk_low'])} to {_number(row['risk_high'])}")
    if row["threshold"] is None:
        values[2], values[5] = "not certified", "-"
    return f"| {' | '.join([*values, row['score_function']])} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


CARD = "README.md"
CODE = Path(__file__).with_name("model_code.py")


def log_calibration(
    run: tracking.TrackedRun, output: Path, retriever: Retriever, example: dict[str, Any]
) -> str:
    """Log what a calibration wrote as the model of an MLflow run; return the model's id.

    Args:
        run: in MLflow.
        output: folder with `retriever`, `results.json` and `test.safetensors`.
        retriever: the one in it.
        example: a row of queries, see `image_example` and `vector_example`.

    Raises:
        InvalidData: what was measured is missing, or of another retriever.
    """
    with tempfile.TemporaryDirectory() as place:
        written = Path(place) / CARD
        text = card(retriever, read_results(output))
        written.write_text(text)
        run.log_tags({tracking.NOTE_TAG: text})  # the description on MLflow's page
        parts = tracking.ModelParts(
            CODE,
            storage.current_version(output / RETRIEVER),
            [written, output / RESULTS, output / TEST],
            signature(retriever),
            example,
            requirements(retriever),
        )
        return tracking.log_model(run, parts)


def read_results(folder: Path) -> dict[str, Any]:
    """The numbers of an evaluation in a folder.

    Raises:
        InvalidData: there are none.
    """
    try:
        results: dict[str, Any] = json.loads((folder / RESULTS).read_text())
    except (OSError, ValueError) as error:
        raise InvalidData(
            f"{folder} holds no results of a calibration ({error}): give the folder that "
            "`rcir calibrate` or `rcir certify` wrote to"
        ) from error
    return results


def image_example(image: ImageLike) -> dict[str, Any]:
    """A picture as a row of queries: the bytes of its file; of pixels, those of a PNG file."""
    if isinstance(image, str | os.PathLike):
        return {IMAGE: Path(image).read_bytes()}
    if isinstance(image, bytes):
        return {IMAGE: image}
    from PIL import Image

    from rcir.data.images import read_image

    buffer = io.BytesIO()
    channels = 1 if getattr(image, "ndim", 3) == 2 else 3
    Image.fromarray(read_image(image, channels)).save(buffer, "PNG")
    return {IMAGE: buffer.getvalue()}


def vector_example(retriever: Retriever) -> dict[str, Any]:
    """The first calibration query of a retriever of vectors, as a row of queries."""
    queries = retriever.require_calibration().calibration_queries
    row: dict[str, Any] = {VECTOR: queries.vectors[0].astype(float).tolist()}
    if asks_uncertainty(retriever):
        assert queries.uncertainty is not None
        row[UNCERTAINTY] = float(queries.uncertainty[0])
    return row


def example_of(retriever: Retriever) -> dict[str, Any]:
    """A real query of a calibrated retriever: of vectors its own, else of its data set.

    Raises:
        DataUnavailable: its data set is not on this machine.
    """
    if retriever.encoder is None:
        return vector_example(retriever)
    from rcir.config import from_plain
    from rcir.data import DataConfig, load_splits

    if "data" not in retriever.origin:
        raise DataUnavailable(
            "the retriever does not say of which data set it is: calibrate it with "
            "`rcir calibrate`, which tracks its model in MLflow"
        )
    data, rejects = retriever.origin["data"], retriever.origin.get("rejects", ())
    return image_example(load_splits(from_plain(DataConfig, data), rejects=rejects).test.images[0])
