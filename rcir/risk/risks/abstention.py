"""Abstention: the miss risk of an answer of one candidate, given only where it is likely right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.risk.bounds import check_level, p_values, required_calibration
from rcir.risk.labelled import LabelledResults
from rcir.risk.risks.miss import Miss
from rcir.risk.score_functions import widened
from rcir.risk.testing import fixed_sequence

if TYPE_CHECKING:
    from rcir.risk.controller import RiskController
    from rcir.risk.guarantee import Guarantee
    from rcir.risk.request import Request

THRESHOLDS = 200


class Abstention(Miss):
    """Misses among the answers, each of the first candidate, of the queries that get one.

    It need not fall as more queries are answered.
    """

    sets = "answers"
    falls = False
    exact = False
    independent = True
    abstains = True

    def certify(self, controller: RiskController, request: Request) -> Guarantee:
        if controller.cluster is not None:
            raise InvalidConfig(
                f"queries come in clusters ({controller.cluster}): abstain=True needs independent "
                "queries"
            )
        answers = controller.once(
            (self.key, request.group),
            lambda: AbstentionController(controller.queries(request.group), controller.tuning),
        )
        alpha = float(request.alpha)  # type: ignore[arg-type]
        chosen = answers.threshold(alpha, float(request.delta or 0))
        return controller.guarantee(request, 0.0, "binomial", alpha, chosen)


class AbstentionController:
    """A threshold of selection score: what lies above it is not answered.

    The miss rate among the queries answered is bounded exactly: given how many calibration queries
    a threshold answers, their misses are binomial. Thresholds are tried from the one that looks
    safest on the tuning split towards those that answer more, until one is not certified
    (fixed-sequence testing; the aim is that of Geifman and El-Yaniv, "Selective classification for
    deep neural networks", NeurIPS 2017, without its union bound).

    Args:
        calibration: the calibration queries, scored; the answer is the first candidate.
        tuning: other queries, of the tuning split.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> score = rng.uniform(size=4000)
        >>> right = rng.uniform(size=(4000, 1)) > score[:, None]
        >>> asked = LabelledResults(
        ...     score, 1, relevant=right, totals=np.ones(4000, int), selection_score=score
        ... )
        >>> half, rest = asked[::2], asked[1::2]
        >>> threshold = AbstentionController(half, rest).threshold(alpha=0.2, delta=0.1)
        >>> bool(0.3 < threshold < 0.4)  # below t, t/2 of the answers are wrong
        True
    """

    def __init__(self, calibration: LabelledResults, tuning: LabelledResults) -> None:
        self.calibration, self.tuning = calibration, tuning
        places = np.linspace(0, len(tuning) - 1, THRESHOLDS).astype(np.int64)
        self.thresholds = np.unique(widened(np.sort(tuning.known("selection_score"))[places]))

    def threshold(self, alpha: float, delta: float) -> float:
        """Answer queries whose selection score is at most this.

        With probability at least 1 - delta over calibration queries, at most a fraction alpha of
        the queries answered get an answer without a true match.

        Raises:
            InvalidRiskLevel: alpha or delta outside (0, 1).
            RiskUnattainable: no threshold is certified.
        """
        check_level("alpha", alpha)
        check_level("delta", delta)
        certified = self._certified(alpha, delta)
        if len(certified) == 0:
            smallest = self.minimum_alpha(delta)
            needed = required_calibration(alpha, delta) or "a billion"
            ask = "" if smallest is None else f"ask for alpha >= {smallest:.4f} on new queries, or "
            raise RiskUnattainable(
                f"alpha = {alpha:g} at delta = {delta:g} cannot be certified among answered "
                f"queries, however few of the {len(self.calibration)} are answered: {ask}"
                f"calibrate on more (at least {needed} must be answered)",
                minimum_alpha=smallest,
                required_calibration=None,
            )
        return float(certified[-1])

    def minimum_alpha(self, delta: float) -> float | None:
        """The smallest alpha at which some queries would be answered; to 4 decimals."""
        low, high = 0, 10_000
        while high - low > 1:
            middle = (low + high) // 2
            if len(self._certified(middle / 10_000, delta)):
                high = middle
            else:
                low = middle
        return high / 10_000 if high < 10_000 else None

    def _certified(self, alpha: float, delta: float) -> NDArray[np.float64]:
        """Thresholds that may be used, ascending."""
        safest = int(np.argmin(self._p_values(self.tuning, alpha)))
        values = self._p_values(self.calibration, alpha)[safest:]
        return self.thresholds[safest:][fixed_sequence(values, delta)]

    def _p_values(self, queries: LabelledResults, alpha: float) -> NDArray[np.float64]:
        selection_score = queries.known("selection_score")
        order = np.argsort(selection_score, kind="stable")
        misses = np.concatenate([[0], np.cumsum(~queries.relevant[order, 0])])
        counts = np.searchsorted(selection_score[order], self.thresholds, side="right")
        values = p_values(misses[counts].astype(np.float64), np.maximum(counts, 1), alpha)
        return np.where(counts > 0, values, 1.0)
