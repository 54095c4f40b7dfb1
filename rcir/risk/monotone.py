"""The controller of monotone losses in [0, 1]: recall, and misses of clusters of queries."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData, InvalidRiskLevel
from rcir.risk.bounds import Bound, check_bound, check_level, mean_bound, p_value
from rcir.risk.labelled import LabelledResults
from rcir.risk.refusal import required, unattainable
from rcir.risk.risks import find_risk


class MonotoneController:
    """Set sizes whose mean loss, of a risk that falls as sets grow, is at most alpha.

    Risk-controlling prediction sets (Bates et al., JACM 2021, theorem 1): the mean loss falls as
    threshold grows, and so does every bound here, so that the smallest certified threshold is found
    by bisection among the thresholds at which some set gains a true match. These come from the
    calibration queries themselves, but nothing changes between them: they stand for all thresholds.

    Losses are of independent units. Where the queries come in clusters, the unit is the cluster and
    its loss the mean of its queries', so that the certificate is for the queries of new clusters,
    each cluster counted alike (the sampling of Lee, Barber and Willett, "Distribution-free
    inference with hierarchical data", 2023).

    Args:
        calibration: the calibration queries.
        tuning: other queries, of the tuning split; the "betting" bound learns its stake there.
        risk: the name of one that falls.
        bound: see `rcir.risk.p_value`; "binomial" for losses 0 or 1 of independent queries.
        weights: (units,) of mean 1, not negative, for another mix of units than the calibration's;
            they must not come from losses. Then the bound is "betting".

    Example:
        >>> from rcir.risk import Constant, SearchResults
        >>> relevant = np.array([[True, True, False]] * 300 + [[True, False, True]] * 100)
        >>> queries = SearchResults(np.zeros(400), depth=3)
        >>> labelled = LabelledResults.of(queries, relevant, np.full(400, 2)).scored(Constant())
        >>> halves = (labelled[slice(start, None, 2)] for start in (0, 1))
        >>> controller = MonotoneController(*halves, risk="recall")
        >>> controller.threshold(alpha=0.2, delta=0.1)  # sets of 2 lack a half in a quarter of them
        1.0
    """

    def __init__(
        self,
        calibration: LabelledResults,
        tuning: LabelledResults,
        risk: str,
        bound: Bound = "hoeffding-bentkus",
        weights: NDArray[np.float64] | None = None,
    ) -> None:
        check_bound(bound)
        self.risk = find_risk(risk)
        whole = self.risk.binary and calibration.clusters is None and weights is None
        if bound == "binomial" and not whole:
            raise InvalidData("the binomial bound is for losses 0 or 1: choose hoeffding-bentkus")
        if not self.risk.falls:
            raise InvalidData(f"the {risk} risk need not fall as sets grow")
        self.calibration, self.tuning = calibration, tuning
        self.bound: Bound = bound if weights is None else "betting"
        self.weights = weights
        self._stakes: dict[tuple[float, float], float] = {}
        self.thresholds = _steps(calibration)

    def threshold(self, alpha: float, delta: float | None) -> float:
        """The smallest certified threshold; alpha and delta as in `MissController.threshold`.

        Raises:
            InvalidRiskLevel: alpha or delta out of range.
            RiskUnattainable: not even the largest sets are certified.
        """
        check_level("alpha", alpha)
        if delta is not None:
            check_level("delta", delta)
        elif self.weights is not None:
            raise InvalidRiskLevel("another mix of units needs a delta: give one, such as 0.1")
        low, high = -1, len(self.thresholds) - 1
        if not self._certified(high, alpha, delta):
            raise self._unattainable(alpha, delta)
        while high - low > 1:
            middle = (low + high) // 2
            if self._certified(middle, alpha, delta):
                high = middle
            else:
                low = middle
        return float(self.thresholds[high])

    def minimum_alpha(self, delta: float | None) -> float | None:
        """The smallest alpha that can be certified at delta; None if none below 1 can."""
        last = len(self.thresholds) - 1
        losses = self._losses(last)
        n, total = len(losses), math.fsum(losses)
        if delta is None:
            smallest = (total + 1) / (n + 1)
            return smallest if smallest < 1 else None
        if self.bound != "betting":
            smallest = mean_bound(total, n, delta, self.bound)
            step = math.ulp(smallest)
            while smallest < 1 and not self._certified(last, smallest, delta):
                smallest, step = smallest + step, 2 * step  # the inverse was rounded down
            return smallest if smallest < 1 else None
        low, high = min(total / n, 1.0), math.nextafter(1.0, 0.0)
        if not self._certified(last, high, delta):
            return None
        while high - low > 1e-9:  # the stake depends on alpha: no closed form
            middle = (low + high) / 2
            if self._certified(last, middle, delta):
                high = middle
            else:
                low = middle
        return high

    def _certified(self, index: int, alpha: float, delta: float | None) -> bool:
        losses = self._losses(index)
        n, total = len(losses), math.fsum(losses)
        if delta is None:
            return (total + 1) / (n + 1) <= alpha
        if self.bound == "betting":
            if (alpha, delta) not in self._stakes:
                self._stakes[alpha, delta] = self._stake(alpha, delta)
            stake = self._stakes[alpha, delta]
            return float(np.log1p(stake * (alpha - losses)).sum()) >= math.log(1 / delta)
        return p_value(total, n, alpha, self.bound) <= delta

    def _losses(self, index: int) -> NDArray[np.float64]:
        """(units,) at one threshold, weighted."""
        threshold = self.thresholds[index : index + 1]
        losses = self.risk.unit_losses(self.calibration, threshold)[:, 0]
        return losses if self.weights is None else losses * self.weights

    def _stake(self, alpha: float, delta: float) -> float:
        """The bet (Waudby-Smith and Ramdas, JRSS-B 2024, eq. 26) for the tuning split's variance.

        One stake for every threshold and unit keeps what is owned monotone in threshold. Weighted
        losses have means of their own: that of the product of independent factors is at most the
            mean's
        power (arithmetic and geometric mean), so that the mean of all is what is refuted.
        """
        thresholds = _steps(self.tuning)
        low, high = -1, len(thresholds) - 1
        while high - low > 1:  # the sets whose mean loss on the tuning split is about alpha
            middle = (low + high) // 2
            mean = self.risk.unit_losses(self.tuning, thresholds[middle : middle + 1]).mean()
            low, high = (low, middle) if mean <= alpha else (middle, high)
        losses = self.risk.unit_losses(self.tuning, thresholds[high : high + 1])
        n = self.calibration.units
        # A split that shows no spread at all proves none: one unit of spread 1/2 is added.
        variance = (float(losses.var()) * len(losses) + 0.25) / (len(losses) + 1)
        largest = 1.0
        if self.weights is not None:
            variance *= float((self.weights**2).mean())
            largest = max(1.0, float(self.weights.max()))
        return min(1.0 / largest, math.sqrt(2 * math.log(1 / delta) / (n * variance)))

    def _unattainable(self, alpha: float, delta: float | None) -> Exception:
        lost = float(self._losses(len(self.thresholds) - 1).mean())
        return unattainable(
            alpha,
            delta,
            self.calibration.units,
            unit="queries" if self.calibration.clusters is None else "clusters",
            minimum_alpha=self.minimum_alpha(delta),
            required_calibration=required(alpha, delta, self.bound, lost),
            deeper=f"search deeper than {self.calibration.depth} candidates (a "
            f"share {lost:.4f} of the {self.risk.lacking} is not among them)"
            if lost > 0
            else None,
        )


def _steps(labelled: LabelledResults) -> NDArray[np.float32]:
    """The thresholds at which some set gains a true match, ascending."""
    steps = labelled.match_scores
    return steps if len(steps) else np.zeros(1, np.float32)
