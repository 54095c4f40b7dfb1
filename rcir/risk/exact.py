"""The miss risk of independent queries: certified exactly, by order statistics of match scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, get_args

import numpy as np

from rcir.errors import InvalidConfig, InvalidRiskLevel
from rcir.risk.bounds import (
    Bound,
    Certificate,
    Holds,
    allowed_misses,
    check_bound,
    check_level,
    miss_rate_bound,
)
from rcir.risk.refusals import refusal, required_queries
from rcir.risk.results import ScoredResults
from rcir.risk.sequential import (
    anytime_allowed_misses,
    anytime_miss_rate_bound,
    anytime_required_calibration,
    band_required_calibration,
    local_level,
)


class CountingRule(NamedTuple):
    """A rule by which numbers of misses among the calibration queries certify a risk."""

    bound: str
    allowed: Callable[[float], int]  # the most misses that certify an alpha
    smallest: Callable[[int], float]  # the smallest alpha that misses certify
    required: Callable[[float], int | None]  # calibration queries with which alpha is certified


def order_statistic(
    alpha: float,
    delta: float | None,
    calibration: ScoredResults,
    bound: Bound = "binomial",
    *,
    holds: Holds = "once",
) -> Certificate:
    """Certify the miss risk of independent queries: exact with the binomial bound.

    With s_i the match score of calibration query i, the smallest threshold that certifies
    (alpha, delta) is the (M + 1)-th largest s_i, M = `allowed_misses`. If its risk were above
    alpha, at most M of the n scores would lie at or above a t* that each reaches with probability
    alpha or more, which happens with probability at most delta. The certified level is the smallest
    that allows the same number of misses; it depends on n, alpha and delta only, so that it may be
    stated. "At every moment" it is alpha, because one level is fixed for all n.

    Args:
        alpha: share of queries, in (0, 1), whose set may hold no true match.
        delta: probability, in (0, 1), that the calibration queries mislead; None for a risk of at
            most alpha on average over calibrations (conformal risk control, Angelopoulos et al.,
            ICLR 2024, theorem 1).
        calibration: the scored calibration queries; `match_score` is all that counts.
        bound: see `rcir.risk.p_value`.
        holds: "once"; "for all alphas", for an alpha that is chosen after looking, by a band of
            equal local levels, whatever the bound; or "at every moment", for one alpha fixed
            beforehand while calibration queries arrive one by one, by a test supermartingale,
            whatever the bound.

    Raises:
        InvalidRiskLevel: alpha or delta is out of range.
        RiskUnattainable: no threshold is certified.
    """
    rule = _rule_of(calibration, delta, bound, holds)
    scores, unmatched = calibration.ascending_match_scores, _unmatched(calibration)
    allowed = rule.allowed(alpha)
    if allowed < unmatched:
        raise refusal(
            alpha,
            delta,
            calibration,
            minimum_alpha=_smallest_alpha(rule, unmatched),
            required_calibration=rule.required(alpha),
        )
    everywhere = holds == "at every moment"
    certified = float(alpha) if everywhere else min(alpha, rule.smallest(allowed))
    return Certificate(float(scores[len(scores) - 1 - allowed]), rule.bound, certified)


def minimum_alpha(
    delta: float | None,
    calibration: ScoredResults,
    bound: Bound = "binomial",
    *,
    holds: Holds = "once",
) -> float | None:
    """Return the smallest alpha of the miss risk that `order_statistic` certifies at delta.

    Args:
        delta, calibration, bound, holds: see `order_statistic`.

    Returns:
        The level; None if none below 1 can be certified.

    Example:
        >>> scores = np.repeat(np.array([0, 1, np.inf], np.float32), [860, 120, 20])
        >>> round(minimum_alpha(0.1, ScoredResults(scores, depth=50)), 4)
        0.0269
    """
    rule = _rule_of(calibration, delta, bound, holds)
    return _smallest_alpha(rule, _unmatched(calibration))


def _unmatched(calibration: ScoredResults) -> int:
    """Return the number of queries without a match, which no set serves."""
    scores = calibration.ascending_match_scores
    return len(scores) - int(np.searchsorted(scores, np.inf))


def _smallest_alpha(rule: CountingRule, unmatched: int) -> float | None:
    smallest = rule.smallest(unmatched)
    step = math.ulp(smallest)
    while smallest < 1:
        if rule.allowed(smallest) >= unmatched:
            return smallest
        smallest, step = smallest + step, 2 * step  # the inverse was rounded down
    return None


def _rule_of(
    calibration: ScoredResults, delta: float | None, bound: Bound, holds: Holds
) -> CountingRule:
    n = len(calibration)
    return counting_rule(n, delta, bound, holds, lost=_unmatched(calibration) / n)


def counting_rule(
    n: int, delta: float | None, bound: Bound, holds: Holds, *, lost: float = 0.0
) -> CountingRule:
    """Return the rule for n calibration queries, of which no set serves the share `lost`."""
    check_bound(bound)
    if holds not in get_args(Holds):
        raise InvalidConfig(f"holds is {holds!r}; choose one of {', '.join(get_args(Holds))}")
    if delta is None:
        if holds != "once":
            raise InvalidRiskLevel(f"levels that hold {holds} need a delta: give one, such as 0.1")

        def allowed_on_average(alpha: float) -> int:
            # (misses + 1) / (n + 1) <= alpha
            exact = Fraction(check_level("alpha", alpha)) * (n + 1)
            return min(math.floor(exact) - 1, n - 1)

        return CountingRule(
            "conformal",
            allowed_on_average,
            lambda misses: (misses + 1) / (n + 1),
            lambda alpha: required_queries(alpha, None, bound, lost),
        )
    level = check_level("delta", delta)
    if holds == "at every moment":
        return CountingRule(
            "anytime",
            lambda alpha: anytime_allowed_misses(n, alpha, level),
            lambda misses: anytime_miss_rate_bound(misses, n, level),
            lambda alpha: anytime_required_calibration(alpha, level, lost),
        )
    if holds == "for all alphas":
        return CountingRule(
            "band",
            lambda alpha: allowed_misses(n, alpha, local_level(n, level)),
            lambda misses: miss_rate_bound(misses, n, local_level(n, level)),
            lambda alpha: band_required_calibration(alpha, level, lost),
        )
    return CountingRule(
        bound,
        lambda alpha: allowed_misses(n, alpha, level, bound),
        lambda misses: miss_rate_bound(misses, n, level, bound),
        lambda alpha: required_queries(alpha, level, bound, lost),
    )
