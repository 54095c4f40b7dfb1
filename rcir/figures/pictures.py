"""Figures of queries with their retrieved sets."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rcir.errors import printable
from rcir.figures.plots import DARK, DPI, GREEN, RED

PICTURE, GAP, LINE, LETTER, MIN_WIDTH = 0.72, 0.06, 0.135, 0.065, 2.2  # inches


@dataclass(frozen=True)
class QuerySet:
    """A query with its retrieved set.

    Attributes:
        query: (H, W) or (H, W, 3) uint8.
        title: above the query.
        images: the first images of the set, nearest first.
        matches: for each image of the whole set, True if it is a match.
    """

    query: NDArray[np.uint8]
    title: str
    images: Sequence[NDArray[np.uint8]]
    matches: Sequence[bool]


def draw_query_sets(rows: Sequence[QuerySet], columns: int = 8) -> Figure:
    """Draw queries, one a row, with the first images of their sets.

    A match has a solid green frame, any other image a dashed red one. Empty sets are marked, and
    images that do not fit on the page are counted.

    Args:
        rows: at least one; images may differ in size and shape.
        columns: maximum number of images of a set.
    """
    width = max(MIN_WIDTH, (columns + 1) * (PICTURE + GAP) + GAP)
    letters = int((width - 2 * GAP) / LETTER)
    titles = [
        "\n".join(textwrap.fill(printable(line), letters) for line in row.title.split("\n"))
        for row in rows
    ]
    above = [LINE * (title.count("\n") + 1) + GAP for title in titles]
    heights = [PICTURE * _tallest(row, columns) for row in rows]
    below = [LINE * (len(row.matches) > min(len(row.images), columns)) + 2 * GAP for row in rows]
    height = top = sum(above) + sum(heights) + sum(below)
    figure = Figure(figsize=(width, height), dpi=DPI)
    for row, title, over, tall, under in zip(rows, titles, above, heights, below, strict=True):
        top -= over + tall
        lefts = [(GAP + column * (PICTURE + GAP)) / width for column in range(columns + 1)]
        places = [(left, top / height, PICTURE / width, tall / height) for left in lefts]
        # Names may contain dollars, which are not formulas.
        y = (top + tall + GAP) / height
        figure.text(lefts[0], y, title, fontsize=7, va="bottom", parse_math=False)
        _draw_picture(figure.add_axes(places[0]), row.query, DARK)
        panels = list(zip(places[1:], row.images, row.matches, strict=False))
        for place, image, match in panels:
            last = figure.add_axes(place)
            _draw_picture(last, image, GREEN if match else RED, dashed=not match)
        more = len(row.matches) - len(panels)
        if not row.matches:
            figure.text(lefts[1], (top + tall) / height, "empty set", fontsize=8, va="top")
        elif more > 0 and panels:
            last.set_xlabel(f"+ {more} more", fontsize=7, labelpad=3)
        top -= under
    return figure


def _draw_picture(axes: Axes, image: NDArray[np.uint8], color: str, dashed: bool = False) -> None:
    axes.imshow(image, cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[], anchor="NW")
    for spine in axes.spines.values():
        spine.set(color=color, linewidth=2.2, capstyle="butt")
        spine.set_linestyle((0, (1.5, 0.8)) if dashed else "-")


def _tallest(row: QuerySet, columns: int) -> float:
    """Return the largest ratio of height to width in a row, within limits."""
    shapes = [image.shape for image in (row.query, *row.images[:columns])]
    return float(np.clip(max(shape[0] / shape[1] for shape in shapes), 0.3, 1.6))
