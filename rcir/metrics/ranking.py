"""How good a ranking is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def first_match_ranks(relevant: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The rank of each query's first true match.

    Args:
        relevant: (n, depth), whether the candidate at that rank is a true match, nearest first.

    Returns:
        (n,) ranks from 1; infinite where no candidate matches.

    Example:
        >>> first_match_ranks(np.array([[False, True, True], [False, False, False]]))
        array([ 2., inf])
    """
    return np.where(relevant.any(axis=1), relevant.argmax(axis=1) + 1.0, np.inf)


def recall_at_k(ranks: NDArray[np.floating[Any]], k: int) -> float:
    """The fraction of queries with a true match among the first k candidates.

    Args:
        ranks: (n,) of `first_match_ranks`, n >= 1; a query whose gallery holds no match at all
            counts as a miss: leave it out before, if that is not meant.
        k: at least 1.

    Example:
        >>> recall_at_k(np.array([1.0, 3.0, np.inf, 1.0]), 1)
        0.5
    """
    return float(np.mean(ranks <= k))
