"""Which of many hypotheses to reject, a true one with probability at most delta."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.risk.bounds import check_level


def fixed_sequence(p_values: ArrayLike, delta: float) -> NDArray[np.bool_]:
    """Reject in the order given until one is not rejected.

    The order must not come from the data that the p-values come from. Source: Learn Then Test
    (Angelopoulos et al., 2021, proposition 4).

    Example:
        >>> fixed_sequence([0.01, 0.09, 0.2, 0.001], delta=0.1).tolist()
        [True, True, False, False]
    """
    check_level("delta", delta)
    return np.logical_and.accumulate(np.asarray(p_values, np.float64) <= delta)


def bonferroni_holm(p_values: ArrayLike, delta: float) -> NDArray[np.bool_]:
    """Reject the smallest p-value at delta / m, the next at delta / (m - 1), until one fails.

    Source: Holm (1979); needs no order.

    Example:
        >>> bonferroni_holm([0.06, 0.02, 0.001], delta=0.1).tolist()
        [True, True, True]
        >>> bonferroni_holm([0.2, 0.06, 0.001], delta=0.1).tolist()
        [False, False, True]
    """
    check_level("delta", delta)
    values = np.asarray(p_values, np.float64)
    order = np.argsort(values, kind="stable")
    limits = delta / np.arange(len(values), 0, -1)
    rejected = np.zeros(len(values), bool)
    rejected[order] = np.logical_and.accumulate(values[order] <= limits)
    return rejected
