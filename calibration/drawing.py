"""The figures of an evaluation."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from calibration.evaluation import Evaluation
from rcir import figures
from rcir.data import ImageSet
from rcir.levels import ALPHA
from rcir.printable import printable
from rcir.retrieval.retriever import Retriever
from rcir.risk import LabelledResults
from rcir.risk.results import set_sizes

SHOWN_QUERIES = 4
SET_COLUMNS = 8
PROJECTED = 600


def draw_figures(
    retriever: Retriever,
    evaluation: Evaluation,
    test: LabelledResults,
    images: ImageSet,
    gallery: ImageSet,
) -> dict[str, Figure]:
    """All figures by name, in the order in which the page shows them.

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
    resampling = evaluation.resampling
    score_function = retriever.require_calibration().main.score_function
    drawn = {}
    if resampling is not None:
        named = {
            name if name == "constant" else f"{name} sizes": rule.mean
            for name, rule in resampling.rules.items()
        }
        named["one size for all"] = named.pop("constant")
        drawn = {
            "size": figures.size_spread(resampling.alphas, named),
            "risk": figures.risk_spread(
                resampling.alphas,
                resampling.rules[score_function.name].risk,
                resampling.expected,
            ),
            "delta": figures.delta_sweep(
                resampling.deltas,
                resampling.by_delta.risk,
                resampling.by_delta.mean,
                resampling.alpha,
                resampling.expected_at(resampling.deltas),
            ),
        }
    sizes = {
        f"alpha = {row.alpha:g}": score_function.sizes(test.results, float(row.threshold or 0))
        for row in evaluation.certified
    }
    return drawn | ({"sizes": figures.size_distributions(sizes)} if sizes else {})


def _of_uncertainty(
    evaluation: Evaluation, test: LabelledResults, images: ImageSet
) -> dict[str, Figure]:
    quality = evaluation.quality
    sparse = quality.sparsification
    width = {
        name.replace("btl_width_at_", "mAP@"): curve
        for name, curve in quality.curves.items()
        if name.startswith("btl_width")
    }
    drawn = {
        "reliability": figures.reliability_diagram(quality.reliability),
        "calibration": figures.calibration_curves(
            {name: (curve.confidence, curve.accuracy) for name, curve in width.items()},
            {name: curve.error for name, curve in width.items()},
            "average precision",
        ),
        "sparsification": figures.sparsification_curves(
            sparse.fractions,
            {
                evaluation.encoder: sparse.curve,
                "oracle": sparse.oracle_curve,
                "random": np.full(len(sparse.fractions), sparse.random),
            },
        ),
    }
    if quality.cleaning is not None:
        cleaning = quality.cleaning
        drawn["cleaning"] = figures.sparsification_curves(
            cleaning.fractions,
            {evaluation.encoder: cleaning.cleaned, "random": cleaning.random.mean(axis=1)},
            "mean average precision",
            "gallery images",
        )
    if quality.outside is not None:
        drawn["outside"] = figures.in_and_out(test.results.uncertainty, quality.outside)
    n, dim = test.results.require("vectors").shape
    if n >= 4 and dim >= 2:
        points, rows = figures.project(test.results.require("vectors"), limit=PROJECTED)
        classes = images.attributes.get("class", images.labels)
        drawn["projection"] = figures.projection(
            points, None if classes is None else classes[rows], test.results.uncertainty[rows]
        )
    return drawn


def _of_queries(
    retriever: Retriever,
    evaluation: Evaluation,
    test: LabelledResults,
    images: ImageSet,
    gallery: ImageSet,
) -> dict[str, Figure]:
    """The most and the least certain queries with their sets, at the level nearest to `ALPHA`."""
    if not evaluation.certified or not images.pictures:
        return {}
    from rcir.data import read_image

    row = min(evaluation.certified, key=lambda row: abs(row.alpha - ALPHA))
    ranking = retriever.require_calibration().main.score_function.rank(test.results)
    sizes = set_sizes(ranking.scores, float(row.threshold or 0))
    positions, relevant = (
        ranking.take(test.results.require("positions")),
        ranking.take(test.relevant),
    )
    order = np.argsort(test.results.uncertainty, kind="stable")
    drawn = {}
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
            shown = [gallery.images[item] for item in positions[query, : min(size, SET_COLUMNS)]]
            sets.append(
                figures.QuerySet(
                    read_image(images.images[query], channels=3),
                    title_of_set,
                    [read_image(image, channels=3) for image in shown],
                    relevant[query, :size].tolist(),
                )
            )
        drawn[title] = figures.query_sets(sets, SET_COLUMNS)
    return drawn
