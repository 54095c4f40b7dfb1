"""Quality of an uncertainty: calibration and sparsification."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.ranking import Floats, check_columns, per_match

PERCENTS = np.arange(99)


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: bins of confidence, from least to most confident.

    Attributes:
        confidence: (bins,) mid-point of each bin, or mean of equally filled bins.
        accuracy: (bins,) mean result of its queries; NaN in an empty bin.
        count: (bins,) number of queries.
        error: expected calibration error, the count-weighted mean of |accuracy - confidence|.
    """

    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    count: NDArray[np.int64]
    error: float


def confidence(uncertainty: Floats, low: float, high: float) -> NDArray[np.float64]:
    """Return one minus the uncertainty, scaled from [low, high] to [0, 1] and clipped.

    Take `low` and `high` from other queries than the measured ones, whose outliers would move them.

    Example:
        >>> confidence(np.array([0.5, 1.5, 9.0]), low=1.0, high=2.0)
        array([1. , 0.5, 0. ])
    """
    span = high - low if high > low else 1.0
    return 1 - np.clip((np.asarray(uncertainty, np.float64) - low) / span, 0, 1)


def reliability(
    confidence: Floats,
    correct: NDArray[np.bool_] | Floats,
    bins: int = 10,
    *,
    equal_mass: bool = False,
) -> Reliability:
    """Compute recall at 1 by bins of confidence (Warburg et al., ICCV 2021, section 4).

    Args:
        confidence: (n,) in [0, 1]; see `confidence`.
        correct: (n,) whether the first candidate matches.
        bins: number of equal-width bins; 1.0 belongs to the last.
        equal_mass: True for bins with equally many queries, at their mean confidence.

    Raises:
        InvalidData: shapes differ, there is no query, or a confidence is outside [0, 1].

    Example:
        >>> diagram = reliability(np.array([0.05, 0.95, 1.0]), np.array([False, True, False]))
        >>> diagram.count[-1], diagram.accuracy[-1], round(diagram.error, 3)
        (np.int64(2), np.float64(0.5), 0.317)
    """
    values = np.asarray(confidence, np.float64)
    check_columns(confidence=values, correct=correct)
    if bins < 1 or not ((values >= 0) & (values <= 1)).all():
        raise InvalidData(
            f"confidences span {values.min():.4g} to {values.max():.4g} for {bins} bins; they must "
            "lie in [0, 1], with at least 1 bin"
        )
    numbers = np.minimum((values * bins).astype(np.int64), bins - 1)
    if equal_mass:
        numbers[np.argsort(values, kind="stable")] = np.arange(len(values)) * bins // len(values)
    count = np.bincount(numbers, minlength=bins)
    totals = np.bincount(numbers, np.asarray(correct, np.float64), bins).astype(np.float64)
    accuracy = per_match(totals, count)
    middles = (np.arange(bins) + 0.5) / bins
    if equal_mass:
        middles = per_match(np.bincount(numbers, values, bins).astype(np.float64), count)
    gap = np.where(count > 0, np.abs(accuracy - middles), 0)
    return Reliability(middles, accuracy, count, float((gap * count).sum() / count.sum()))


def auroc(positive: NDArray[np.bool_], score: Floats) -> float:
    """Return the share of pairs of a positive and another whose positive has the larger score.

    Equal scores count half. NaN unless there are both.
    """
    from scipy.stats import rankdata  # slow to import, and no query needs it

    n, m = int(positive.sum()), int((~positive).sum())
    ranks = rankdata(score)[positive].sum() - n * (n + 1) / 2
    return float(ranks / (n * m)) if n and m else np.nan


@dataclass(frozen=True)
class Sparsification:
    """Mean performance of the remaining queries as more and more are left out.

    Attributes:
        fractions: (99,) of the queries left out, 0 to 0.98.
        curve: (99,) mean performance of the rest, the most uncertain left out first.
        oracle_curve: (99,) the same, the worst performing left out first.
        ausc: area under the curve, divided by the range of the fractions.
        oracle: area under the oracle's curve, the largest possible.
        random: expected area of a random order, the mean performance.
    """

    fractions: NDArray[np.float64]
    curve: NDArray[np.float64]
    oracle_curve: NDArray[np.float64]
    ausc: float
    oracle: float
    random: float


def sparsification(uncertainty: Floats, performance: NDArray[np.bool_] | Floats) -> Sparsification:
    """Compute the sparsification curve and the area under it, AUSC.

    For r from 0 to 98 percent, the floor(n r / 100) most uncertain queries are left out. The area
    is by trapezoids, so that a model that is always right has 1 (Warburg et al., NeurIPS 2023,
    whose sum gives 98/99).

    Args:
        uncertainty: (n,) larger is less certain. Of equal ones, the first is left out first.
        performance: (n,) larger is better, such as the average precision; queries without a match
            must be left out.

    Raises:
        InvalidData: shapes differ, there is no query, or a value is NaN.

    Example:
        >>> scores = sparsification(np.array([0.1, 0.2, 0.3, 0.9]), np.array([1, 1, 1, 0.0]))
        >>> scores.curve[[0, 24, 25]], scores.random, scores.ausc == scores.oracle
        (array([0.75, 0.75, 1.  ]), 0.75, True)
    """
    values = np.asarray(performance, np.float64)
    check_columns(uncertainty=uncertainty, performance=values)
    fractions = PERCENTS / 100
    curve = _means_of_rest(values[np.argsort(-uncertainty, kind="stable")])
    oracle_curve = _means_of_rest(np.sort(values))
    return Sparsification(
        fractions,
        curve,
        oracle_curve,
        float(np.trapezoid(curve, fractions) / fractions[-1]),
        float(np.trapezoid(oracle_curve, fractions) / fractions[-1]),
        float(values.mean()),
    )


def _means_of_rest(ordered: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means (99,) of what follows the first r percent."""
    n = len(ordered)
    dropped = n * PERCENTS // 100
    sums = np.cumsum(ordered[::-1])[::-1]
    return np.asarray(sums[dropped] / (n - dropped), np.float64)
