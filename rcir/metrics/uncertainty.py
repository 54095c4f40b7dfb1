"""Whether an uncertainty means what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: equal-width bins of confidence, from least to most confident.

    Attributes:
        confidence: (bins,) mid-points of the bins.
        recall: (bins,) fraction of the bin's queries with a right top-1; NaN in an empty bin.
        count: (bins,) number of queries.
        error: expected calibration error, the count-weighted mean of |recall - confidence|.
    """

    confidence: NDArray[np.float64]
    recall: NDArray[np.float64]
    count: NDArray[np.int64]
    error: float


def confidence(
    uncertainty: NDArray[np.floating[Any]], low: float, high: float
) -> NDArray[np.float64]:
    """One minus the uncertainty scaled from [low, high] to [0, 1] and clipped.

    `low` and `high` belong to queries other than the ones measured: a range taken from the
    measured queries themselves moves with their outliers.
    """
    span = high - low if high > low else 1.0
    return 1 - np.clip((np.asarray(uncertainty, np.float64) - low) / span, 0, 1)


def reliability(
    confidence: NDArray[np.floating[Any]], correct: NDArray[np.bool_], bins: int = 10
) -> Reliability:
    """Recall at 1 against confidence (Warburg et al., ICCV 2021, section 4), mid-points of bins.

    Args:
        confidence: (n,) in [0, 1]; see `confidence`.
        correct: (n,) whether the top-1 is a true match.
        bins: number of equal-width bins; 1.0 belongs to the last.

    Example:
        >>> diagram = reliability(np.array([0.05, 0.95, 1.0]), np.array([False, True, False]))
        >>> diagram.count[-1], diagram.recall[-1], round(diagram.error, 3)
        (np.int64(2), np.float64(0.5), 0.317)
    """
    bin_of = np.minimum((np.asarray(confidence) * bins).astype(np.int64), bins - 1)
    count = np.bincount(bin_of, minlength=bins)
    hits = np.bincount(bin_of, weights=correct, minlength=bins)
    recall = np.divide(hits, count, out=np.full(bins, np.nan), where=count > 0)
    middle = (np.arange(bins) + 0.5) / bins
    gap = np.where(count > 0, np.abs(recall - middle), 0)
    return Reliability(middle, recall, count, float((gap * count).sum() / count.sum()))
