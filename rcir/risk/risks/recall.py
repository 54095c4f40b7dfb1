"""The recall risk: true matches of the gallery that a set lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.risk.labelled import LabelledResults
from rcir.risk.risks.base import Risk


class Recall(Risk):
    """The share of the gallery's true matches that the set lacks; 1 if the gallery has none.

    Example:
        >>> from rcir.risk import Constant, SearchResults
        >>> relevant = np.array([[False, True, True], [True, False, False]])
        >>> labelled = LabelledResults.of(SearchResults(np.zeros(2), 3), relevant, np.array([2, 4]))
        >>> thresholds = np.array([0.0, 1.0])  # sets of 1, sets of 2
        >>> Recall().losses(labelled.scored(Constant()), thresholds).tolist()
        [[1.0, 0.5], [0.75, 0.75]]
    """

    name = "recall"
    clause = (
        "at most {alpha} of a query's true {matches}, on average over queries, are missing from "
        "the {sets}"
    )

    def losses(self, results: LabelledResults, thresholds: NDArray[Any]) -> NDArray[np.float64]:
        held = results.held(thresholds, results.relevant)
        return 1 - held / np.maximum(results.totals, 1)[:, None]

    def own_score_function(self, tuning: LabelledResults) -> bool:
        # Of one true match at most there is no recall but whether it is missed. The calibration
        # queries have no say in it.
        return bool(tuning.totals.max() > 1)
