"""Figures of queries with their retrieved sets, and a map of the embedding."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rcir.autologging import without_autologging
from rcir.errors import InvalidData, printable
from rcir.figures.axes import DARK, DPI, GREEN, RED, add_labels, one_panel, two_panels
from rcir.metrics.ranking import Floats

PICTURE, GAP, LINE, LETTER, MIN_WIDTH = 0.72, 0.06, 0.135, 0.065, 2.2  # inches
TEN_COLORS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9", "black")
PALE = "#d5d7db"  # of all other classes


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


def query_sets(rows: Sequence[QuerySet], columns: int = 8) -> Figure:
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


@without_autologging()
def project(
    vectors: Floats, seed: int = 0, limit: int = 1500
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Project vectors to the plane by t-SNE (van der Maaten and Hinton, 2008).

    Args:
        vectors: (n, d) embeddings, n >= 4 and d >= 2.
        seed: of the draw of vectors, and of the projection.
        limit: maximum number of vectors, drawn at random; t-SNE takes some seconds for 1500.

    Returns:
        (k, 2) points, and the (k,) ascending rows of their vectors, k at most `limit`.

    Raises:
        InvalidData: there are too few vectors, or they have too few components.

    Example:
        >>> points, rows = project(np.random.default_rng(0).normal(size=(30, 8)), limit=20)
        >>> points.shape, rows.shape
        ((20, 2), (20,))
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    n = min(len(vectors), limit)
    if n < 4 or vectors.shape[1] < 2:
        raise InvalidData(
            f"{n} vectors of {vectors.shape[1]} components cannot be mapped to the plane: pass at "
            "least 4 of at least 2"
        )
    rows = np.sort(np.random.default_rng(seed).choice(len(vectors), n, replace=False))
    chosen = np.asarray(vectors, np.float64)[rows]
    components = min(50, *chosen.shape)
    reduced = PCA(components, svd_solver="full").fit_transform(chosen)  # exact: no draw
    perplexity = min(30, (n - 1) / 3)
    points = TSNE(2, init="pca", perplexity=perplexity, random_state=seed).fit_transform(reduced)
    return points.astype(np.float64), rows


def projection(
    points: Floats, labels: Sequence[str] | NDArray[Any] | None, uncertainty: Floats
) -> Figure:
    """Draw a map of the embedding, by class and by uncertainty.

    Args:
        points: (n, 2), such as those of `project`.
        labels: (n,) classes. The ten most frequent have colours, the others are grey. None draws
            the map by uncertainty alone.
        uncertainty: (n,) finite; the colours span its 2% to 98% quantiles.

    Example:
        >>> points = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> projection(points, ["a", "a", "b"], np.array([0.1, 0.3, 0.2])).savefig("map.png")
    """
    size = float(np.clip(3000 / len(points), 3, 25))
    style: dict[str, Any] = {"s": size, "linewidths": 0, "rasterized": True}
    if labels is None:
        figure, right = one_panel("", "", "By uncertainty")
    else:
        figure, (left, right) = two_panels()
        add_labels(right, "", "", "By uncertainty")
        classes = _draw_classes(add_labels(left, "", "", "By class"), points, labels, style)
        legend = figure.legend(
            [dots for _, dots in classes],
            ["class"] * len(classes),
            loc="outside lower center",
            ncols=4,
            fontsize=8,
            markerscale=6 / size**0.5,
            frameon=False,
        )
        # Named afterwards: a legend omits names with "_" in front, and reads "$" as a formula.
        for text, (name, _) in zip(legend.get_texts(), classes, strict=True):
            text.set(text=name, parse_math=False)
    low, high = np.quantile(uncertainty, (0.02, 0.98))
    order = np.argsort(uncertainty, kind="stable")  # the most uncertain on top
    x, y = points[order].T
    drawn = right.scatter(x, y, c=uncertainty[order], cmap="viridis", vmin=low, vmax=high, **style)
    for axes in figure.axes:
        axes.set(xticks=[], yticks=[])
        axes.set_aspect("equal", adjustable="datalim")
        axes.spines[:].set_visible(False)
    figure.colorbar(drawn, ax=right, label="uncertainty", extend="both")
    return figure


def _draw_classes(
    axes: Axes, points: Floats, labels: Sequence[str] | NDArray[Any], style: dict[str, Any]
) -> list[tuple[str, PathCollection]]:
    """Draw the points of the ten most frequent classes and of all others; return names and dots."""
    names, class_of, count = np.unique(labels, return_inverse=True, return_counts=True)
    frequent = np.sort(np.argsort(-count, kind="stable")[: len(TEN_COLORS)])
    handles = []
    for number, color in zip(frequent, TEN_COLORS, strict=False):
        x, y = points[class_of == number].T
        name = printable(names[number])
        name = name if len(name) <= 20 else name[:19] + "…"
        handles.append((name, axes.scatter(x, y, color=color, label=name, **style)))
    other = ~np.isin(class_of, frequent)
    if other.any():
        name = f"{len(names) - len(frequent)} others"
        x, y = points[other].T
        handles.append((name, axes.scatter(x, y, color=PALE, label=name, zorder=0.5, **style)))
    return handles


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
