"""The card of a retriever: what was measured of it, and what it promises, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from rcir.errors import InvalidData, RiskUnattainable
from rcir.printable import printable
from rcir.retrieval.retriever import Retriever
from rcir.risk import GuaranteeRequest
from rcir.runs.results import RunResults

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
        facts = {
            "calibration queries": _counted(results),
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
    made = f"vectors of {printable(retriever.searcher.options.model or 'unknown origin')}"
    if retriever.encoder is not None:
        config = retriever.encoder.config
        made = f"an encoder of method {config.method} on {config.backbone}"
    return f"Searches {len(retriever.ids)} gallery items by {made}, {retriever.depth} deep."


def _promise(retriever: Retriever, rows: list[Mapping[str, Any]]) -> list[str]:
    """The sentence at the first level that is certified, and what a choice makes of the rows."""
    lines = []
    for row in rows:
        request = GuaranteeRequest(row["alpha"], row["delta"])
        try:
            guarantee = retriever.require_calibration().guarantee(request)
        except RiskUnattainable:
            continue
        lines = [f"> {guarantee}"]
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


def _counted(results: Mapping[str, Any]) -> str:
    count = str(results["n_calibration"])
    if results["cluster"] is not None:
        count += f", of {results['n_clusters']} clusters ({printable(str(results['cluster']))})"
    return count
