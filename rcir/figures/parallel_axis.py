"""One axis of parallel coordinates: where values are on it, and what is written beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator

from rcir.errors import InvalidData
from rcir.metrics.checks import Floats

NONE_GAP = 0.15  # of the height of an axis, between None and the lowest number


@dataclass(frozen=True)
class ParallelAxis:
    """One axis: where trials are on it, in [0, 1], and what is written where."""

    places: Floats
    ticks: Floats
    labels: list[str]

    def lines(self) -> int:
        """How many lines of text fill the axis."""
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
    there = np.unique(numbers)
    low, high = there[0], there[-1]
    scaled = np.log10(there) if log else there
    apart = np.diff(scaled, append=np.inf).min() > 0.08 * (scaled[-1] - scaled[0])
    if len(there) <= 6 and apart and all(float(f"{value:.4g}") == value for value in there):
        return there
    if log and high >= 10 * low:
        locator = LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,))
        ticks = np.asarray(locator.tick_values(low, high))
    else:
        ticks = np.asarray(MaxNLocator(5, steps=(1, 2, 5, 10)).tick_values(low, high))
    beyond = 1e-9 * (high - low)  # 0.1 * 3 > 0.3
    inside = ticks[(ticks >= low - beyond) & (ticks <= high + beyond)]
    return inside if len(inside) > 1 else there[[0, -1]] if low < high else there


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
