"""Mean losses that fall as sets grow: certified by confidence bounds of means."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData, InvalidRiskLevel
from rcir.risk.betting import Bets
from rcir.risk.bounds import Bound, Certificate, check_bound, check_level, mean_bound, p_value
from rcir.risk.losses import Risk
from rcir.risk.refusals import refusal, required_queries
from rcir.risk.results import ScoredResults


def mean_loss(
    risk: Risk,
    alpha: float,
    delta: float | None,
    calibration: ScoredResults,
    bound: Bound = "hoeffding-bentkus",
    *,
    weights: NDArray[np.float64] | None = None,
) -> Certificate:
    """Certify a monotone risk of losses in [0, 1].

    Risk-controlling prediction sets (Bates et al., JACM 2021, theorem 1): the mean loss falls as
    the threshold grows, and so does every bound but "betting" (`rcir.risk.betting`), so that
    bisection finds the smallest certified threshold among those at which some set gains a true
    match. These come from the calibration queries, but nothing changes between them: they stand for
    all thresholds.

    Losses are of independent units. If the queries come in clusters, the unit is the cluster and
    its loss the mean of its queries', so that the certificate is for the queries of new clusters,
    each cluster counted alike (the sampling of Lee, Barber and Willett, "Distribution-free
    inference with hierarchical data", 2023).

    Args:
        risk: a monotone one.
        alpha, delta: see `order_statistic`.
        calibration: the scored calibration queries.
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
    bets = Bets(risk, calibration, weights)
    if bound == "betting" and delta is not None:
        threshold = bets.smallest_threshold(alpha, delta)
    else:
        threshold = _bisected(risk, calibration, _test_of(alpha, delta, bound))
    if threshold is not None:
        return Certificate(threshold, "conformal" if delta is None else bound, float(alpha))
    losses = bets.losses(calibration.match_thresholds()[-1:])[0][:, 0]
    lost = float(losses.mean())
    raise refusal(
        alpha,
        delta,
        calibration,
        minimum_alpha=bets.smallest_alpha(delta)
        if bound == "betting" and delta is not None
        else _smallest_alpha(losses, delta, bound),
        required_calibration=required_queries(alpha, delta, bound, lost),
        lacking=None if risk.first_match else (risk.lacking, lost),
    )


def _test_of(
    alpha: float, delta: float | None, bound: Bound
) -> Callable[[NDArray[np.float64]], bool]:
    """Return the test whether losses certify a level."""
    if delta is None:
        return lambda losses: (math.fsum(losses) + 1) / (len(losses) + 1) <= alpha
    return lambda losses: p_value(math.fsum(losses), len(losses), alpha, bound) <= delta


def _bisected(
    risk: Risk, scored: ScoredResults, test: Callable[[NDArray[np.float64]], bool]
) -> float | None:
    """Return the smallest threshold whose losses pass a test; None if the largest sets do not."""
    thresholds = scored.match_thresholds()
    smallest = bisect_left(
        range(len(thresholds)),
        True,
        key=lambda i: test(risk.unit_losses(scored, thresholds[i : i + 1])[:, 0]),
    )
    return float(thresholds[smallest]) if smallest < len(thresholds) else None


def _smallest_alpha(losses: NDArray[np.float64], delta: float | None, bound: Bound) -> float | None:
    """Return the smallest alpha that losses certify; None if none below 1 is."""
    n, total = len(losses), math.fsum(losses)
    if delta is None:
        smallest = (total + 1) / (n + 1)
    else:
        smallest = mean_bound(total, n, delta, bound)
        step = math.ulp(smallest)
        while smallest < 1 and not _test_of(smallest, delta, bound)(losses):
            smallest, step = smallest + step, 2 * step  # the inverse was rounded down
    return smallest if smallest < 1 else None
