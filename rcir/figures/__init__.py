"""Figures from arrays. They open no window and know nothing of where they end up."""

from rcir.figures.axes import AMBER, BLUE, DARK, GREEN, GREY, PURPLE, RED, to_svg
from rcir.figures.curves import (
    in_and_out,
    reliability_diagram,
    risk_curve,
    size_curve,
    size_distributions,
    sparsification_curves,
)
from rcir.figures.pictures import QuerySet, project, projection, query_sets

__all__ = [
    "AMBER",
    "BLUE",
    "DARK",
    "GREEN",
    "GREY",
    "PURPLE",
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
