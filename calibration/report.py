"""The report of an evaluation: figures, and one page that holds them and works offline."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from matplotlib.figure import Figure

from calibration.evaluation import Evaluation, measure
from rcir import figures
from rcir.candidates import Judged
from rcir.data import Splits, read_image
from rcir.retrieval import confidence
from rcir.risk import Request, RiskController

CURVE = np.round(np.arange(0.02, 0.401, 0.02), 2)
SHOWN = 4
COLUMNS = 8


def draw(
    controller: RiskController, evaluation: Evaluation, test: Judged, splits: Splits, delta: float
) -> dict[str, Figure]:
    """All figures by name, in the order in which the page shows them."""
    name = controller.adapter.name
    rows = [measure(controller, Request(float(alpha), delta), test) for alpha in CURVE]
    risk = np.array([_or_nan(row.test_risk) for row in rows])
    size = np.array([_or_nan(row.mean_size) for row in rows])
    constant_size = np.array([_or_nan(row.constant_size) for row in rows])
    drawn = {
        "risk": figures.risk_curve(CURVE, {f"{name} sizes": risk}, evaluation.n_test),
        "size": figures.size_curve(CURVE, {f"{name} sizes": size, "constant size": constant_size}),
        "reliability": figures.reliability_diagram(evaluation.reliability),
    }
    certified = [row for row in evaluation.rows if row.kappa is not None]
    if certified:
        row = min(certified, key=lambda row: abs(row.alpha - 0.1))
        sizes = controller.adapter.sizes(test.found.rankings, float(row.kappa or 0))
        drawn["sizes"] = figures.size_distribution(sizes, row.alpha, row.delta)
        order = np.argsort(test.found.uncertainty, kind="stable")
        for title, chosen in (("most_certain", order[:SHOWN]), ("least_certain", order[-SHOWN:])):
            sets = [query_set(test, splits, int(query), int(sizes[query])) for query in chosen]
            drawn[title] = figures.query_sets(sets, COLUMNS)
    return drawn


def query_set(test: Judged, splits: Splits, query: int, size: int) -> figures.QuerySet:
    """A test query with the set it gets, for drawing."""
    uncertainty = test.found.uncertainty[query]
    return figures.QuerySet(
        read_image(splits.test.images[query], channels=3),
        f"query: {splits.test.labels[query]}\nu = {uncertainty:.2g}, size {size}",
        [
            read_image(splits.gallery.images[position], channels=3)
            for position in test.found.positions[query, : min(size, COLUMNS)]
        ],
        test.relevant[query, :size].tolist(),
    )


def render(evaluation: Evaluation, drawn: dict[str, Figure]) -> str:
    """The page, with every figure inside it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
    )
    pictures = {name: _data_uri(figure) for name, figure in drawn.items()}
    return environment.get_template("report.html").render(
        evaluation=evaluation,
        delta=evaluation.rows[0].delta,
        confidence=confidence(evaluation.rows[0].delta),
        figures=pictures,
    )


def _data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else float(value)
