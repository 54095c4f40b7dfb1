"""The controller of the miss risk: calibration queries in, certified set sizes out.

With s_i the smallest threshold that serves calibration query i, the smallest threshold that
certifies (alpha, delta) is the (M + 1)-th largest s_i, M = `allowed_misses`: if its risk were above
alpha, at most M of the n scores would lie at or above a t* that each reaches with probability alpha
or more, which happens with probability at most delta. One sort serves every alpha and delta.

For an alpha chosen after looking see `rcir.risk.band`, for calibration queries that arrive one by
one `rcir.risk.anytime`: the same with other numbers of misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel
from rcir.metrics.checks import Floats
from rcir.risk.anytime import (
    anytime_allowed_misses,
    anytime_miss_rate_bound,
    anytime_required_calibration,
)
from rcir.risk.band import band_required_calibration, local_level
from rcir.risk.bounds import Bound, allowed_misses, check_bound, check_level, miss_rate_bound
from rcir.risk.refusal import required, unattainable
from rcir.risk.score_functions import ScoreFunction, check_ranks
from rcir.risk.search_results import SearchResults


class _Rule(NamedTuple):
    """How misses among the calibration queries certify a risk, for one kind of guarantee."""

    allowed: Callable[[float], int]  # the most misses that certify an alpha
    smallest: Callable[[int], float]  # the smallest alpha that misses certify
    required: Callable[[float], int | None]  # calibration queries with which alpha is certified


class MissController:
    """Set sizes with a guarantee for the miss risk: sets without a true match.

    Attributes:
        score_function: how size depends on the query.
        scores: (n,) sorted, the smallest threshold that serves each calibration query, infinite for
            a query without a match within the search depth.
        depth: number of candidates that were searched; no set is larger.
        bound: see `rcir.risk.p_value`; "binomial" is exact.

    Example:
        >>> import numpy as np
        >>> from rcir.risk import Constant, SearchResults
        >>> ranks = np.repeat([1, 2, 5, np.inf], [860, 60, 60, 20])
        >>> queries = SearchResults(np.zeros(1000), depth=50)
        >>> controller = MissController.calibrate(Constant(), queries, ranks)
        >>> controller.threshold(alpha=0.1, delta=0.1)
        1.0
        >>> controller.sizes(queries[:3], threshold=1.0).tolist()
        [2, 2, 2]
        >>> round(controller.minimum_alpha(delta=0.1), 4)
        0.0269
    """

    def __init__(
        self,
        score_function: ScoreFunction,
        scores: NDArray[np.floating[Any]],
        depth: int,
        bound: Bound = "binomial",
    ) -> None:
        check_bound(bound)
        self.score_function = score_function
        self.scores = np.sort(scores)
        self.depth = depth
        self.bound: Bound = bound

    @classmethod
    def calibrate(
        cls,
        score_function: ScoreFunction,
        results: SearchResults,
        ranks: Floats,
        bound: Bound = "binomial",
    ) -> MissController:
        """Calibrate on queries that neither the encoder nor the score function was fitted on.

        Args:
            score_function: fitted on other queries.
            results: of the n calibration queries.
            ranks: (n,) rank of each query's first true match, from 1, infinite where there is none
                within the search depth.
            bound: see `rcir.risk.p_value`.

        Raises:
            InvalidData: no queries, unequal lengths, NaN, or a rank outside {1, ..., depth, inf}.
        """
        scores = score_function.scores(results, check_ranks(results, ranks))
        return cls(score_function, scores, results.depth, bound)

    @property
    def n_calibration(self) -> int:
        """Number of calibration queries."""
        return len(self.scores)

    @property
    def unmatched(self) -> int:
        """Number of calibration queries without a match within the search depth."""
        return self.n_calibration - int(np.searchsorted(self.scores, np.inf))

    def threshold(
        self,
        alpha: float,
        delta: float | None,
        simultaneous: bool = False,
        *,
        anytime: bool = False,
    ) -> float:
        """The smallest threshold whose risk is at most alpha with probability at least 1 - delta.

        Args:
            alpha: share of queries, in (0, 1), whose set may hold no true match.
            delta: probability, in (0, 1), of calibration queries that mislead; or None for the
                marginal guarantee: the risk is at most alpha on average over calibrations
                (conformal risk control, Angelopoulos et al., ICLR 2024, theorem 1).
            simultaneous: whether the guarantee has to hold for all alpha at once, for an alpha
                chosen after looking; by a band of equal local levels, whatever the bound.
            anytime: whether it has to hold at every number of calibration queries, which arrive one
                by one, each calibrating anew, until the sets are small enough; by a test
                supermartingale, whatever the bound, for one alpha fixed beforehand.

        Raises:
            InvalidRiskLevel: alpha or delta out of range, or no delta for all alpha or numbers.
            InvalidConfig: both simultaneous and anytime.
            RiskUnattainable: no threshold is certified.
        """
        allowed = self._allowed(alpha, delta, simultaneous, anytime)
        return float(self.scores[self.n_calibration - 1 - allowed])

    def risk_bound(
        self,
        alpha: float,
        delta: float | None,
        simultaneous: bool = False,
        *,
        anytime: bool = False,
    ) -> float:
        """The risk, at most alpha, that `threshold` certifies with the same arguments.

        The smallest level that allows the same number of misses. It depends on n, alpha and delta
        only, not on what the calibration queries showed, which is why it may be claimed. With
        `anytime` it is alpha: one level is fixed for all n, whose smallest levels differ.
        """
        allowed = self._allowed(alpha, delta, simultaneous, anytime)
        if anytime:
            return float(alpha)
        return min(alpha, self._rule(delta, simultaneous, anytime).smallest(allowed))

    def size(
        self,
        results: SearchResults,
        alpha: float,
        delta: float | None,
        simultaneous: bool = False,
        *,
        anytime: bool = False,
    ) -> NDArray[np.int64]:
        """(n,) certified set sizes: `sizes` at `threshold` with the same arguments."""
        return self.sizes(results, self.threshold(alpha, delta, simultaneous, anytime=anytime))

    def sizes(self, results: SearchResults, threshold: float) -> NDArray[np.int64]:
        """(n,) set sizes in {1, ..., depth} of queries that were searched as deep.

        Raises:
            InvalidData: they were searched to another depth.
        """
        if results.depth != self.depth:
            raise InvalidData(
                f"the queries were searched to depth {results.depth}, the calibration queries to "
                f"{self.depth}: search alike"
            )
        return self.score_function.sizes(results, threshold)

    def minimum_alpha(
        self, delta: float | None, simultaneous: bool = False, *, anytime: bool = False
    ) -> float | None:
        """The smallest alpha that can be certified at delta; None if none below 1 can."""
        rule = self._rule(delta, simultaneous, anytime)
        smallest = rule.smallest(self.unmatched)
        step = math.ulp(smallest)
        while smallest < 1:
            if rule.allowed(smallest) >= self.unmatched:
                return smallest
            smallest, step = smallest + step, 2 * step  # the inverse was rounded down
        return None

    def required_calibration(
        self,
        alpha: float,
        delta: float | None,
        simultaneous: bool = False,
        *,
        anytime: bool = False,
    ) -> int | None:
        """Calibration queries needed for (alpha, delta) at today's share of unmatched queries."""
        return self._rule(delta, simultaneous, anytime).required(alpha)

    def _allowed(self, alpha: float, delta: float | None, simultaneous: bool, anytime: bool) -> int:
        """The most misses that certify alpha; RiskUnattainable if more queries lack a match."""
        rule = self._rule(delta, simultaneous, anytime)
        allowed = rule.allowed(alpha)
        if allowed >= self.unmatched:
            return allowed
        raise unattainable(
            alpha,
            delta,
            self.n_calibration,
            minimum_alpha=self.minimum_alpha(delta, simultaneous, anytime=anytime),
            required_calibration=rule.required(alpha),
            deeper=f"search deeper than {self.depth} candidates ({self.unmatched} of "
            f"{self.n_calibration} calibration queries have no match among them)"
            if self.unmatched
            else None,
        )

    def _rule(self, delta: float | None, simultaneous: bool, anytime: bool) -> _Rule:
        n, lost = self.n_calibration, self.unmatched
        if simultaneous and anytime:
            raise InvalidConfig(
                "simultaneous=True and anytime=True exclude each other: choose all alpha at once, "
                "or one alpha at every number of calibration queries"
            )
        if delta is None:
            if simultaneous or anytime:
                kind = "simultaneous levels" if simultaneous else "anytime-valid levels"
                raise InvalidRiskLevel(f"{kind} need a delta: give one, such as 0.1")
            return _Rule(
                self._allowed_on_average,
                lambda misses: (misses + 1) / (n + 1),
                lambda alpha: required(alpha, None, self.bound, lost / n),
            )
        level = check_level("delta", delta)
        if anytime:
            return _Rule(
                lambda alpha: anytime_allowed_misses(n, alpha, level),
                lambda misses: anytime_miss_rate_bound(misses, n, level),
                lambda alpha: anytime_required_calibration(alpha, level, lost / n),
            )
        if simultaneous:
            return _Rule(
                lambda alpha: allowed_misses(n, alpha, local_level(n, level)),
                lambda misses: miss_rate_bound(misses, n, local_level(n, level)),
                lambda alpha: band_required_calibration(alpha, level, lost / n),
            )
        return _Rule(
            lambda alpha: allowed_misses(n, alpha, level, self.bound),
            lambda misses: miss_rate_bound(misses, n, level, self.bound),
            lambda alpha: required(alpha, level, self.bound, lost / n),
        )

    def _allowed_on_average(self, alpha: float) -> int:
        # (misses + 1) / (n + 1) <= alpha
        exact = Fraction(check_level("alpha", alpha)) * (self.n_calibration + 1)
        return min(math.floor(exact) - 1, self.n_calibration - 1)
