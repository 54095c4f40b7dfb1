"""Groups of queries of like confidence or uncertainty, and their means."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.checks import Floats


def equal_width_bins(values: Floats, bins: int) -> NDArray[np.int64]:
    """(n,) the bin of each value in [0, 1], from 0; 1 belongs to the last.

    Raises:
        InvalidData: a value is outside [0, 1], or there is no bin.

    Example:
        >>> equal_width_bins(np.array([0.0, 0.09, 0.1, 1.0]), 10).tolist()
        [0, 0, 1, 9]
    """
    if bins < 1 or not ((values >= 0) & (values <= 1)).all():
        raise InvalidData(
            f"confidences span {values.min():.4g} to {values.max():.4g} for {bins} bins; allowed "
            "are 0 to 1 and at least 1 bin: scale them with `confidence`"
        )
    return np.minimum((values * bins).astype(np.int64), bins - 1)


def equal_count_bins(values: Floats, bins: int) -> NDArray[np.int64]:
    """(n,) the bin of each value, from 0 for the smallest; like values in order of their index.

    Raises:
        InvalidData: there are fewer values than bins, or no bin.

    Example:
        >>> equal_count_bins(np.array([0.3, 9.0, 0.1, 0.2]), 2).tolist()
        [1, 1, 0, 0]
    """
    n = len(values)
    if not 1 <= bins <= n:
        raise InvalidData(f"{bins} bins of {n} values; allowed are 1 to {n} bins")
    of = np.empty(n, np.int64)
    of[np.argsort(values, kind="stable")] = np.arange(n) * bins // n
    return of


def bin_means(
    values: Floats | NDArray[np.bool_], of: NDArray[np.int64], bins: int
) -> NDArray[np.float64]:
    """(bins,) the mean value of each bin; NaN where a bin is empty.

    Example:
        >>> bin_means(np.array([1.0, 3.0, 5.0]), np.array([0, 0, 2]), 3)
        array([ 2., nan,  5.])
    """
    count = np.bincount(of, minlength=bins)
    total = np.bincount(of, weights=values, minlength=bins)
    mean = np.full(bins, np.nan)
    np.divide(total, count, out=mean, where=count > 0)
    return mean
