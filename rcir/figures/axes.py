"""The look of all figures: colours, axes, and how one curve differs from the next."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle, product
from typing import Any, Literal, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from rcir.metrics.ranking import Floats

Item = TypeVar("Item")

BLUE, GREY, GREEN, RED = "#2563a8", "#8a8f98", "#1a8a4a", "#c93a3a"
AMBER, PURPLE, DARK = "#d98c00", "#7a4fb0", "#222222"

# Markers tell curves apart where colours do not: in greyscale, and to the colour-blind.
_MARKED = (
    (BLUE, "o"),
    (AMBER, "s"),
    (GREEN, "^"),
    (RED, "D"),
    (PURPLE, "v"),
    (DARK, "X"),
)
_LINES = ("-", "--", ":")
DPI = 200  # of pixels inside a figure, also inside an SVG


def one_panel(x: str, y: str, title: str) -> tuple[Figure, Axes]:
    """A figure of one panel, with the labels of its axes and its title."""
    figure = Figure(figsize=(5, 3.6), layout="constrained", dpi=DPI)
    return figure, labelled(figure.subplots(), x, y, title)


def two_panels() -> tuple[Figure, tuple[Axes, Axes]]:
    """A figure of two panels beside each other."""
    figure = Figure(figsize=(7.4, 3.6), layout="constrained", dpi=DPI)
    left, right = figure.subplots(1, 2)
    return figure, (left, right)


def labelled(axes: Axes, x: str, y: str, title: str) -> Axes:
    """The panel, with labels, a title, and without the lines that bear no scale."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis that is drawn on already logarithmic, with plain numbers, neither few nor many.

    Args:
        axes: the panel.
        which: its "x" or "y" axis.
    """
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    if not 0 < low < high:  # nothing is drawn: the limits are those of an empty linear axis
        low, high = 1.0, 10.0
        axes.set(**{f"{which}lim": (low, high)})
    decades = np.log10(high / low)
    subs = (1, 2, 3, 4, 6, 8) if decades < 1 else (1, 2, 5) if decades < 2 else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def to_svg(figure: Figure) -> str:
    """A figure as the text of an SVG file."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def legend_below(figure: Figure, columns: int) -> None:
    """A legend under the panel, for curves that leave no room in it."""
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def styled(items: Iterable[Item]) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Each item with the colour, marker and line of its curve."""
    styles = (
        {"color": color, "marker": marker, "markersize": 4, "linestyle": line}
        for line, (color, marker) in product(_LINES, _MARKED)
    )
    return zip(items, cycle(styles), strict=False)


def draw_curves(axes: Axes, x: Floats, curves: Mapping[str, Floats]) -> None:
    """Named curves over the same x, each with markers at about twenty places at most."""
    for (name, y), style in styled(curves.items()):
        axes.plot(x, y, label=name, markevery=spaced(x), **style)


def spaced(x: Floats) -> int:
    """Return the number of points per marker."""
    return max(1, len(x) // 20)
