"""Whether performance falls as uncertainty grows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.bins import bin_means, equal_count_bins
from rcir.metrics.checks import Floats, check_columns
from rcir.metrics.verification import verification_ap

PERCENTILES = 100


def kendall_over_bins(
    uncertainty: Floats, performance: NDArray[np.bool_] | Floats, bins: int = 20
) -> float:
    """How steadily the mean performance falls from the least to the most uncertain bin.

    Minus Kendall's tau-b of the number of the bin and the mean performance in it (Oh et al., ICLR
    2019).

    Args:
        uncertainty: (n,) larger is less certain.
        performance: (n,) larger is better, such as `knn_correct`.
        bins: number of bins of equal count, 2 to n.

    Returns:
        -1 to 1; 1 where each bin is worse than all before it, NaN where all are the same.

    Raises:
        InvalidData: shapes differ, a value is NaN, there are fewer values than bins, or one bin.

    Example:
        >>> uncertainty = np.array([0.1, 0.4, 0.2, 0.3])
        >>> round(kendall_over_bins(uncertainty, np.array([0.9, 0.2, 0.5, 0.7]), 4), 4)
        0.6667
    """
    check_columns(uncertainty=uncertainty, performance=performance)
    means = bin_means(performance, equal_count_bins(uncertainty, bins), bins)
    return _falling(means)


def kendall_of_pairs(
    uncertainty: Floats, score: Floats, match: NDArray[np.bool_], bins: int = 20
) -> float:
    """How steadily verification gets worse from the least to the most uncertain bin of pairs.

    Minus Kendall's tau-b of the number of the bin and the average precision in it (Oh et al.,
    ICLR 2019).

    Args:
        uncertainty: (n,) of the pairs, the mean of its two items'.
        score: (n,) larger where a match is more likely.
        match: (n,) whether a pair matches.
        bins: number of bins of equal count, 2 to n.

    Returns:
        -1 to 1; NaN where all bins are the same.

    Raises:
        InvalidData: shapes differ, a value is NaN, a bin holds no matching pair, or there is one
            bin.

    Example:
        >>> score, match = np.array([0.9, 0.1, 0.3, 0.4]), np.array([True, False, True, False])
        >>> kendall_of_pairs(np.array([0.1, 0.2, 0.7, 0.8]), score, match, bins=2)
        1.0
    """
    check_columns(uncertainty=uncertainty, score=score, match=match)
    of = equal_count_bins(uncertainty, bins)
    empty = np.flatnonzero(np.bincount(of[match], minlength=bins) == 0)
    if len(empty):
        raise InvalidData(
            f"{len(empty)} of {bins} bins hold no matching pair: give more pairs or fewer bins"
        )
    precisions = [verification_ap(score[of == bin_], match[of == bin_]) for bin_ in range(bins)]
    return _falling(np.array(precisions))


def pearson(uncertainty: Floats, performance: Floats) -> float:
    """Pearson's correlation of uncertainty and performance, query by query.

    Negative where uncertainty is worth something (Taha et al., 2019, with average precisions).

    Args:
        uncertainty: (n,) larger is less certain, n >= 2.
        performance: (n,) larger is better.

    Returns:
        -1 to 1; NaN where one of the two is constant.

    Raises:
        InvalidData: shapes differ, there are fewer than two queries, or a value is NaN.

    Example:
        >>> round(pearson(np.array([1.0, 2.0, 3.0]), np.array([0.9, 0.8, 0.7])), 6)
        -1.0
    """
    check_columns(uncertainty=uncertainty, performance=performance)
    if len(uncertainty) < 2:
        raise InvalidData("a correlation needs at least two queries; there is one")
    if np.ptp(uncertainty) == 0 or np.ptp(performance) == 0:
        return float("nan")
    from scipy import stats  # slow to import

    return float(stats.pearsonr(uncertainty, performance).statistic)


def pearson_over_percentiles(uncertainty: Floats, performance: Floats) -> float:
    """Pearson's correlation of the mean uncertainty and mean performance of percentiles.

    The percentiles are those of performance: 100 groups of equal count (Taha et al., 2019, figure
    6). Averaging takes out the noise of single queries.

    Args:
        uncertainty: (n,) larger is less certain, n >= 100.
        performance: (n,) larger is better, such as average precision.

    Returns:
        -1 to 1; NaN where one of the two is constant.

    Raises:
        InvalidData: shapes differ, there are fewer than 100 queries, or a value is NaN.

    Example:
        >>> performance = np.linspace(0, 1, 300)
        >>> round(pearson_over_percentiles(2 - performance, performance), 6)
        -1.0
    """
    check_columns(uncertainty=uncertainty, performance=performance)
    of = equal_count_bins(performance, PERCENTILES)
    return pearson(bin_means(uncertainty, of, PERCENTILES), bin_means(performance, of, PERCENTILES))


def _falling(means: NDArray[np.float64]) -> float:
    """Minus tau-b of the bins' order and their means."""
    if len(means) < 2:
        raise InvalidData("a trend needs at least two bins; there is one")
    from scipy import stats  # slow to import

    return -float(stats.kendalltau(np.arange(len(means)), means).statistic)
