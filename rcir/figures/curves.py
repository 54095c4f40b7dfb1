"""Curves of guarantees and uncertainties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rcir.autologging import without_autologging
from rcir.figures.axes import (
    AMBER,
    BLUE,
    DARK,
    GREY,
    add_labels,
    draw_curves,
    log_scale,
    one_panel,
    two_panels,
)
from rcir.metrics import Reliability
from rcir.metrics.ranking import Floats

CONFIDENCE = "confidence (1 - scaled uncertainty)"


def risk_curve(alpha: Floats, risk: Floats, low: Floats, high: Floats) -> Figure:
    """Draw measured risk against alpha, with the line on which both are equal.

    Args:
        alpha: (m,) levels, ascending.
        risk: (m,) measured risks.
        low, high: (m,) ends of their 95% intervals.

    Example:
        >>> alpha, risk = np.array([0.1, 0.2]), np.array([0.07, 0.18])
        >>> risk_curve(alpha, risk, risk - 0.02, risk + 0.03).savefig("risk.png")
    """
    figure, axes = one_panel("alpha", "measured risk", "Risk")
    axes.plot(alpha, alpha, color=GREY, linestyle="--", label="risk = alpha")
    _draw_band(axes, alpha, risk, low, high, "measured risk")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def size_curve(alpha: Floats, size: Floats, low: Floats, high: Floats, constant: Floats) -> Figure:
    """Draw mean set size against alpha, and the size if all sets were equally large.

    Args:
        alpha: (m,) levels, ascending.
        size: (m,) mean set sizes.
        low, high: (m,) ends of their 95% intervals; NaN where there is none.
        constant: (m,) size of all sets if they were equally large; NaN where none is certified.

    Example:
        >>> alpha, size = np.array([0.1, 0.2]), np.array([9.0, 3.0])
        >>> size_curve(alpha, size, size - 1, size + 1, 2 * size).savefig("size.png")
    """
    figure, axes = one_panel("alpha", "mean set size", "Set size")
    _draw_band(axes, alpha, size, low, high, "mean size")
    axes.plot(
        alpha, constant, color=AMBER, marker="s", markersize=4, label="one size for all queries"
    )
    log_scale(axes, "y")
    axes.set_xlim(0, None)
    axes.legend(frameon=False)
    return figure


def size_distributions(sizes: Mapping[str, NDArray[np.integer[Any]]]) -> Figure:
    """Draw the cumulative distributions of set sizes.

    Args:
        sizes: (n,) set sizes by name, such as a level; n may differ.

    Example:
        >>> sizes = {"alpha = 0.1": np.array([1, 3, 9]), "alpha = 0.2": np.array([1, 1, 2])}
        >>> size_distributions(sizes).savefig("sizes.png")
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
    log_scale(axes, "x")
    axes.legend(frameon=False, loc="lower right")
    return figure


def _draw_band(axes: Axes, x: Floats, values: Floats, low: Floats, high: Floats, name: str) -> None:
    axes.fill_between(x, low, high, color=BLUE, alpha=0.2, linewidth=0, label="95% interval")
    axes.plot(x, values, color=BLUE, marker="o", markersize=4, label=name)


def reliability_diagram(diagram: Reliability) -> Figure:
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


def sparsification_curves(
    fractions: Floats,
    curves: Mapping[str, Floats],
    metric: str = "recall at 1",
) -> Figure:
    """Draw a metric of the remaining queries when the most uncertain ones are removed.

    The better an uncertainty, the closer is its curve to that of the oracle, which removes the
    wrong queries first, and the farther from that of a random order.

    Args:
        fractions: (m,) of queries removed, in [0, 1).
        curves: (m,) values of the metric by name; "oracle" and "random" are drawn as references.
        metric: its name.

    Example:
        >>> curves = {"btl": np.array([0.8, 0.9]), "oracle": np.array([0.8, 1.0])}
        >>> sparsification_curves(np.array([0.0, 0.2]), curves).savefig("sparsification.png")
    """
    title = "Without the most uncertain queries"
    figure, axes = one_panel("fraction of queries removed", metric, title)
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
def in_and_out(
    inside: Floats,
    outside: Floats,
    names: tuple[str, str] = ("in distribution", "out of distribution"),
) -> Figure:
    """Draw histograms of uncertainties in and out of distribution, and the ROC curve.

    The histograms share their bins, which are logarithmic if all values are positive and span more
    than two decades.

    Args:
        inside: (n,) uncertainties of queries in distribution; finite.
        outside: (m,) of queries out of distribution, which should be higher; finite.
        names: of the two.

    Example:
        >>> in_and_out(np.array([0.1, 0.2, 0.3]), np.array([0.25, 0.9])).savefig("ood.png")
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
    fills: tuple[dict[str, Any], ...] = (
        {"color": BLUE, "alpha": 0.5},
        {"edgecolor": AMBER, "fill": False, "hatch": "////"},
    )
    for values, name, fill in zip((inside, outside), names, fills, strict=True):
        weights = np.full(len(values), 1 / len(values))
        left.hist(
            values, edges.tolist(), weights=weights, histtype="stepfilled", label=name, **fill
        )
    if logarithmic:
        log_scale(left, "x")
    else:
        left.locator_params(axis="x", nbins=4)  # small numbers have many digits
    left.legend(frameon=False)

    truth = np.repeat([False, True], [len(inside), len(outside)])
    false_alarms, detected, _ = roc_curve(truth, both)
    title = f"AUROC {auc(false_alarms, detected):.3f}"
    add_labels(right, f"{names[0]}: share above", f"{names[1]}: share above", title)
    right.plot([0, 1], [0, 1], color=GREY, linestyle="--")
    right.plot(false_alarms, detected, color=BLUE)
    right.set(xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
    return figure
