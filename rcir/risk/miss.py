"""The risk controller: calibration queries in, certified set sizes out.

With s_i the smallest kappa that serves calibration query i, the smallest kappa that certifies
(alpha, delta) is the (M + 1)-th largest s_i, M = `allowed_misses`: if its risk were above alpha, at
most M of the n scores would lie at or above a kappa* that each reaches with probability alpha or
more, which happens with probability at most delta. One sort serves every alpha and delta.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData, InvalidRiskLevel, RiskUnattainable
from rcir.risk import bounds
from rcir.risk.adapters import SizeAdapter, check_ranks
from rcir.risk.bounds import Bound, check_bound, check_level
from rcir.risk.rankings import Floats, Rankings
from rcir.risk.refusal import required, unattainable


class MissController:
    """Set sizes with a guarantee for the miss risk: sets without a true match.

    Attributes:
        adapter: how size depends on the query.
        scores: (n,) sorted, the smallest kappa that serves each calibration query, infinite for a
            query without a match within the search depth.
        depth: number of candidates that were searched; no set is larger.
        bound: see `rcir.risk.p_value`; "binomial" is exact.

    Example:
        >>> import numpy as np
        >>> from rcir.risk import Constant, Rankings
        >>> ranks = np.repeat([1, 2, 5, np.inf], [860, 60, 60, 20])
        >>> queries = Rankings(np.zeros(1000), depth=50)
        >>> controller = MissController.calibrate(Constant(), queries, ranks)
        >>> controller.kappa(alpha=0.1, delta=0.1)
        1.0
        >>> controller.sizes(queries[:3], kappa=1.0).tolist()
        [2, 2, 2]
        >>> round(controller.minimum_alpha(delta=0.1), 4)
        0.0269
    """

    def __init__(
        self,
        adapter: SizeAdapter,
        scores: NDArray[np.floating[Any]],
        depth: int,
        bound: Bound = "binomial",
    ) -> None:
        check_bound(bound)
        self.adapter = adapter
        self.scores = np.sort(scores)
        self.depth = depth
        self.bound: Bound = bound

    @classmethod
    def calibrate(
        cls, adapter: SizeAdapter, rankings: Rankings, ranks: Floats, bound: Bound = "binomial"
    ) -> MissController:
        """Calibrate on queries that neither the encoder nor the adapter was fitted on.

        Args:
            adapter: fitted on other queries.
            rankings: of the n calibration queries.
            ranks: (n,) rank of each query's first true match, from 1, infinite where there is none
                within the search depth.
            bound: see `rcir.risk.p_value`.

        Raises:
            InvalidData: no queries, unequal lengths, NaN, or a rank outside {1, ..., depth, inf}.
        """
        scores = adapter.scores(rankings, check_ranks(rankings, ranks))
        return cls(adapter, scores, rankings.depth, bound)

    @property
    def n_calibration(self) -> int:
        """Number of calibration queries."""
        return len(self.scores)

    @property
    def unmatched(self) -> int:
        """Number of calibration queries without a match within the search depth."""
        return self.n_calibration - int(np.searchsorted(self.scores, np.inf))

    def kappa(self, alpha: float, delta: float | None, simultaneous: bool = False) -> float:
        """The smallest kappa whose risk is at most alpha with probability at least 1 - delta.

        Args:
            alpha: share of queries, in (0, 1), whose set may hold no true match.
            delta: probability, in (0, 1), of calibration queries that mislead; or None for the
                marginal guarantee: the risk is at most alpha on average over calibrations
                (conformal risk control, Angelopoulos et al., ICLR 2024, theorem 1).
            simultaneous: whether the statement has to hold for all alpha at once, for an alpha
                chosen after looking; by the Dvoretzky-Kiefer-Wolfowitz inequality with Massart's
                constant, whatever the bound; delta is then at most 1/2.

        Raises:
            InvalidRiskLevel: alpha or delta out of range.
            RiskUnattainable: no kappa is certified.
        """
        allowed = self._allowed(alpha, delta, simultaneous)
        if allowed < self.unmatched:
            raise self._unattainable(alpha, delta, simultaneous)
        return float(self.scores[self.n_calibration - 1 - allowed])

    def risk_bound(self, alpha: float, delta: float | None, simultaneous: bool = False) -> float:
        """The risk, at most alpha, that `kappa(alpha, delta, simultaneous)` certifies.

        The smallest level that allows the same number of misses. It depends on n, alpha and delta
        only, not on what the calibration queries showed, which is why it may be claimed.
        """
        allowed = self._allowed(alpha, delta, simultaneous)
        if allowed < self.unmatched:
            raise self._unattainable(alpha, delta, simultaneous)
        if delta is None:
            return (allowed + 1) / (self.n_calibration + 1)
        bound = "hoeffding" if simultaneous else self.bound
        return min(alpha, bounds.miss_rate_bound(allowed, self.n_calibration, delta, bound))

    def size(
        self,
        rankings: Rankings,
        alpha: float,
        delta: float | None,
        simultaneous: bool = False,
    ) -> NDArray[np.int64]:
        """(n,) certified set sizes: `sizes` at `kappa(alpha, delta, simultaneous)`."""
        return self.sizes(rankings, self.kappa(alpha, delta, simultaneous))

    def sizes(self, rankings: Rankings, kappa: float) -> NDArray[np.int64]:
        """(n,) set sizes in {1, ..., depth} of queries that were searched as deep.

        Raises:
            InvalidData: they were searched to another depth.
        """
        if rankings.depth != self.depth:
            raise InvalidData(
                f"the queries were searched to depth {rankings.depth}, the calibration queries to "
                f"{self.depth}: search alike"
            )
        return self.adapter.sizes(rankings, kappa)

    def minimum_alpha(self, delta: float | None, simultaneous: bool = False) -> float | None:
        """The smallest alpha that can be certified at delta; None if none below 1 can."""
        n, lost = self.n_calibration, self.unmatched
        if delta is None:
            smallest = (lost + 1) / (n + 1)
        else:
            bound = "hoeffding" if simultaneous else self.bound
            smallest = bounds.miss_rate_bound(lost, n, delta, bound)
        step = math.ulp(smallest)
        while smallest < 1:
            if self._allowed(smallest, delta, simultaneous) >= lost:
                return smallest
            smallest, step = smallest + step, 2 * step  # the inverse was rounded down
        return None

    def required_calibration(
        self, alpha: float, delta: float | None, simultaneous: bool = False
    ) -> int | None:
        """Calibration queries needed for (alpha, delta) at today's share of unmatched queries."""
        return required(
            alpha,
            delta,
            "hoeffding" if simultaneous else self.bound,
            self.unmatched / self.n_calibration,
        )

    def _allowed(self, alpha: float, delta: float | None, simultaneous: bool) -> int:
        if delta is None:
            if simultaneous:
                raise InvalidRiskLevel("simultaneous levels need a delta: give one, such as 0.1")
            # (misses + 1) / (n + 1) <= alpha
            allowed = math.floor(Fraction(check_level("alpha", alpha)) * (len(self.scores) + 1)) - 1
            return min(allowed, self.n_calibration - 1)
        if simultaneous and check_level("delta", delta) > 0.5:
            raise InvalidRiskLevel(f"delta is {delta}; simultaneous levels need one up to 0.5")
        bound = "hoeffding" if simultaneous else self.bound
        return bounds.allowed_misses(self.n_calibration, alpha, delta, bound)

    def _unattainable(
        self, alpha: float, delta: float | None, simultaneous: bool
    ) -> RiskUnattainable:
        return unattainable(
            alpha,
            delta,
            self.n_calibration,
            minimum_alpha=self.minimum_alpha(delta, simultaneous),
            required_calibration=self.required_calibration(alpha, delta, simultaneous),
            deeper=f"search deeper than {self.depth} candidates ({self.unmatched} of "
            f"{self.n_calibration} calibration queries have no match among them)"
            if self.unmatched
            else None,
        )
