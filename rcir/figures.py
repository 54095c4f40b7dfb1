"""Figures from arrays: guarantees and uncertainties. They open no window."""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import cycle, product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from rcir.metrics import Reliability
from rcir.metrics.ranking import Floats

BLUE, GREY, GREEN, RED = "#2563a8", "#8a8f98", "#1a8a4a", "#c93a3a"
AMBER, PURPLE, DARK = "#d98c00", "#7a4fb0", "#222222"

# Markers distinguish curves in greyscale and for colour-blind readers.
_MARKED = ((BLUE, "o"), (AMBER, "s"), (GREEN, "^"), (RED, "D"), (PURPLE, "v"), (DARK, "X"))
_LINES = ("-", "--", ":")
DPI = 200  # of pixels inside a figure, also inside an SVG
CONFIDENCE = "confidence (1 - scaled uncertainty)"


def one_panel(x: str, y: str, title: str) -> tuple[Figure, Axes]:
    """Return a figure of one labelled panel."""
    figure = Figure(figsize=(5, 3.6), layout="constrained", dpi=DPI)
    return figure, add_labels(figure.subplots(), x, y, title)


def add_labels(axes: Axes, x: str, y: str, title: str) -> Axes:
    """Add labels and a title to a panel, and remove the lines at its top and right."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def log_scale(axes: Axes) -> None:
    """Make the x axis of a finished panel logarithmic, with a few plain numbers."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    decades = np.log10(high / low)
    subs = (1, 2, 3, 4, 6, 8) if decades < 1 else (1, 2, 5) if decades < 2 else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def to_svg(figure: Figure) -> str:
    """Return a figure as the text of an SVG file."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def draw_curves(axes: Axes, curves: Mapping[str, tuple[Any, Any]], **options: Any) -> None:
    """Draw curves (x, y) by name, with different styles and at most about twenty markers each."""
    styles = cycle(product(_LINES, _MARKED))
    for (name, (x, y)), (line, (color, marker)) in zip(curves.items(), styles, strict=False):
        style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4}
        axes.plot(
            x, y, label=name, linestyle=line, markevery=max(1, len(x) // 20), **style, **options
        )


def draw_risk_curve(alpha: Floats, risk: Floats, low: Floats, high: Floats) -> Figure:
    """Draw measured risk against alpha, with the line on which both are equal.

    Args:
        alpha: (m,) levels, ascending.
        risk: (m,) measured risks.
        low, high: (m,) ends of their 95% intervals.
    """
    figure, axes = one_panel("alpha", "measured risk", "Risk")
    axes.plot(alpha, alpha, color=GREY, linestyle="--", label="risk = alpha")
    axes.fill_between(alpha, low, high, color=BLUE, alpha=0.2, linewidth=0, label="95% interval")
    axes.plot(alpha, risk, color=BLUE, marker="o", markersize=4, label="measured risk")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def draw_trade_off(beta: Floats, alpha: Floats) -> Figure:
    """Draw the smallest certified alpha against beta.

    Args:
        beta: (m,) shares of queries without a match that may get a set, ascending.
        alpha: (m,) shares of the other queries that may miss their match.
    """
    figure, axes = one_panel("beta", "smallest alpha", "Queries without a match")
    axes.plot(beta, alpha, color=BLUE, marker="o", markersize=4)
    axes.set(xlim=(0, 1), ylim=(0, None))
    return figure


def draw_size_distributions(sizes: Mapping[str, NDArray[np.integer[Any]]]) -> Figure:
    """Draw the cumulative distributions of set sizes.

    Args:
        sizes: (n,) set sizes by name, such as a level; n may differ.
    """
    figure, axes = one_panel("set size", "share with at most that size", "Set sizes")
    start, end = 0.9, 1.1 * max(1, *(int(values.max()) for values in sizes.values()))
    curves = {}
    for name, values in sizes.items():
        size, count = np.unique(values, return_counts=True)
        share = np.cumsum(count) / len(values)
        empty = share[size == 0].sum()  # a logarithmic axis starts above zero
        steps = np.r_[start, size[size > 0], end], np.r_[empty, share[size > 0], 1]
        curves[f"{name}: mean {values.mean():.3g}"] = steps
    draw_curves(axes, curves, drawstyle="steps-post")
    axes.set(xlim=(start, end), ylim=(0, 1.02))
    log_scale(axes)
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_reliability(diagram: Reliability) -> Figure:
    """Draw recall at 1 against confidence, with the number of queries above each bin."""
    title = f"Reliability (calibration error {diagram.error:.3f})"
    figure, axes = one_panel(CONFIDENCE, "recall at 1", title)
    width = 1 / len(diagram.confidence)
    not_empty = diagram.count > 0
    axes.bar(diagram.confidence[not_empty], diagram.accuracy[not_empty], 0.9 * width, color=BLUE)
    for middle, count in zip(diagram.confidence[not_empty], diagram.count[not_empty], strict=True):
        axes.text(middle, 1.03, f"{count}", ha="center", fontsize=8, color=DARK)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--")
    axes.set(xlim=(0, 1), ylim=(0, 1.1), yticks=np.linspace(0, 1, 6))
    return figure


def draw_probabilities(diagrams: Mapping[str, Reliability]) -> Figure:
    """Draw how often there is a match against its probability; an error per name in the legend."""
    figure, axes = one_panel("probability of a match", "share with a match", "Probabilities")
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--")
    curves = {
        f"{name} (calibration error {diagram.error:.3f})": (diagram.confidence, diagram.accuracy)
        for name, diagram in diagrams.items()
    }
    draw_curves(axes, curves)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=9)
    return figure


def draw_sparsification(fractions: Floats, curves: Mapping[str, Floats]) -> Figure:
    """Draw recall at 1 of the remaining queries when the most uncertain ones are removed.

    The better an uncertainty, the closer is its curve to that of the oracle, which removes the
    wrong queries first, and the farther from that of a random order.

    Args:
        fractions: (m,) of queries removed, in [0, 1).
        curves: (m,) recall at 1 by name; "oracle" and "random" are drawn as references.
    """
    title = "Without the most uncertain queries"
    figure, axes = one_panel("fraction of queries removed", "recall at 1", title)
    references = {"oracle": (DARK, "--"), "random": (GREY, ":")}
    others = {name: (fractions, y) for name, y in curves.items() if name not in references}
    draw_curves(axes, others)
    for name, (color, line) in references.items():
        if name in curves:
            axes.plot(fractions, curves[name], color=color, linestyle=line, linewidth=2, label=name)
    axes.set_xlim(0, None)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
