"""The page of an evaluation: its figures, and the HTML that shows them."""

from __future__ import annotations

import base64
from dataclasses import astuple
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from matplotlib.figure import Figure

from calibration import screen
from calibration.evaluation import Evaluation
from rcir import figures
from rcir.data import ImageSet
from rcir.errors import printable
from rcir.retrieval.query_uncertainty import QUERY_UNCERTAINTIES
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults
from rcir.risk.results import set_sizes

SHOWN_QUERIES = 4
SET_COLUMNS = 8
PROJECTED = 600
# What a number of `Quality.numbers` is; those not named here are named by their own names.
NUMBER_TITLES = {
    "recall_at_1_pixels": "R@1 of principal components of pixels",
    "map": "mean average precision, whole ranking (micro)",
    "map_macro": "mean average precision, whole ranking, mean of classes (macro)",
    "map_at_r": "MAP@R",
    "ece": "expected calibration error of R@1, 10 bins",
    "outside_range": "share of test uncertainties outside the range of the tuning split",
    "auroc_miss": "AUROC of a wrong first image",
    **{
        f"auroc_miss_{name}": f"AUROC of a wrong first image by {kind.title}"
        for name, kind in QUERY_UNCERTAINTIES.items()
    },
    "auroc_occlusion": "AUROC of an occluded query",
    "ausc": "AUSC (query and first image)",
    "ausc_oracle": "AUSC of an oracle",
    "ausc_random": "AUSC of a random order",
    "pearson_average_precision": "Pearson: uncertainty and average precision",
    "ood_auroc": "AUROC out of distribution",
    "ood_auprc": "AUPRC out of distribution",
}


def draw_figures(
    retriever: Retriever,
    evaluation: Evaluation,
    test: LabelledResults,
    images: ImageSet,
    gallery: ImageSet,
) -> dict[str, Figure]:
    """Draw all figures, by name, in the order in which the page shows them.

    Args:
        retriever, evaluation: what was measured.
        test: what was found for the test queries.
        images, gallery: the pictures of test queries and gallery.
    """
    return (
        _of_sizes(retriever, evaluation, test)
        | _of_uncertainty(evaluation, test, images)
        | _of_queries(retriever, evaluation, test, images, gallery)
    )


def _of_sizes(
    retriever: Retriever, evaluation: Evaluation, test: LabelledResults
) -> dict[str, Figure]:
    score_function = retriever.require_calibration().main.score_function
    figures_by_name = {}
    if evaluation.curve:
        alphas, risk, lows, highs, constant = (
            np.array([getattr(row, name) for row in evaluation.curve], np.float64)
            for name in ("alpha", "test_risk", "risk_low", "risk_high", "constant_size")
        )
        sizes = [astuple(size) for size in evaluation.curve_sizes]
        size, low, high = np.array(sizes, np.float64).T
        figures_by_name = {
            "size": figures.size_curve(alphas, size, low, high, constant),
            "risk": figures.risk_curve(alphas, risk, lows, highs),
        }
    sets = {
        f"alpha = {row.alpha:g}": score_function.sizes(test.results, float(row.threshold or 0))
        for row in evaluation.certified
    }
    return figures_by_name | ({"sizes": figures.size_distributions(sets)} if sets else {})


def _of_uncertainty(
    evaluation: Evaluation, test: LabelledResults, images: ImageSet
) -> dict[str, Figure]:
    quality = evaluation.quality
    sparse = quality.sparsification
    figures_by_name = {
        "reliability": figures.reliability_diagram(quality.reliability),
        "sparsification": figures.sparsification_curves(
            sparse.fractions,
            {
                evaluation.encoder: sparse.curve,
                "oracle": sparse.oracle_curve,
                "random": np.full(len(sparse.fractions), sparse.random),
            },
        ),
    }
    if quality.outside is not None:
        figures_by_name["outside"] = figures.in_and_out(test.results.uncertainty, quality.outside)
    n, dim = test.results.require("vectors").shape
    if n >= 4 and dim >= 2:
        points, rows = figures.project(test.results.require("vectors"), limit=PROJECTED)
        classes = images.attributes.get("class", images.labels)
        figures_by_name["projection"] = figures.projection(
            points, None if classes is None else classes[rows], test.results.uncertainty[rows]
        )
    return figures_by_name


def _of_queries(
    retriever: Retriever,
    evaluation: Evaluation,
    test: LabelledResults,
    images: ImageSet,
    gallery: ImageSet,
) -> dict[str, Figure]:
    """The most and the least certain queries with their sets, at the level nearest to `ALPHA`."""
    row = evaluation.headline
    if row is None or not images.pictures:
        return {}
    from rcir.data import read_image

    ranking = retriever.require_calibration().main.score_function.rank(test.results)
    sizes = set_sizes(ranking.scores, float(row.threshold or 0))
    positions = ranking.take(test.results.require("positions"))
    relevant = ranking.take(test.relevant)
    order = np.argsort(test.results.uncertainty, kind="stable")
    figures_by_name = {}
    for title, chosen in (
        ("most_certain", order[:SHOWN_QUERIES]),
        ("least_certain", order[-SHOWN_QUERIES:]),
    ):
        sets = []
        for query, size in zip(chosen.tolist(), sizes[chosen].tolist(), strict=True):
            names = images.attributes.get("class", images.labels)
            name = images.ids[query] if names is None else names[query]
            title_of_set = (
                f"query: {printable(name)}\nu = {test.results.uncertainty[query]:.2g}, size {size}"
            )
            items = [gallery.images[item] for item in positions[query, : min(size, SET_COLUMNS)]]
            sets.append(
                figures.QuerySet(
                    read_image(images.images[query], channels=3),
                    title_of_set,
                    [read_image(image, channels=3) for image in items],
                    relevant[query, :size].tolist(),
                )
            )
        figures_by_name[title] = figures.query_sets(sets, SET_COLUMNS)
    return figures_by_name


def render(evaluation: Evaluation, figures_by_name: dict[str, str]) -> str:
    """Return the HTML of an evaluation with every figure (SVG, by name) inside it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["printable"] = printable
    pictures = {
        name: "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
        for name, svg in figures_by_name.items()
    }
    numbers = {_title(name): value for name, value in evaluation.quality.numbers.items()}
    return environment.get_template("report.html").render(
        evaluation=evaluation,
        summary=screen,
        titles={
            name: f"{name}: {kind.title}" if name != "encoder" else "the encoder's uncertainty"
            for name, kind in QUERY_UNCERTAINTIES.items()
        },
        delta=evaluation.rows[0].delta,
        figures=pictures,
        labelled=any("labels" in row.guarantee for row in evaluation.others),
        numbers=numbers,
    )


def _title(name: str) -> str:
    for start, title in (("recall_at_", "R@"), ("map_at_", "mAP@")):
        if name.startswith(start) and name[len(start) :].isdigit():
            return title + name[len(start) :]
    return NUMBER_TITLES.get(name, name.replace("_", " "))
