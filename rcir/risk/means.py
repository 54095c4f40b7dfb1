"""Mean losses that fall as sets grow: certified by confidence bounds of means."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData, InvalidRiskLevel
from rcir.risk.bounds import Bound, Certificate, check_bound, check_level, mean_bound, p_value
from rcir.risk.losses import Risk
from rcir.risk.refusals import refusal, required_queries
from rcir.risk.results import ScoredResults

BET_PRECISION = 1e-9  # of the smallest alpha that a bet certifies


def mean_loss(
    risk: Risk,
    alpha: float,
    delta: float | None,
    calibration: ScoredResults,
    tuning: ScoredResults | None = None,
    bound: Bound = "hoeffding-bentkus",
    *,
    weights: NDArray[np.float64] | None = None,
) -> Certificate:
    """Certify a monotone risk of losses in [0, 1].

    Risk-controlling prediction sets (Bates et al., JACM 2021, theorem 1): the mean loss falls as
    the threshold grows, and so does every bound here, so that bisection finds the smallest
    certified threshold among those at which some set gains a true match. These come from the
    calibration queries, but nothing changes between them: they stand for all thresholds.

    Losses are of independent units. If the queries come in clusters, the unit is the cluster and
    its loss the mean of its queries', so that the certificate is for the queries of new clusters,
    each cluster counted alike (the sampling of Lee, Barber and Willett, "Distribution-free
    inference with hierarchical data", 2023).

    Args:
        risk: a monotone one.
        alpha, delta: see `order_statistic`.
        calibration: the scored calibration queries.
        tuning: the tuning split; the "betting" bound learns its bet from it.
        bound: see `rcir.risk.p_value`; "binomial" for losses 0 or 1 of independent queries.
        weights: (units,) non-negative, with mean 1, of units in another population; they must not
            depend on losses. The bound is then "betting".

    Raises:
        InvalidData: risk or bound do not fit, or the losses are not those of a monotone risk.
        InvalidRiskLevel: alpha or delta is out of range.
        RiskUnattainable: not even the largest sets are certified.
    """
    check_bound(bound)
    whole = risk.binary and calibration.population.clusters is None and weights is None
    if bound == "binomial" and not whole:
        raise InvalidData("the binomial bound is for losses 0 or 1: choose hoeffding-bentkus")
    if not risk.monotone:
        raise InvalidData(f"the {risk.name} risk need not fall as sets grow")
    check_level("alpha", alpha)
    if delta is not None:
        check_level("delta", delta)
    elif weights is not None:
        raise InvalidRiskLevel("another mix of groups needs a delta: give one, such as 0.1")
    bound = bound if weights is None else "betting"
    risk.check_losses(calibration)
    calibrated = MatchLosses(risk, calibration)
    thresholds = calibrated.thresholds
    tuned = MatchLosses(risk, require_tuning(tuning)) if bound == "betting" and delta else None

    def losses(index: int) -> NDArray[np.float64]:
        values = calibrated.at(index)
        return values if weights is None else values * weights

    def certifies(alpha: float) -> Callable[[NDArray[np.float64]], bool]:
        """Return the test of losses at a level."""
        if delta is None:
            return lambda losses: (math.fsum(losses) + 1) / (len(losses) + 1) <= alpha
        if tuned is not None:
            bet = constant_bet(tuned, alpha, delta, calibration.population.n_units, weights)
            wealth = math.log(1 / delta)
            return lambda losses: float(np.log1p(bet * (alpha - losses)).sum()) >= wealth
        return lambda losses: p_value(math.fsum(losses), len(losses), alpha, bound) <= delta

    test, largest = certifies(alpha), losses(len(thresholds) - 1)
    if not test(largest):
        lost = float(largest.mean())
        raise refusal(
            alpha,
            delta,
            calibration,
            minimum_alpha=_smallest_alpha(largest, delta, bound, certifies),
            required_calibration=required_queries(alpha, delta, bound, lost),
            lacking=None if risk.first_match else (risk.lacking, lost),
        )
    smallest = bisect_left(range(len(thresholds) - 1), True, key=lambda i: test(losses(i)))
    return Certificate(
        float(thresholds[smallest]), "conformal" if delta is None else bound, float(alpha)
    )


def _smallest_alpha(
    losses: NDArray[np.float64],
    delta: float | None,
    bound: Bound,
    certifies: Callable[[float], Callable[[NDArray[np.float64]], bool]],
) -> float | None:
    """Return the smallest alpha that losses certify; None if none below 1 is."""
    n, total = len(losses), math.fsum(losses)
    if bound == "betting" and delta is not None:  # the bet depends on alpha: no closed form
        low, high = min(total / n, 1.0), math.nextafter(1.0, 0.0)
        if not certifies(high)(losses):
            return None
        while high - low > BET_PRECISION:
            middle = (low + high) / 2
            low, high = (low, middle) if certifies(middle)(losses) else (middle, high)
        return high
    if delta is None:
        smallest = (total + 1) / (n + 1)
    else:
        smallest = mean_bound(total, n, delta, bound)
        step = math.ulp(smallest)
        while smallest < 1 and not certifies(smallest)(losses):
            smallest, step = smallest + step, 2 * step  # the inverse was rounded down
    return smallest if smallest < 1 else None


def require_tuning(tuning: ScoredResults | None) -> ScoredResults:
    """Return the scored tuning split, or raise `InvalidData` if there is none."""
    if tuning is None:
        raise InvalidData("this request needs the tuning split: pass it, scored")
    return tuning


@dataclass(frozen=True, eq=False)
class MatchLosses:
    """Losses at the thresholds at which some set gains a true match.

    Bisections at several levels need the losses at the same few thresholds: each is computed once.
    """

    risk: Risk
    scored: ScoredResults
    _computed: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    @cached_property
    def thresholds(self) -> NDArray[np.float32]:
        """The thresholds, ascending."""
        return self.scored.match_thresholds()

    def at(self, index: int) -> NDArray[np.float64]:
        """(units,) losses at a threshold."""
        if index not in self._computed:
            threshold = self.thresholds[index : index + 1]
            self._computed[index] = self.risk.unit_losses(self.scored, threshold)[:, 0]
        return self._computed[index]


def constant_bet(
    tuned: MatchLosses,
    alpha: float,
    delta: float,
    n: int,
    weights: NDArray[np.float64] | None = None,
) -> float:
    """Return the fraction of the wealth to bet on every loss of n units.

    The bet of Waudby-Smith and Ramdas (JRSS-B 2024, eq. 26) for the variance that the tuning split
    has where its mean loss is about alpha. One bet for every threshold and unit keeps the wealth
    monotone in the threshold. Weighted losses have different means. The product of independent
    factors is at most the corresponding power of their mean (inequality of arithmetic and geometric
    means), so that the mean of all is what is tested.
    """
    last = len(tuned.thresholds) - 1
    chosen = bisect_left(range(last), True, key=lambda i: tuned.at(i).mean() <= alpha)
    spread = tuned.at(chosen)
    # A split without any variance does not prove that there is none: one unit of 1/4 is added.
    variance = (float(spread.var()) * len(spread) + 0.25) / (len(spread) + 1)
    largest = 1.0
    if weights is not None:
        variance *= float((weights**2).mean())
        largest = max(1.0, float(weights.max()))
    return min(1.0 / largest, math.sqrt(2 * math.log(1 / delta) / (n * variance)))
