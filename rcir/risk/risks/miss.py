"""The miss risk: sets without a true match."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rcir.risk.labelled import LabelledResults
from rcir.risk.risks.base import Risk

if TYPE_CHECKING:
    from rcir.risk.controller import RiskController
    from rcir.risk.guarantee import Guarantee
    from rcir.risk.request import Request


class Miss(Risk):
    """1 if the set holds no true match, else 0.

    Of independent queries it is certified exactly, by `rcir.risk.MissController`; of clusters of
    queries and other mixes of groups, whose losses lie in between, as other risks that fall.

    Example:
        >>> from rcir.risk import Constant, SearchResults
        >>> relevant = np.array([[False, True, True], [True, False, False]])
        >>> labelled = LabelledResults.of(SearchResults(np.zeros(2), 3), relevant, np.array([2, 4]))
        >>> thresholds = np.array([0.0, 1.0])  # sets of 1, sets of 2
        >>> Miss().losses(labelled.scored(Constant()), thresholds).tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """

    name = "miss"
    clause = "a true match is missing from at most {alpha} of the {sets}"
    lacking = "queries' matches"
    binary = True
    first_match = True
    exact = True
    levels = None

    def losses(self, results: LabelledResults, thresholds: NDArray[Any]) -> NDArray[np.float64]:
        return (results.scores[:, None] > thresholds.astype(np.float32)).astype(np.float64)

    def own_score_function(self, tuning: LabelledResults) -> bool:
        return False

    def certify(self, controller: RiskController, request: Request) -> Guarantee:
        if controller.cluster is not None or request.mix is not None:
            return super().certify(controller, request)
        exact = controller.miss(request.group)
        alpha, delta = request.alpha, request.delta
        modes = {"simultaneous": request.simultaneous, "anytime": request.anytime}
        bound: str = "conformal" if delta is None else controller.bound
        bound = "band" if request.simultaneous else "anytime" if request.anytime else bound
        threshold = exact.threshold(alpha, delta, **modes)  # type: ignore[arg-type]
        certified = exact.risk_bound(alpha, delta, **modes)  # type: ignore[arg-type]
        return controller.guarantee(request, threshold, bound, certified)
