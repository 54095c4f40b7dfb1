"""Cleaning of a gallery: does it get better without its uncertain items?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.checks import Floats, Integers, check_columns
from rcir.metrics.ranking import CELLS_TOGETHER, average_precision


@dataclass(frozen=True)
class Cleaning:
    """mAP of a gallery without a growing part of its items.

    Means are over the queries that still have a match.

    Attributes:
        fractions: (f,) of the gallery removed.
        cleaned: (f,) mAP without the most uncertain items; NaN where no query has a match left.
        unmatched: (f,) number of queries without a match left.
        random: (f, repetitions) mAP without as many items drawn at random; NaN likewise.
        random_unmatched: (f, repetitions) number of queries without a match left.
    """

    fractions: NDArray[np.float64]
    cleaned: NDArray[np.float64]
    unmatched: NDArray[np.int64]
    random: NDArray[np.float64]
    random_unmatched: NDArray[np.int64]


def clean_gallery(
    positions: Integers,
    relevant: NDArray[np.bool_],
    uncertainty: Floats,
    rng: np.random.Generator,
    fractions: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    repetitions: int = 5,
) -> Cleaning:
    """Remove the gallery's most uncertain items, and as many at random, and rank what is left.

    The queries stay as they are; the number of matches of each is that of the gallery that is
    left (Taha et al., 2019, with a fraction of 0.2 and 5 repetitions).

    Args:
        positions: (n, g) of all gallery items, nearest first. A query that is in the gallery
            itself is the last of its own ranking, and not relevant.
        relevant: (n, g) bool, whether the item at that rank is a true match.
        uncertainty: (g,) of the gallery items, larger is less certain; of like ones, the first is
            removed first.
        rng: source of the random removals.
        fractions: of the gallery to remove, rounded down to items; at least 0, below 1.
        repetitions: number of random removals, each growing from fraction to fraction.

    Raises:
        InvalidData: shapes do not fit, the rankings are not of the whole gallery, an uncertainty
            is NaN, or a fraction is outside [0, 1).

    Example:
        >>> positions = np.array([[0, 1, 2], [2, 0, 1]])
        >>> relevant = np.array([[False, True, False], [True, False, True]])
        >>> uncertainty = np.array([0.9, 0.1, 0.2])
        >>> rng = np.random.default_rng(0)
        >>> found = clean_gallery(positions, relevant, uncertainty, rng, [0.0, 0.4])
        >>> found.cleaned.round(4), found.unmatched
        (array([0.6667, 1.    ]), array([0, 0]))
    """
    check_columns(uncertainty=uncertainty)
    g = len(uncertainty)
    if (
        positions.shape != relevant.shape
        or positions.ndim != 2
        or positions.shape[1] != g
        or not len(positions)
    ):
        raise InvalidData(
            f"positions have shape {positions.shape}, relevant {relevant.shape}; needed is (n, g) "
            f"for both, n at least 1, with rankings of the whole gallery of g = {g} items"
        )
    parts = np.asarray(fractions, np.float64)
    if not ((parts >= 0) & (parts < 1)).all():
        raise InvalidData(f"fractions are {list(fractions)}; allowed is 0 up to, not including, 1")

    if not _all_ranked(positions):
        raise InvalidData(
            f"some rankings do not hold each of the {g} gallery items once: search as deep as the "
            "gallery is large"
        )
    orders = [np.argsort(-uncertainty, kind="stable")]
    orders += [rng.permutation(g) for _ in range(repetitions)]
    means = np.empty((len(parts), len(orders)))
    unmatched = np.empty(means.shape, np.int64)
    for row, part in enumerate(parts):
        for column, order in enumerate(orders):
            remaining = np.ones(g, bool)
            remaining[order[: int(g * part)]] = False
            precisions = _without(positions, relevant, remaining)
            present = precisions[~np.isnan(precisions)]
            unmatched[row, column] = len(precisions) - len(present)
            means[row, column] = present.mean() if len(present) else np.nan
    return Cleaning(parts, means[:, 0], unmatched[:, 0], means[:, 1:], unmatched[:, 1:])


def _all_ranked(positions: Integers) -> bool:
    """Return whether each row holds each position once."""
    n, g = positions.shape
    if positions.max() >= g:
        return False
    for start in range(0, n, max(1, CELLS_TOGETHER // g)):
        block = positions[start : start + max(1, CELLS_TOGETHER // g)]
        seen = np.zeros(block.shape, bool)
        np.put_along_axis(seen, block, True, axis=1)
        if not seen.all():
            return False
    return True


def _without(
    positions: Integers, relevant: NDArray[np.bool_], remaining: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """(n,) average precision of rankings of the kept items; NaN where no match is kept."""
    n, g = positions.shape
    precisions = np.empty(n)
    step = max(1, CELLS_TOGETHER // g)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        # As many items are left of each ranking, in the order they had.
        still_relevant = relevant[rows][remaining[positions[rows]]].reshape(
            -1, np.count_nonzero(remaining)
        )
        precisions[rows] = average_precision(
            still_relevant, np.count_nonzero(still_relevant, axis=1)
        )
    return precisions
