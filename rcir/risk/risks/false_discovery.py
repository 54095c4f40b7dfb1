"""The false-discovery risk: items of a set that are no true matches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.risk.labelled import LabelledResults
from rcir.risk.risks.base import Risk


class FalseDiscovery(Risk):
    """The share of the set that is no true match.

    It need not fall as sets grow, and small sets satisfy it best: of those certified the largest
    are returned.

    Example:
        >>> from rcir.risk import Constant, SearchResults
        >>> relevant = np.array([[False, True, True]])
        >>> labelled = LabelledResults.of(SearchResults(np.zeros(1), 3), relevant, np.array([2]))
        >>> thresholds = np.array([0.0, 1.0])  # sets of 1, sets of 2
        >>> FalseDiscovery().losses(labelled.scored(Constant()), thresholds).tolist()
        [[1.0, 0.5]]
    """

    name = "false-discovery"
    clause = "at most {alpha} of a set's {items}, on average over queries, are wrong in the {sets}"
    falls = False
    levels = (0.1, 0.2, 0.3, 0.5, 0.7)

    def losses(self, results: LabelledResults, thresholds: NDArray[Any]) -> NDArray[np.float64]:
        right = results.held(thresholds, results.relevant)
        there = np.isfinite(results.known("candidate_scores"))
        return 1 - right / results.held(thresholds, there)
