"""Figures from arrays: guarantees, uncertainties, embeddings. They open no window."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle, product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from rcir.autologging import without_autologging
from rcir.errors import InvalidData, printable
from rcir.metrics import Reliability
from rcir.metrics.ranking import Floats

BLUE, GREY, GREEN, RED = "#2563a8", "#8a8f98", "#1a8a4a", "#c93a3a"
AMBER, PURPLE, DARK = "#d98c00", "#7a4fb0", "#222222"

# Markers distinguish curves in greyscale and for colour-blind readers.
_MARKED = ((BLUE, "o"), (AMBER, "s"), (GREEN, "^"), (RED, "D"), (PURPLE, "v"), (DARK, "X"))
_LINES = ("-", "--", ":")
DPI = 200  # of pixels inside a figure, also inside an SVG
TEN_COLORS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9", "black")
PALE_GREY = "#d5d7db"  # of all other classes
CONFIDENCE = "confidence (1 - scaled uncertainty)"


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


@without_autologging()
def draw_in_and_out(inside: Floats, outside: Floats) -> Figure:
    """Draw histograms of uncertainties in and out of distribution, and the ROC curve.

    The histograms share their bins, which are logarithmic if all values are positive and span more
    than two decades.

    Args:
        inside: (n,) uncertainties of queries in distribution; finite.
        outside: (m,) of queries out of distribution, which should be higher; finite.
    """
    from sklearn.metrics import auc, roc_curve

    figure, (left, right) = two_panels()
    add_labels(left, "uncertainty", "share of queries", "Uncertainty")
    both = np.concatenate([inside, outside])
    logarithmic = both.min() > 0 and both.max() > 100 * both.min()
    if logarithmic:
        edges = np.geomspace(both.min(), both.max(), 31)
    else:
        edges = np.histogram_bin_edges(both, 30)
    filled: dict[str, Any] = {"color": BLUE, "alpha": 0.5}
    hatched: dict[str, Any] = {"edgecolor": AMBER, "fill": False, "hatch": "////"}
    for values, name, style in (
        (inside, "in distribution", filled),
        (outside, "out of distribution", hatched),
    ):
        weights = np.full(len(values), 1 / len(values))
        left.hist(
            values, edges.tolist(), weights=weights, histtype="stepfilled", label=name, **style
        )
    if logarithmic:
        log_scale(left)
    else:
        left.locator_params(axis="x", nbins=4)  # small numbers have many digits
    left.legend(frameon=False)

    truth = np.repeat([False, True], [len(inside), len(outside)])
    false_alarms, detected, _ = roc_curve(truth, both)
    title = f"AUROC {auc(false_alarms, detected):.3f}"
    add_labels(right, "in distribution: share above", "out of distribution: share above", title)
    right.plot([0, 1], [0, 1], color=GREY, linestyle="--")
    right.plot(false_alarms, detected, color=BLUE)
    right.set(xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
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


def draw_projection(
    points: Floats, labels: Sequence[str] | NDArray[Any] | None, uncertainty: Floats
) -> Figure:
    """Draw a map of the embedding, by class and by uncertainty.

    Args:
        points: (n, 2), such as those of `project`.
        labels: (n,) classes. The ten most frequent have colours, the others are grey. None draws
            the map by uncertainty alone.
        uncertainty: (n,) finite; the colours span its 2% to 98% quantiles.
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
            [handle for _, handle in classes],
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
    dots = right.scatter(x, y, c=uncertainty[order], cmap="viridis", vmin=low, vmax=high, **style)
    for axes in figure.axes:
        axes.set(xticks=[], yticks=[])
        axes.set_aspect("equal", adjustable="datalim")
        axes.spines[:].set_visible(False)
    figure.colorbar(dots, ax=right, label="uncertainty", extend="both")
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
        handles.append((name, axes.scatter(x, y, color=PALE_GREY, label=name, zorder=0.5, **style)))
    return handles
