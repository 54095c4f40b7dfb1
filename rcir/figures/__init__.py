"""Figures from arrays. They open no window and know nothing of where they end up."""

from rcir.figures.pictures import QuerySet, query_sets
from rcir.figures.plots import (
    BLUE,
    GREEN,
    RED,
    in_and_out,
    project,
    projection,
    reliability_diagram,
    risk_curve,
    size_curve,
    size_distributions,
    sparsification_curves,
    to_svg,
)

__all__ = [
    "BLUE",
    "GREEN",
    "RED",
    "QuerySet",
    "in_and_out",
    "project",
    "projection",
    "query_sets",
    "reliability_diagram",
    "risk_curve",
    "size_curve",
    "size_distributions",
    "sparsification_curves",
    "to_svg",
]
