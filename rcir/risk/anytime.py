"""Calibration while labelled queries arrive: certificates that hold at every number of queries.

One may look after every query, and stop when the sets are small enough. For a fixed threshold the
misses are independent draws of mean R, its risk. Whoever bets that R is below alpha owns, after m
misses among n, the likelihood ratio against alpha averaged over all risks q in (0, alpha) alike,

    E_n(m) = mean over q of (q / alpha)^m ((1 - q) / (1 - alpha))^(n - m),

a non-negative supermartingale if R >= alpha: each factor has mean R q / alpha + (1 - R) (1 - q) /
(1 - alpha), which is 1 at R = alpha and falls as R grows. So it ever reaches 1 / delta with
probability at most delta (Ville). E_n(m) falls in m, and M_n is the largest m at which it is at
least 1 / delta. It grows in alpha: with q = alpha u, u uniform, every (1 - alpha u) / (1 - alpha)
does.

The thresholds calibrated at all n are valid together. Let t* be the smallest of risk at most
alpha. A bad threshold of any n lies below t*, and at most M_n of the n scores lie above it, so
at most M_n scores are at or above t*. A score is, with probability at least alpha. Then the bet
on that one event, fixed beforehand, owned 1 / delta at n: all bad calibrations together have
probability delta at most.

The prior is uniform. Priors closer to alpha allow a little more for large n and need more queries
for a first certificate.

Sources: Xu et al. (Active, anytime-valid risk controlling prediction sets, NeurIPS 2024), the
statement; Howard and Ramdas (Sequential estimation of quantiles, Bernoulli 28, 2022), time-uniform
bounds of quantiles, which these are for 0/1 losses; Robbins (Ann. Math. Statist. 41, 1970), the
mixture.
"""

from __future__ import annotations

import math
from numbers import Integral

from scipy.special import betainc, betaln

from rcir.errors import InvalidData
from rcir.risk.bounds import check_level, fewest_queries, most_misses, smallest_mean


def anytime_allowed_misses(n: int, alpha: float, delta: float) -> int:
    """The largest number of misses among the first n queries that certifies a risk of alpha.

    With probability at least 1 - delta, no threshold calibrated by this number at any n has a risk
    above alpha: M_n = ``max{m : E_n(m) >= 1 / delta}``.

    Args:
        n: number of calibration queries so far, at least 0.
        alpha: risk to certify, in (0, 1), fixed beforehand.
        delta: probability, in (0, 1), that any certificate is wrong.

    Returns:
        An integer in {-1, ..., n - 1}, not falling as n grows; -1 if not even 0 misses certify.

    Raises:
        InvalidRiskLevel: alpha or delta is out of range.
        InvalidData: n is no integer of at least 0.

    Example:
        >>> [anytime_allowed_misses(n, 0.1, 0.1) for n in (33, 34, 1000)]
        [-1, 0, 74]
    """
    alpha, delta = check_level("alpha", alpha), check_level("delta", delta)
    if not isinstance(n, Integral) or n < 0:
        raise InvalidData(f"n is {n!r}; a number of queries is an integer, at least 0")
    return most_misses(n, lambda misses: _p_value(misses, n, alpha) <= delta)


def anytime_miss_rate_bound(misses: int, n: int, delta: float) -> float:
    """The smallest alpha that this number of misses certifies, 1 if there is none below.

    The inverse of `anytime_allowed_misses`: an upper confidence bound of the miss rate of a fixed
    threshold, valid at every n together.

    Raises:
        InvalidRiskLevel: delta is out of range.
        InvalidData: misses or n are no integers with 0 <= misses <= n and n >= 1.

    Example:
        >>> bound = anytime_miss_rate_bound(74, 1000, 0.1)
        >>> 0.099 < bound <= 0.1
        True
    """
    delta = check_level("delta", delta)
    whole = isinstance(misses, Integral) and isinstance(n, Integral)
    if not whole or not 0 <= misses <= n or n < 1:
        raise InvalidData(
            f"misses is {misses!r} of n = {n!r}; needed: integers, 0 <= misses <= n and n >= 1"
        )
    if misses == n:
        return 1.0
    lowest = max(misses / n, math.ulp(0.0))
    return smallest_mean(lambda alpha: _p_value(misses, n, alpha), lowest, delta)


def anytime_required_calibration(alpha: float, delta: float, unmatched: float = 0.0) -> int | None:
    """A number of queries with which alpha can be certified, though one looks at every number.

    Args:
        alpha, delta: as in `anytime_allowed_misses`.
        unmatched: share in [0, 1] of queries that no set size serves; they count as misses.

    Returns:
        The smallest number if `unmatched` is 0, else about the smallest; None if there is none
        below a billion.

    Example:
        >>> anytime_required_calibration(0.1, 0.1)
        34
    """
    return fewest_queries(
        lambda n: anytime_allowed_misses(n, alpha, delta) >= math.ceil(unmatched * n)
    )


def _p_value(misses: int, n: int, alpha: float) -> float:
    """The inverse of E_n(misses), 1 where that is less than 1."""
    below = float(betainc(misses + 1, n - misses + 1, alpha))
    if below == 0:
        return 1.0
    log_wealth = (
        float(betaln(misses + 1, n - misses + 1))
        + math.log(below)
        - (misses + 1) * math.log(alpha)
        - (n - misses) * math.log1p(-alpha)
    )
    return math.exp(-max(log_wealth, 0.0))
