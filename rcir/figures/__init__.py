"""Figures from arrays. They open no window and know nothing of where they end up."""

from rcir.figures.plots import (
    BLUE,
    GREEN,
    RED,
    QuerySet,
    draw_in_and_out,
    draw_probabilities,
    draw_projection,
    draw_query_sets,
    draw_reliability,
    draw_risk_curve,
    draw_size_curve,
    draw_size_distributions,
    draw_sparsification,
    project,
    to_svg,
)

__all__ = [
    "BLUE",
    "GREEN",
    "RED",
    "QuerySet",
    "draw_in_and_out",
    "draw_probabilities",
    "draw_projection",
    "draw_query_sets",
    "draw_reliability",
    "draw_risk_curve",
    "draw_size_curve",
    "draw_size_distributions",
    "draw_sparsification",
    "project",
    "to_svg",
]
