"""The report of an evaluation: one HTML file that holds every figure and works offline."""

from __future__ import annotations

import base64
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from calibration import summary
from calibration.evaluation import Evaluation
from calibration.resampling import Resampling
from rcir.printable import printable
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES

# What a number of `Quality.numbers` is; those not named here are named by their own names.
NUMBER_TITLES = {
    "recall_at_1_pixels": "R@1 of principal components of pixels",
    "map": "mean average precision, whole ranking (micro)",
    "map_macro": "mean average precision, whole ranking, mean of classes (macro)",
    "map_at_r": "MAP@R",
    "map_cleaned_20": "mean average precision without the 20% most uncertain gallery images",
    "map_cleaned_20_random": "mean average precision without a random 20% of them",
    "unmatched_cleaned_20": "queries whose only matches were among the 20%, which are left out",
    "outside_range": "share of test uncertainties outside the range of the tuning split",
    "auroc_miss": "AUROC of a wrong first image",
    **{
        f"auroc_miss_{name}": f"AUROC of a wrong first image by {kind.title}"
        for name, kind in QUERY_UNCERTAINTIES.items()
    },
    "auroc_occlusion": "AUROC of an occluded query",
    "ausc": "AUSC (query and first image)",
    "ausc_query_only": "AUSC (query alone)",
    "ausc_oracle": "AUSC of an oracle",
    "ausc_random": "AUSC of a random order",
    "pearson_average_precision": "Pearson: uncertainty and average precision",
    "pearson_percentiles": "Pearson, over percentiles of uncertainty",
    "knn_accuracy": "accuracy of 5 neighbours' vote, among the test queries",
    "knn_accuracy_gallery": "accuracy of 5 neighbours' vote, in the gallery",
    "kendall_knn": "Kendall: certainty and 5-neighbour accuracy, 20 bins",
    "verification_ap": "average precision of distinguishing matching pairs",
    "kendall_verification": "Kendall: certainty and pairs, 20 bins",
    "ood_auroc": "AUROC out of distribution",
    "ood_auprc": "AUPRC out of distribution",
    "ood_auprc_trapezoid": "AUPRC out of distribution, trapezoids",
}


def render(evaluation: Evaluation, drawn: dict[str, str]) -> str:
    """Return the HTML of an evaluation with every figure (SVG, by name) inside it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["printable"] = printable
    pictures = {name: _data_uri(svg) for name, svg in drawn.items()}
    numbers = {
        _title(name): value
        for name, value in evaluation.quality.numbers.items()
        if not name.startswith("ece")
    }
    delta, resampling = evaluation.rows[0].delta, evaluation.resampling
    n_splits, expected, caption = 0, "", {"size": "", "risk": ""}
    if resampling is not None:
        n_splits = len(next(iter(resampling.rules.values())).risk)
        expected = f"{100 * resampling.expected:.0f}%"
        caption = _captions(resampling, delta)
    return environment.get_template("report.html").render(
        evaluation=evaluation,
        summary=summary,
        titles={
            name: f"{name}: {kind.title}" if name != "encoder" else "the encoder's uncertainty"
            for name, kind in QUERY_UNCERTAINTIES.items()
        },
        delta=delta,
        figures=pictures,
        labelled=any("labels" in row.guarantee for row in evaluation.others),
        numbers=numbers,
        errors=_errors(evaluation.quality.numbers),
        splits=resampling.summary([row.alpha for row in evaluation.rows]) if resampling else {},
        n_splits=n_splits,
        expected=expected,
        size_caption=caption["size"],
        risk_caption=caption["risk"],
    )


def _captions(resampling: Resampling, delta: float) -> dict[str, str]:
    """Captions of the figures of risk and size over random splits."""
    n_splits = len(next(iter(resampling.rules.values())).risk)
    expected = f"{100 * resampling.expected:.0f}%"
    return {
        "size": (
            f"Mean set size over {n_splits} random splits into calibration and test queries. All "
            "rules take the same images in the same order, and all but the uncontrolled sizes are "
            "certified."
        ),
        "risk": (
            f"Measured risk over {n_splits} random splits. Sizes without any slack exceed alpha in "
            f"about {expected} of them: delta = {delta:g} allows {100 * delta:g}%, and the noise "
            f"of {resampling.n_test} test queries adds to it. If the red line is above the "
            f"diagonal, more than {expected} of the splits exceeded alpha; all share one set of "
            "queries, which may be an unlucky one."
        ),
    }


def _title(name: str) -> str:
    for start, title in (("recall_at_", "R@"), ("map_at_", "mAP@")):
        if name.startswith(start) and name[len(start) :].isdigit():
            return title + name[len(start) :]
    return NUMBER_TITLES.get(name, name.replace("_", " "))


def _errors(numbers: dict[str, float]) -> dict[str, dict[str, float]]:
    """Expected calibration errors by flavour, then by k."""
    table: dict[str, dict[str, float]] = {}
    for name, value in numbers.items():
        if name.startswith("ece_"):
            flavour, k = name.removeprefix("ece_").split("_at_")
            table.setdefault(flavour.replace("_", ", "), {})[k] = value
    return table


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
