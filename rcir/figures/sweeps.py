"""Figures of sweeps: axes side by side, and a line for each trial."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.figures.axes import (
    AMBER,
    BLUE,
    DARK,
    GREY,
    RED,
    legend_below,
    log_scale,
    one_panel,
)
from rcir.metrics.ranking import Floats

NONE_GAP = 0.15  # of the height of an axis, between None and the lowest number


@dataclass(frozen=True)
class ParallelAxis:
    """One axis: where trials are on it, in [0, 1], and what is written where."""

    places: Floats
    ticks: Floats
    labels: list[str]

    def lines(self) -> int:
        """Return the number of lines of text that fill the axis."""
        return max((label.count("\n") + 1 for label in self.labels), default=0) * len(self.labels)


def axis_of(name: str, values: Sequence[Any], log: bool) -> ParallelAxis:
    """The axis of an option: a scale of numbers and None, or a place for each other value."""
    numbers = [value for value in values if value is not None]
    if numbers and all(_is_number(value) for value in numbers):
        known = np.array([np.nan if value is None else value for value in values], np.float64)
        return _numeric(name, known, log)
    ordered = sorted({str(value): value for value in values}.items(), key=_order)
    texts = [text for text, _ in ordered]
    ticks = np.linspace(0, 1, len(texts)) if len(texts) != 1 else np.array([0.5])
    where = dict(zip(texts, ticks, strict=True))
    places = np.array([where[str(value)] for value in values], np.float64)
    return ParallelAxis(places, ticks, [wrapped(text, 14) for text in texts])


def _numeric(name: str, values: Floats, log: bool) -> ParallelAxis:
    """The axis of numbers, where NaN is None."""
    none = np.isnan(values)
    if log and values[~none].min() <= 0:
        raise InvalidData(
            f"{name} has the value {values[~none].min():g}, which has no place on a logarithmic "
            "scale, only positive numbers have: leave the option out of log"
        )
    ticks = _ticks(values[~none], log)
    scaled, at = (np.log10(values), np.log10(ticks)) if log else (values, ticks)
    low, high, bottom = np.nanmin(scaled), np.nanmax(scaled), NONE_GAP * none.any()
    start, length = (low, high - low) if low < high else (low - 0.5, 1.0)
    places = bottom + (1 - bottom) * (scaled - start) / length
    at = bottom + (1 - bottom) * (at - start) / length
    if not none.any():
        return ParallelAxis(places, at, _texts(ticks))
    return ParallelAxis(np.where(none, 0.0, places), np.r_[0.0, at], ["None", *_texts(ticks)])


def _ticks(numbers: Floats, log: bool) -> Floats:
    """Numbers within the range: those there are if they are few, apart and short, else round."""
    unique_numbers = np.unique(numbers)
    low, high = unique_numbers[0], unique_numbers[-1]
    scaled = np.log10(unique_numbers) if log else unique_numbers
    apart = np.diff(scaled, append=np.inf).min() > 0.08 * (scaled[-1] - scaled[0])
    if (
        len(unique_numbers) <= 6
        and apart
        and all(float(f"{value:.4g}") == value for value in unique_numbers)
    ):
        return unique_numbers
    if log and high >= 10 * low:
        locator = LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,))
        ticks = np.asarray(locator.tick_values(low, high))
    else:
        ticks = np.asarray(MaxNLocator(5, steps=(1, 2, 5, 10)).tick_values(low, high))
    beyond = 1e-9 * (high - low)  # 0.1 * 3 > 0.3
    inside = ticks[(ticks >= low - beyond) & (ticks <= high + beyond)]
    return inside if len(inside) > 1 else unique_numbers[[0, -1]] if low < high else unique_numbers


def _texts(ticks: Floats) -> list[str]:
    """Numbers, with as many digits as tell them apart."""
    for digits in range(4, 17):
        texts = [f"{value:.{digits}g}" for value in ticks]
        if len(set(texts)) == len(texts):
            break
    return texts


def wrapped(text: str, width: int) -> str:
    """A name over several lines, which end between its words if they can."""
    words = re.findall(rf"[^\W_]{{1,{width}}}[\W_]*|[\W_]+", text)
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.strip() for line in lines if line.strip())


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _order(item: tuple[str, Any]) -> tuple[bool, float, str]:
    """Numbers by value, then all else by its text."""
    return (False, float(item[1]), "") if _is_number(item[1]) else (True, 0.0, item[0])


SIZE = "certified mean set size"
SPACING, TEXT_LINE = 1.25, 0.13  # inches from one axis to the next, and of a line of text
NUMBER_GAP = 4  # pixels around a number, so that two are not read as one
PAPER = {"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.8}  # under text on lines
TEXT: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "bbox": PAPER}


def pareto_front(objectives: Floats) -> NDArray[np.bool_]:
    """Return which rows no other row beats by being as low in every column, and lower in one.

    Args:
        objectives: (n, k) what should be low; negate what should be high.

    Returns:
        (n,) whether the row is on the front. Of equal rows, all are or none is; a row with NaN
        never is, and beats none.

    Raises:
        InvalidData: objectives is not a matrix.

    Example:
        >>> pareto_front(np.array([[1.0, 5.0], [2.0, 3.0], [2.0, 4.0], [np.nan, 0.0]])).tolist()
        [True, True, False, False]
    """
    if objectives.ndim != 2:
        raise InvalidData(
            f"objectives has shape {objectives.shape}; needed is (n, k), a row a trial"
        )
    no_worse = np.ones((len(objectives), len(objectives)), np.bool_)  # [i, j]: row j than row i
    better = np.zeros_like(no_worse)
    for column in objectives.T:
        no_worse &= column <= column[:, None]
        better |= column < column[:, None]
    return np.asarray(~((no_worse & better).any(axis=1) | np.isnan(objectives).any(axis=1)))


def pareto(
    size: Floats,
    recall: Floats,
    front: NDArray[np.bool_],
    numbers: Sequence[int],
    default: tuple[float, float] | None = None,
) -> Figure:
    """Certified size against recall at 1 of the trials of a sweep, and the trials none beats.

    Args:
        size: (n,) certified mean set sizes; a trial without a finite one is left out.
        recall: (n,) recalls at 1 in [0, 1], likewise.
        front: (n,) which trials none beats: `pareto_front(np.c_[size, -recall])`.
        numbers: (n,) of the trials, said at those on the front where one does not cover another.
        default: size and recall of the configuration without changes.

    Raises:
        InvalidData: lengths differ.

    Example:
        >>> size, recall = np.array([4.0, 6.0, 7.0]), np.array([0.8, 0.9, 0.85])
        >>> front = pareto_front(np.c_[size, -recall])
        >>> pareto(size, recall, front, numbers=[0, 1, 2]).savefig("pareto.png")
    """
    _check_lengths(len(size), {"recall": recall, "front": front, "numbers": numbers})
    figure, axes = one_panel(SIZE, "recall at 1", "Certified size against recall")
    axes.margins(0.08, 0.1)
    is_finite = np.isfinite(size) & np.isfinite(recall)
    others, best = is_finite & ~front, np.flatnonzero(is_finite & front)
    best = best[np.lexsort([-recall[best], size[best]])]
    x, y = size[best], recall[best]
    axes.plot(size[others], recall[others], "o", color=GREY, markersize=4, label="trials")
    axes.step(x, y, "o-", where="post", color=BLUE, label="Pareto front")
    style: dict[str, Any] = {"linestyle": "", "markeredgecolor": "white", "markeredgewidth": 0.5}
    axes.plot(x[:1], y[:1], "*", color=RED, markersize=13, label="smallest", **style)
    if default is not None:
        axes.plot(*default, "D", color=AMBER, markersize=7, label="default", **style)
    if _spread(size[is_finite]):
        log_scale(axes, "x")
    _number(figure, axes, x, y, [numbers[trial] for trial in best.tolist()])
    legend_below(figure, 4)
    return figure


def parallel_coordinates(
    values: Mapping[str, Sequence[Any]],
    size: Floats,
    finished: NDArray[np.bool_],
    log: Collection[str] = (),
) -> Figure:
    """Parallel coordinates of trials: a line each, through its options to the certified size.

    The darker a line, the smaller the size. The best of the finished trials is drawn on top; those
    that were stopped or lost are thin, grey and dashed.

    Args:
        values: for each option, the (n,) values that the trials chose. Numbers have a scale, with
            a place for None below it; of anything else each different value has its place.
        size: (n,) certified mean set sizes; a trial without a finite one is left out.
        finished: (n,) whether the trial trained to its end.
        log: options of a logarithmic scale.

    Raises:
        InvalidData: lengths differ, or an option of `log` has numbers that are not positive.

    Example:
        >>> values = {"loss.margin": [0.0, 0.1], "mining.strategy": ["hard", "random"]}
        >>> size, finished = np.array([4.0, 6.0]), np.array([True, True])
        >>> parallel_coordinates(values, size, finished).savefig("options.png")
    """
    _check_lengths(len(size), {"finished": finished, **values})
    rows = np.flatnonzero(np.isfinite(size)).tolist()
    columns = {
        name: axis_of(name, [chosen[trial] for trial in rows], name in log)
        for name, chosen in values.items()
    }
    columns[SIZE] = axis_of(SIZE, size[rows].tolist(), _spread(size[rows]))
    title = f"Certified size by options ({len(rows)} of {len(size)} trials)"
    figure, axes = one_panel("", "", title)
    crowded = max(column.lines() for column in columns.values())
    figure.set_size_inches(
        max(5, SPACING * (len(columns) + 0.3)), max(3.6, 1.4 + TEXT_LINE * crowded)
    )
    paths = np.stack([column.places for column in columns.values()], axis=1)
    _draw_paths(axes, paths, size[rows], finished[rows])
    if len(rows):
        legend_below(figure, 2)
    for place, column in enumerate(columns.values()):
        axes.plot([place, place], [0, 1], color=DARK, linewidth=0.8)
        axes.plot(np.full(len(column.ticks), place), column.ticks, "_", color=DARK, markersize=6)
        for height, label in zip(column.ticks, column.labels, strict=True):
            axes.annotate(label, (place, height), (5, 0), ha="left", va="center", **TEXT)
    axes.set(xlim=(-0.05, len(columns) - 0.95), ylim=(-0.04, 1.04), yticks=[])
    axes.set_xticks(range(len(columns)), [wrapped(name, 18) for name in columns], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _draw_paths(axes: Axes, paths: Floats, size: Floats, finished: NDArray[np.bool_]) -> None:
    """One line a trial, (n, axes) heights; the last is that of the size and gives the colour."""
    lines = np.stack(np.broadcast_arrays(np.arange(paths.shape[1]), paths), axis=2)
    order = np.flatnonzero(finished)
    order = order[np.argsort(size[order], kind="stable")[::-1]]  # small sizes on top
    if not finished.all():
        style: dict[str, Any] = {"colors": GREY, "linewidths": 0.7, "linestyles": "--"}
        axes.add_collection(LineCollection(list(lines[~finished]), label="not finished", **style))
    if len(order):
        drawn = LineCollection(list(lines[order]), cmap="viridis", linewidths=1.3)
        drawn.set_array(paths[order, -1])
        drawn.set_clim(0, 1.15)  # the brightest colours are lost on white
        axes.add_collection(drawn)
        best = order[-1]
        style = {"linewidth": 2.8, "marker": "o", "markersize": 6, "zorder": 3}
        axes.plot(*lines[best].T, color=RED, label=f"best: {size[best]:.3g}", **style)


def _number(figure: Figure, axes: Axes, x: Floats, y: Floats, numbers: Sequence[int]) -> None:
    """Numbers at the upper left of points, where no trial is; the first before those it covers."""
    texts: dict[tuple[float, float], str] = {}
    for at, number in zip(zip(x.tolist(), y.tolist(), strict=True), numbers, strict=True):
        texts[at] = f"{texts[at]}, {number}" if at in texts else f"{number}"
    style: dict[str, Any] = {"ha": "right", "va": "bottom", **TEXT}
    labels = [axes.annotate(wrapped(text, 14), at, (-4, 3), **style) for at, text in texts.items()]
    figure.draw_without_rendering()  # places them
    boxes: list[Bbox] = []
    for label in labels:
        box = label.get_window_extent().padded(NUMBER_GAP)
        if any(box.overlaps(other) for other in boxes):
            label.remove()
        else:
            boxes.append(box)


def _spread(size: Floats) -> bool:
    """Return whether sizes span enough for a logarithmic scale."""
    return len(size) > 0 and size.min() > 0 and size.max() > 10 * size.min()


def _check_lengths(n: int, columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> None:
    for name, values in columns.items():
        if len(values) != n:
            raise InvalidData(f"{name} has {len(values)} values; needed is {n}, one a trial")
