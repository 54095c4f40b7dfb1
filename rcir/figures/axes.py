"""The style of all figures: colours, axes and curves."""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import cycle, product
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

BLUE, GREY, GREEN, RED = "#2563a8", "#8a8f98", "#1a8a4a", "#c93a3a"
AMBER, PURPLE, DARK = "#d98c00", "#7a4fb0", "#222222"

# Markers distinguish curves in greyscale and for colour-blind readers.
_MARKED = ((BLUE, "o"), (AMBER, "s"), (GREEN, "^"), (RED, "D"), (PURPLE, "v"), (DARK, "X"))
_LINES = ("-", "--", ":")
DPI = 200  # of pixels inside a figure, also inside an SVG


def one_panel(x: str, y: str, title: str) -> tuple[Figure, Axes]:
    """Return a figure of one labelled panel."""
    figure = Figure(figsize=(5, 3.6), layout="constrained", dpi=DPI)
    return figure, add_labels(figure.subplots(), x, y, title)


def two_panels() -> tuple[Figure, tuple[Axes, Axes]]:
    """Return a figure of two panels side by side."""
    figure = Figure(figsize=(7.4, 3.6), layout="constrained", dpi=DPI)
    left, right = figure.subplots(1, 2)
    return figure, (left, right)


def add_labels(axes: Axes, x: str, y: str, title: str) -> Axes:
    """Add labels and a title to a panel, and remove the lines at its top and right."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis of a finished panel logarithmic, with a few plain numbers."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    if not 0 < low < high:  # the panel is empty
        low, high = 1.0, 10.0
        axes.set(**{f"{which}lim": (low, high)})
    decades = np.log10(high / low)
    subs = (1, 2, 3, 4, 6, 8) if decades < 1 else (1, 2, 5) if decades < 2 else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


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
