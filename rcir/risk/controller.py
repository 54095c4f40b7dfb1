"""The risk controller: calibration queries in, certified set sizes out.

With s_i the smallest kappa that serves calibration query i, the smallest kappa that certifies
(alpha, delta) is the (M + 1)-th largest s_i, M = `allowed_misses`: if its risk were above alpha, at
most M of the n scores would lie above a kappa* that each exceeds with probability alpha or more,
which happens with probability at most delta. One sort serves every alpha and delta.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData, RiskUnattainable
from rcir.risk import bounds
from rcir.risk.adapters import Floats, SizeAdapter
from rcir.risk.bounds import Bound


class RiskController:
    """Set sizes with a guarantee.

    Attributes:
        adapter: how size depends on uncertainty.
        scores: (n,) sorted, the smallest kappa that serves each calibration query, infinite for a
            query without a match within the search depth.
        depth: number of candidates that were searched; no set is larger.
        bound: "binomial" (exact) or "hoeffding".

    Example:
        >>> import numpy as np
        >>> from rcir.risk import Constant
        >>> ranks = np.repeat([1, 2, 5, np.inf], [860, 60, 60, 20])
        >>> controller = RiskController.calibrate(Constant(), np.zeros(1000), ranks, depth=50)
        >>> controller.kappa(alpha=0.1, delta=0.1)
        1.0
        >>> controller.sizes(np.zeros(3), kappa=1.0)
        array([2, 2, 2])
        >>> round(controller.minimum_alpha(delta=0.1), 4)
        0.0269
    """

    def __init__(
        self,
        adapter: SizeAdapter,
        scores: NDArray[np.float64],
        depth: int,
        bound: Bound = "binomial",
    ) -> None:
        self.adapter = adapter
        self.scores = scores
        self.depth = depth
        self.bound: Bound = bound

    @classmethod
    def calibrate(
        cls,
        adapter: SizeAdapter,
        uncertainty: Floats,
        ranks: NDArray[np.integer[Any]] | Floats,
        depth: int,
        bound: Bound = "binomial",
    ) -> RiskController:
        """Calibrate on queries that neither the encoder nor the adapter was fitted on.

        Args:
            adapter: fitted on other queries.
            uncertainty: (n,) of the calibration queries.
            ranks: (n,) rank of each query's first true match, from 1, infinite where there is none
                within `depth`.
            depth: number of candidates that were searched.
            bound: "binomial" or "hoeffding".

        Raises:
            InvalidData: no queries, unequal lengths, NaN, or a rank outside {1, ..., depth, inf}.
        """
        uncertainty = np.asarray(uncertainty, np.float64)
        ranks = np.asarray(ranks).astype(np.float64)
        if ranks.ndim != 1 or len(ranks) == 0 or ranks.shape != uncertainty.shape:
            raise InvalidData(
                f"uncertainty has shape {uncertainty.shape} and ranks {ranks.shape}; both must be "
                "(n,) with n >= 1"
            )
        if not np.isfinite(uncertainty).all():
            raise InvalidData("some uncertainties of the calibration queries are NaN or infinite")
        served = np.isfinite(ranks)
        whole = (ranks[served] >= 1) & (ranks[served] <= depth) & (ranks[served] % 1 == 0)
        if not whole.all() or not (served | np.isposinf(ranks)).all():
            raise InvalidData(f"ranks must be whole numbers from 1 to {depth}, or infinite")
        return cls(adapter, np.sort(adapter.scores(ranks, uncertainty)), depth, bound)

    @property
    def n_calibration(self) -> int:
        """Number of calibration queries."""
        return len(self.scores)

    @property
    def unmatched(self) -> int:
        """Number of calibration queries without a match within the search depth."""
        return int(np.isinf(self.scores).sum())

    def kappa(self, alpha: float, delta: float) -> float:
        """The smallest kappa whose risk is at most alpha with probability at least 1 - delta.

        Args:
            alpha: share of queries, in (0, 1), whose set may hold no true match.
            delta: probability, in (0, 1), of calibration queries that mislead.

        Raises:
            InvalidRiskLevel: alpha or delta outside (0, 1).
            RiskUnattainable: no kappa is certified.
        """
        allowed = bounds.allowed_misses(self.n_calibration, alpha, delta, self.bound)
        if allowed < self.unmatched:
            raise self._unattainable(alpha, delta)
        return float(self.scores[self.n_calibration - 1 - allowed])

    def risk_bound(self, alpha: float, delta: float) -> float:
        """The risk, at most alpha, that `kappa(alpha, delta)` certifies.

        The smallest level that allows the same number of misses. It depends on n, alpha and delta
        only, not on what the calibration queries showed, which is why it may be claimed.
        """
        allowed = bounds.allowed_misses(self.n_calibration, alpha, delta, self.bound)
        if allowed < self.unmatched:
            raise self._unattainable(alpha, delta)
        return bounds.miss_rate_bound(allowed, self.n_calibration, delta, self.bound)

    def sizes(self, uncertainty: Floats, kappa: float) -> NDArray[np.int64]:
        """(n,) set sizes in {1, ..., depth} for queries of (n,) uncertainties."""
        return np.minimum(self.adapter.sizes(kappa, uncertainty), self.depth)

    def minimum_alpha(self, delta: float) -> float | None:
        """The smallest alpha that can be certified at delta; None if none below 1 can."""
        smallest = bounds.miss_rate_bound(self.unmatched, self.n_calibration, delta, self.bound)
        step = math.ulp(smallest)
        while smallest < 1:
            if bounds.allowed_misses(self.n_calibration, smallest, delta, self.bound) >= (
                self.unmatched
            ):
                return smallest
            smallest, step = smallest + step, 2 * step  # the inverse was rounded down
        return None

    def required_calibration(self, alpha: float, delta: float) -> int | None:
        """Calibration queries needed for (alpha, delta) at today's share of unmatched queries."""
        share = self.unmatched / self.n_calibration
        return bounds.required_calibration(alpha, delta, self.bound, share)

    def _unattainable(self, alpha: float, delta: float) -> RiskUnattainable:
        minimum = self.minimum_alpha(delta)
        required = self.required_calibration(alpha, delta)
        advice = []
        rounded = math.ceil((minimum or 1) * 1e4) / 1e4
        if rounded < 1:
            advice.append(f"ask for alpha >= {rounded:.4f}")
        if required is not None and required > self.n_calibration:
            advice.append(f"calibrate on about {required} queries")
        if self.unmatched:
            advice.append(
                f"search deeper than {self.depth} candidates ({self.unmatched} of "
                f"{self.n_calibration} calibration queries have no match among them)"
            )
        return RiskUnattainable(
            f"alpha = {float(alpha):g} at delta = {float(delta):g} cannot be certified with "
            f"{self.n_calibration} calibration queries: "
            f"{', or '.join(advice) or 'ask for a larger alpha and calibrate on more queries'}",
            minimum_alpha=minimum,
            required_calibration=required,
        )
