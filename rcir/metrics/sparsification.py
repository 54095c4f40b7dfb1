"""Whether leaving out the uncertain queries leaves the good ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rcir.metrics.checks import Floats, check_columns

PERCENTS = np.arange(99)


@dataclass(frozen=True)
class Sparsification:
    """The mean performance of the queries that are left, as ever more are left out.

    Attributes:
        fractions: (99,) of the queries left out, 0 to 0.98.
        curve: (99,) mean performance of the rest, the most uncertain left out first.
        oracle_curve: (99,) the same, the worst performing left out first.
        ausc: area under the curve, divided by the range of the fractions.
        oracle: that of the oracle's curve: no order has more.
        random: that of a random order, on average, which is the mean performance.
    """

    fractions: NDArray[np.float64]
    curve: NDArray[np.float64]
    oracle_curve: NDArray[np.float64]
    ausc: float
    oracle: float
    random: float


def sparsification(uncertainty: Floats, performance: NDArray[np.bool_] | Floats) -> Sparsification:
    """Sparsification curve and the area under it, AUSC.

    For r from 0 to 98 percent, the floor(n r / 100) most uncertain queries are left out. The area
    is by trapezoids, so that a model that is always right has 1 (Warburg et al., NeurIPS 2023;
    their own sum makes that 98/99).

    Args:
        uncertainty: (n,) larger is less certain; of the query, or its sum with that of its first
            candidate. Of like ones, the first is left out first.
        performance: (n,) larger is better, such as whether the top-1 is right or the average
            precision, queries without a match left out.

    Raises:
        InvalidData: shapes differ, there is no query, or a value is NaN.

    Example:
        >>> found = sparsification(np.array([0.1, 0.2, 0.3, 0.9]), np.array([1, 1, 1, 0.0]))
        >>> found.curve[[0, 24, 25]], found.random
        (array([0.75, 0.75, 1.  ]), 0.75)
        >>> found.ausc == found.oracle
        True
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
    """(99,) the means of what follows the first r percent."""
    n = len(ordered)
    dropped = n * PERCENTS // 100
    sums = np.cumsum(ordered[::-1])[::-1]
    return np.asarray(sums[dropped] / (n - dropped), np.float64)
