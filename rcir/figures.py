"""Figures from arrays. They open no window and know nothing of where they end up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rcir.metrics import Reliability

Floats = NDArray[np.floating[Any]]

BLUE, GREY, GREEN, RED = "#2563a8", "#8a8f98", "#1a8a4a", "#c93a3a"


@dataclass(frozen=True)
class QuerySet:
    """A query with its retrieved set, to be drawn.

    Attributes:
        query: (H, W) or (H, W, 3) uint8.
        title: said above the query.
        images: the first images of the set, nearest first.
        matches: whether each image of the whole set is a true match.
    """

    query: NDArray[np.uint8]
    title: str
    images: Sequence[NDArray[np.uint8]]
    matches: Sequence[bool]


def risk_curve(alpha: Floats, risk: Mapping[str, Floats], n_test: int) -> Figure:
    """Risk measured on test queries against alpha; the guarantee keeps it below the diagonal.

    Args:
        alpha: (m,) levels.
        risk: for each named way of choosing sizes, (m,) measured risks, NaN where not certified.
        n_test: number of test queries; the band shows two standard errors of a risk equal to alpha.
    """
    figure, axes = _axes("alpha", "measured risk", "Risk on held-out queries")
    error = 2 * np.sqrt(alpha * (1 - alpha) / n_test)
    axes.fill_between(alpha, alpha, alpha + error, color=GREY, alpha=0.25, label="test noise")
    axes.plot(alpha, alpha, color=GREY, linestyle="--", label="risk = alpha")
    for (name, values), color in zip(risk.items(), cycle((BLUE, GREEN, RED)), strict=False):
        axes.plot(alpha, values, color=color, marker="o", markersize=3, label=name)
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def size_curve(alpha: Floats, size: Mapping[str, Floats]) -> Figure:
    """Mean set size against alpha, for each named way of choosing sizes; NaN for none."""
    figure, axes = _axes("alpha", "mean set size", "What the guarantee costs")
    for (name, values), color in zip(size.items(), cycle((BLUE, GREY, GREEN, RED)), strict=False):
        axes.plot(alpha, values, color=color, marker="o", markersize=3, label=name)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(0, None)
    axes.legend(frameon=False)
    return figure


def size_distribution(sizes: NDArray[np.integer[Any]], alpha: float, delta: float) -> Figure:
    """How many queries get a set of which size."""
    title = f"Set sizes at alpha = {alpha:g}, delta = {delta:g}"
    figure, axes = _axes("set size", "share of queries", title)
    width = -(-int(sizes.max()) // 40)  # at most 40 bars, of equally many sizes each
    edges = np.arange(0.5, sizes.max() + width, width)
    axes.hist(
        sizes, edges.tolist(), weights=np.full(len(sizes), 1 / len(sizes)), color=BLUE, rwidth=0.9
    )
    mean = float(sizes.mean())
    axes.axvline(mean, color=RED, label=f"mean {mean:.2f}")
    axes.legend(frameon=False)
    return figure


def reliability_diagram(diagram: Reliability) -> Figure:
    """Recall at 1 against confidence, with the number of queries in each bin."""
    title = f"Reliability (calibration error {diagram.error:.3f})"
    figure, axes = _axes("confidence (1 - scaled uncertainty)", "recall at 1", title)
    width = 1 / len(diagram.confidence)
    drawn = diagram.count > 0
    axes.bar(diagram.confidence[drawn], diagram.recall[drawn], 0.9 * width, color=BLUE)
    for middle, recall, count in zip(
        diagram.confidence[drawn], diagram.recall[drawn], diagram.count[drawn], strict=True
    ):
        axes.text(middle, recall + 0.01, f"{count}", ha="center", fontsize=7, color="#444")
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--")
    axes.set(xlim=(0, 1), ylim=(0, 1.06))
    return figure


def query_sets(rows: Sequence[QuerySet], columns: int = 8) -> Figure:
    """Queries, one a row, with the first images of their sets framed green (match) or red."""
    height, width = rows[0].query.shape[:2]
    figure = Figure(
        figsize=(1.0 * (columns + 1.6), (0.45 + height / width) * len(rows)), layout="constrained"
    )
    grid = figure.subplots(len(rows), columns + 1, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for line, row in zip(grid, rows, strict=True):
        _picture(line[0], row.query, "#222222", row.title)
        shown = list(zip(line[1:], row.images, row.matches, strict=False))
        for axes, image, match in shown:
            _picture(axes, image, GREEN if match else RED)
        more = len(row.matches) - len(shown)
        if more > 0:
            shown[-1][0].set_title(f"+ {more} more", fontsize=7, loc="left")
    return figure


def _picture(axes: Axes, image: NDArray[np.uint8], color: str, title: str = "") -> None:
    axes.set_axis_on()
    axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=7, loc="left")
    for spine in axes.spines.values():
        spine.set(color=color, linewidth=2.5)


def _axes(x: str, y: str, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
